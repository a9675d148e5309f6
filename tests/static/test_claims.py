"""Claims of machine code can fail: made-up orders of instructions, right and wrong."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels.runtime import jit
from tests.static import claims
from tests.static.claims import EXP, NONE_IN_FLIGHT, ONE_IN_FLIGHT

ONE, NONE = (ONE_IN_FLIGHT, 1), (NONE_IN_FLIGHT, 1)


def facts(role: str, *order: tuple[str, int], **instructions: int) -> Any:
    return SimpleNamespace(
        roles={role: SimpleNamespace(order=list(order), instructions=instructions)}
    )


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [
        ("dualkv.bwd", [ONE, (EXP, 32), NONE], [ONE, NONE, (EXP, 32)]),
        ("dualkv.bwd_dkv", [ONE, (EXP, 16), (EXP, 16), NONE], [ONE, (EXP, 16), NONE, (EXP, 16)]),
        ("dualkv.bwd_dq", [(EXP, 9), ONE, (EXP, 64), NONE], [(EXP, 64), ONE, (EXP, 9), NONE]),
        ("dualkv.fwd", [ONE, NONE, ONE, (EXP, 8), NONE, ONE, NONE], [ONE, NONE] * 2),
        ("dualkv.fwd", [ONE, NONE] * 3, [ONE, NONE, ONE, NONE, ONE, (EXP, 2), NONE]),
        ("sparse_ring.fwd", [ONE, (EXP, 34), NONE], [ONE, (EXP, 34), ONE, (EXP, 34), NONE]),
    ],
)
def test_of_an_order(kernel: str, right: list[Any], wrong: list[Any]) -> None:
    found = claims.of(kernel, SimpleNamespace(dtype="bfloat16", D=128))
    role = "rows" if kernel == "sparse_ring.fwd" else "mma"
    for order, holds in ((right, True), (wrong, False), ([], False)):
        said = [x for claim in found for x in claim(facts(role, *order))]
        assert bool(said) != holds, (order, said)


@pytest.mark.parametrize("kernel", ["bwd_dkv", "bwd_dkv_columns", "bwd_dq"])
def test_products_and_exponentials_overlap(kernel: str) -> None:
    (claim,) = claims.of(f"sparse_ring.{kernel}", SimpleNamespace(dtype="float16", D=64))
    role = "rows" if kernel == "bwd_dq" else "grads"
    few, many = {"HGMMA": 9, "R2UR": 8}, {"HGMMA": 9, "R2UR": 9}
    assert not claim(facts(role, ONE, (EXP, 32), ("HGMMA", 4), **few))
    assert claim(facts(role, ONE, (EXP, 32), ("HGMMA", 4), **many))
    assert claim(facts(role, ONE, (EXP, 31), ("HGMMA", 4), (EXP, 1), **few))
    assert claim(facts(role, NONE, (EXP, 32), **few))


def test_which_variants_have_claims() -> None:
    """A kernel or a dtype of another name would leave a claim unasked."""
    found = {
        str(kernel): sum(bool(claims.of(str(kernel), v)) for v in kernel.module.VARIANTS)
        for kernel in jit.kernel_modules()
    }
    assert {name: n for name, n in found.items() if n} == {
        "dualkv.bwd": 1,
        "dualkv.bwd_dkv": 2,
        "dualkv.bwd_dq": 3,
        "dualkv.fwd": 4,
        "sparse_ring.bwd_dkv": 4,
        "sparse_ring.bwd_dkv_columns": 4,
        "sparse_ring.bwd_dq": 4,
        "sparse_ring.fwd": 1,
    }
