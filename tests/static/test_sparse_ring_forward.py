"""What the forward's results rest on in machine code beyond what schedules say."""

import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels.lab import inspect
from qla_kernels.runtime import jit
from qla_kernels.sparse_ring.kernels import fwd

pytestmark = pytest.mark.usefixtures("disassembler")
KERNEL = jit.Kernel("sparse_ring", "fwd", fwd)


def test_q_and_p_have_registers_of_their_own(tmp_path: Path) -> None:
    """ptxas 13.0 has given two such operands the same ones, in another kernel of this size."""
    inspect.facts(KERNEL, fwd.Variant("bfloat16", 64), tmp_path)
    found = re.findall(r"HGMMA\S* R\d+, R(\d+), gdesc", (tmp_path / "kernel.sass").read_text())
    step = 4 + 4  # of S and of P V, each once in the loop and once outside
    assert len(found) == 2 * step
    assert len(set(found)) == step
