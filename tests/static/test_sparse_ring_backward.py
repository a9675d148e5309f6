"""What ptxas makes of the backward's loops."""

import itertools

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import inspect, jit
from qla_kernels.sparse_ring.kernels import bwd_dkv, bwd_dkv_columns, bwd_dq

pytestmark = pytest.mark.usefixtures("disassembler")
PRODUCTS = ("HGMMA", "WARPGROUP.DEPBAR.LE 0x0", "WARPGROUP.DEPBAR.LE 0x1")
CASES = [
    pytest.param(module, role, variant, id=jit.label(module, variant))
    for module, role in ((bwd_dkv, "grads"), (bwd_dkv_columns, "grads"), (bwd_dq, "rows"))
    for variant in module.VARIANTS
]


@pytest.mark.parametrize(("module", "role", "variant"), CASES)
def test_products_and_exponentials_overlap(module, role, variant):
    """All of a step's exponentials, 32 a thread, run under the product for dP.

    And descriptors of operands are computed in uniform registers: where ptxas does not know that
    all lanes are at the same step, several R2UR stand before each wgmma.
    """
    name = module.__name__.rpartition(".")[2]
    found = inspect.facts(jit.Kernel("sparse_ring", name, module), variant).roles[role]
    order = iter(found.order)
    assert any(name == "WARPGROUP.DEPBAR.LE 0x1" for name, _ in order)
    under = itertools.takewhile(lambda step: step[0] not in PRODUCTS, order)
    assert sum(times for name, times in under if name == "MUFU.EX2") == 32
    assert found.instructions["R2UR"] < found.instructions["HGMMA"]
