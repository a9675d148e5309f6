"""What speed rests on in machine code beyond what schedules say; checked where variants are.

Each function takes a variant's facts and returns what is not so.
"""

import itertools
from collections.abc import Callable
from typing import Any

from qla_kernels.lab.inspect.gather import Facts, RoleFacts

WAIT = "WARPGROUP.DEPBAR.LE"
ONE_IN_FLIGHT, NONE_IN_FLIGHT = f"{WAIT} 0x1", f"{WAIT} 0x0"
PRODUCTS = ("HGMMA", NONE_IN_FLIGHT, ONE_IN_FLIGHT)
EXP = "MUFU.EX2"


def between_waits(role: RoleFacts) -> list[tuple[str, int]]:
    """Each wait but the last, and the exponentials behind it, up to the next."""
    order = role.order
    waits = [i for i, (name, _) in enumerate(order) if name.startswith(WAIT)]
    return [
        (order[a][0], sum(n for name, n in order[a:b] if name.startswith(EXP)))
        for a, b in itertools.pairwise(waits)
    ]


def exponentials_under_dp(wanted: int) -> Callable[[Facts], list[str]]:
    """All of them stand between the wait for S and the wait for dP."""

    def check(facts: Facts) -> list[str]:
        found = [n for wait, n in between_waits(facts.roles["mma"]) if wait == ONE_IN_FLIGHT]
        if found[:1] == [wanted]:
            return []
        return [f"exponentials under dP: {found}; the first must be {wanted}"]

    return check


def v_is_let_go_before_the_exponentials(facts: Facts) -> list[str]:
    """Of an item's first step and of the dense one; in the few masked ones ptxas may choose.

    At head size 256 it may in all: exponentials are a quarter of the products' time there, so a
    step leaves V's slot enough time to be filled again.
    """
    between, counts = None, []
    for name, times in facts.roles["mma"].order:
        if name == ONE_IN_FLIGHT:
            between = 0
        elif name == NONE_IN_FLIGHT and between is not None:
            counts.append(between)
            between = None
        elif name == EXP and between is not None:
            between += times
    if len(counts) == 3 and counts[0] == counts[2] == 0:
        return []
    return [f"exponentials before V is let go: {counts}; need none in the first and third of three"]


def products_and_exponentials_overlap(role: str) -> Callable[[Facts], list[str]]:
    """All of a step's exponentials, 32 a thread, run under the product for dP.

    And descriptors of operands are computed in uniform registers: where ptxas does not know that
    all lanes are at the same step, several R2UR stand before each wgmma.
    """

    def check(facts: Facts) -> list[str]:
        order, counts = iter(facts.roles[role].order), facts.roles[role].instructions
        if all(name != ONE_IN_FLIGHT for name, _ in order):
            return [f"role {role} never waits with a product in flight"]
        under = itertools.takewhile(lambda step: step[0] not in PRODUCTS, order)
        found = sum(times for name, times in under if name == EXP)
        said = [] if found == 32 else [f"{found} exponentials run under dP; need 32"]
        moved, products = counts.get("R2UR", 0), counts.get("HGMMA", 0)
        return said + ([] if moved < products else [f"{moved} R2UR for {products} HGMMA"])

    return check


def softmax_beside_the_product_before(facts: Facts) -> list[str]:
    """P V of the step before is still running: 32 scores of a thread, 2 factors."""
    found = [n for wait, n in between_waits(facts.roles["rows"]) if wait == ONE_IN_FLIGHT]
    return [] if found == [34] else [f"exponentials beside P V: {found}; need [34]"]


def of(kernel: str, variant: Any) -> list[Callable[[Facts], list[str]]]:
    """The claims of a variant; where dtypes differ elsewhere alone, of one dtype."""
    bf16 = getattr(variant, "dtype", "") == "bfloat16"
    match kernel:
        case "dualkv.bwd" | "dualkv.bwd_dkv" if bf16:
            return [exponentials_under_dp(32)]
        case "dualkv.bwd_dq" if bf16:
            return [exponentials_under_dp(32 if variant.D == 256 else 64)]
        case "dualkv.fwd" if variant.D < 256:
            return [v_is_let_go_before_the_exponentials]
        case "sparse_ring.bwd_dkv" | "sparse_ring.bwd_dkv_columns":
            return [products_and_exponentials_overlap("grads")]
        case "sparse_ring.bwd_dq":
            return [products_and_exponentials_overlap("rows")]
        case "sparse_ring.fwd" if bf16 and variant.D == 128:
            return [softmax_beside_the_product_before]
    return []
