"""What the forward's speed, and its results, rest on in machine code beyond what schedules say."""

import itertools
import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import inspect, jit
from qla_kernels.sparse_ring.kernels import fwd

pytestmark = pytest.mark.usefixtures("disassembler")
KERNEL = jit.Kernel("sparse_ring", "fwd", fwd)


def test_the_softmax_runs_beside_the_product_before() -> None:
    order = inspect.facts(KERNEL, fwd.Variant("bfloat16", 128)).roles["rows"].order
    waits = [i for i, (name, _) in enumerate(order) if name.startswith("WARPGROUP.DEPBAR")]
    between = [
        sum(n for name, n in order[a:b] if name == "MUFU.EX2")
        for a, b in itertools.pairwise(waits)
        if order[a][0].endswith("0x1")  # P V of the step before is still running
    ]
    assert between == [34]  # 32 scores of a thread, 2 factors


def test_q_and_p_have_registers_of_their_own(tmp_path: Path) -> None:
    """ptxas 13.0 has given two such operands the same ones, in another kernel of this size."""
    inspect.facts(KERNEL, fwd.Variant("bfloat16", 64), tmp_path)
    found = re.findall(r"HGMMA\S* R\d+, R(\d+), gdesc", (tmp_path / "kernel.sass").read_text())
    step = 4 + 4  # of S and of P V, each once in the loop and once outside
    assert len(found) == 2 * step
    assert len(set(found)) == step
