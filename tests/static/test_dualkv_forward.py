"""What ptxas makes of the forward's steps: under which of them a product is in flight."""

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import inspect, jit
from qla_kernels.dualkv.kernels import fwd

pytestmark = pytest.mark.usefixtures("disassembler")
ONE_IN_FLIGHT, NONE_IN_FLIGHT = "WARPGROUP.DEPBAR.LE 0x1", "WARPGROUP.DEPBAR.LE 0x0"


@pytest.mark.parametrize("variant", [v for v in fwd.VARIANTS if v.D < 256], ids=jit.variant_id)
def test_v_is_let_go_before_the_exponentials(variant):
    """Of an item's first step and of the dense one; in the few masked ones ptxas may choose.

    At head size 256 it may in all: exponentials are a quarter of the products' time there, so a
    step leaves V's slot enough time to be filled again.
    """
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
    first, _, dense = counts
    assert first == dense == 0
