"""What ptxas makes of the loops of the observed window."""

import itertools

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels.lab import inspect
from qla_kernels.runtime import jit
from qla_kernels.sparse_ring.kernels import window_lse, window_mass

pytestmark = pytest.mark.usefixtures("disassembler")
WAIT = "WARPGROUP.DEPBAR.LE 0x0"
CASES = [
    pytest.param(module, role, id=module.__name__)
    for module, role in ((window_lse, "rows"), (window_mass, "keys"))
]


@pytest.mark.parametrize(("module", "role"), CASES)
def test_a_product_is_in_flight_beside_all_exponentials(module, role):
    """The loop's two waits are each followed by the next product, and that by the exponentials of
    64 scores a thread, in a branch with a mask and in one without.
    """
    name = module.__name__.rpartition(".")[2]
    kernel = jit.Kernel("sparse_ring", name, module)
    order = inspect.facts(kernel, module.VARIANTS[0]).roles[role].order
    waits = [i for i, (name, _) in enumerate(order) if name == WAIT]
    for wait, following in itertools.pairwise(waits[:3]):
        steps = order[wait + 1 : following]
        products = [i for i, (name, _) in enumerate(steps) if name == "HGMMA"]
        assert _exponentials(steps[: products[0]]) == 0
        assert _exponentials(steps[products[-1] :]) >= 2 * 64


def _exponentials(steps):
    return sum(times for name, times in steps if name == "MUFU.EX2")
