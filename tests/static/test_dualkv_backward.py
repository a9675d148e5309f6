"""Where the exponentials of the backward end up: under a product, or behind the wait for it."""

from typing import Any

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import inspect, jit

KERNELS = {kernel.name: kernel for kernel in jit.kernel_modules("dualkv")}
WAIT = "WARPGROUP.DEPBAR.LE"


@pytest.mark.parametrize(
    ("name", "exponentials"),
    [("bwd", 32), ("bwd_dkv", 32), ("bwd_dq", {64: 64, 128: 64, 256: 32})],
)
def test_exponentials_run_under_the_product_of_dp(name: str, exponentials: Any) -> None:
    """All of them stand between the wait for S and the wait for dP; dtypes differ elsewhere."""
    kernel: jit.Kernel = KERNELS[name]
    for variant in (v for v in kernel.module.VARIANTS if v.dtype == "bfloat16"):
        facts = inspect.facts(kernel, variant)
        if facts.unchecked:
            pytest.skip("; ".join(facts.unchecked))
        want = exponentials if isinstance(exponentials, int) else exponentials[variant.D]
        assert _between_waits(facts.roles["mma"].order) == want, variant


def _between_waits(order: list[Any]) -> int:
    """EX2 behind the first wait that leaves a product in flight, up to the next wait."""
    shown = [(op, count) for op, count in order if op.startswith((WAIT, "MUFU.EX2"))]
    first = next(i for i, (op, _) in enumerate(shown) if op == f"{WAIT} 0x1")
    counts = []
    for op, count in shown[first + 1 :]:
        if op.startswith(WAIT):
            break
        counts.append(count)
    return sum(counts)
