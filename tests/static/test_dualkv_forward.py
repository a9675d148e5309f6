"""What ptxas makes of the forward's steps: under which of them a product is in flight."""

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import inspect, jit
from qla_kernels.dualkv.kernels import fwd
from qla_kernels.errors import Unsupported
from qla_kernels.inspect import sass

ONE_IN_FLIGHT, NONE_IN_FLIGHT = "WARPGROUP.DEPBAR.LE 0x1", "WARPGROUP.DEPBAR.LE 0x0"


@pytest.mark.parametrize("variant", fwd.VARIANTS, ids=str)
def test_the_exponentials_of_masked_steps_stand_between_the_waits(variant):
    """Of each of a thread's 64 scores, and of two maxima; the dense step waits in front of them."""
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))
    if sass.nvdisasm() is None:
        pytest.skip(f"no nvdisasm: {sass.HOW_TO_GET}")
    found = inspect.facts(jit.Kernel("dualkv", "fwd", fwd), variant)
    between, counts = None, []
    for name, times in found.roles["mma"].order:
        if name == ONE_IN_FLIGHT:
            between = 0
        elif name == NONE_IN_FLIGHT and between is not None:
            counts.append(between)
            between = None
        elif name == "MUFU.EX2" and between is not None:
            between += times
    assert [n > 60 for n in counts] == [True, True, False]
