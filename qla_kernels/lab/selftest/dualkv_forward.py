"""Calls of the CUDA forward of shared-prompt attention, and what their results must be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv import SharedLayout, launch
from qla_kernels.dualkv.ops import SharedForward
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime.cpu import reference

Groups = Sequence[tuple[int, Sequence[int]]]  # tokens of a prompt, and of each response

# relative L2 error of o: P and o are rounded to the dtype
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
LSE_LIMIT = 1e-5  # base 2, of numbers of size 10: fp32 sums of up to thousands of terms

# A query tile has 128 / pack tokens, a key tile 128, or 80 at head size 256: lengths around both,
# and below one.
GROUPS: dict[str, Groups] = {
    "edges": [(128, [31, 32, 33]), (127, [1, 129]), (129, [64])],
    "short": [(5, [3, 0, 4]), (1, [1]), (0, [4, 3]), (6, [])],
    "long": [(300, [3, 140]), (40, [200])],
    "eighties": [(80, [79, 16, 17]), (81, [160]), (240, [1, 97])],
}
# What the design calls edge cases.
FEW_TOKENS: dict[str, Groups] = {
    "one of each": [(5, [3, 1, 4])],
    "unequal groups": [(7, [2, 9]), (1, [1]), (12, [5, 5, 5, 5]), (3, [8])],
    "no response": [(6, [])],
    "no response in between": [(4, [2]), (5, []), (3, [1, 1])],
    "empty responses": [(5, [0, 3, 0, 2])],
    "only empty responses": [(5, [0, 0])],
    "one response": [(9, [7])],
    "a prompt of one token": [(1, [4, 2])],
    "responses of one token": [(6, [1, 1, 1])],
    "no prompt": [(0, [4, 3]), (2, [1])],
    "64 responses": [(3, [1 + i % 3 for i in range(64)])],
    "a long response": [(4, [40, 1, 2])],
    "nothing": [(0, []), (0, [0])],
}
Given = tuple[Groups, tuple[int, int]]  # and key and query heads
INPUTS: list[Given] = [(groups, (1, 4)) for groups in GROUPS.values()]
LARGE: list[Given] = [(groups, (2, 8)) for groups in (GROUPS | FEW_TOKENS).values()]
FOREST = ([5, 130, 40, 3, 7, 20, 150], [-1, 0, 1, 1, 0, 4, -1])  # lengths, parents


class SharedCall(NamedTuple):
    """The arguments of a forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: SharedLayout
    scale: float
    q_shift: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments as the operator takes them."""
        heads = self.q.shape[1], self.k.shape[1]
        tables = self.layout.prepare(*heads, self.q_shift, head_dim=self.q.shape[2])
        return self.q, self.k, self.v, tables, self.scale, self.q_shift


def qkv(
    tokens: int,
    heads: tuple[int, int] = (2, 4),
    size: int = 8,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, H, D], k and v [T, Hk, D], for heads = (Hk, H); logits of about `spread`."""
    kv_heads, num_heads = heads
    q = spread * torch.randn(tokens, num_heads, size, dtype=dtype)
    k, v = (torch.randn(tokens, kv_heads, size, dtype=dtype) for _ in range(2))
    return q, k, v


def call(
    layout: SharedLayout | Groups,
    heads: tuple[int, int] = (1, 4),
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **others: Any,
) -> SharedCall:
    """Returns random tensors for heads = (Hk, H)."""
    layout = layout if isinstance(layout, SharedLayout) else SharedLayout.from_lengths(layout)
    x = qkv(layout.num_tokens, heads, size, torch.float32, others.pop("spread", 1.0))
    q, k, v = (t.to(device, dtype) for t in x)
    scale = others.pop("scale", size**-0.5)
    return SharedCall(q, k, v, layout.to(device), scale, **others)


def wanted(x: SharedCall) -> Any:
    """Returns o and natural lse in fp64, of the inputs as they are."""
    exact = (t.double() for t in (x.q, x.k, x.v))
    return reference().dualkv.by_nodes(*exact, x.layout.nodes, x.scale, x.q_shift)


def check(x: SharedCall, done: SharedForward) -> None:
    """Compares o and lse with fp64."""
    want = wanted(x)
    assert done.o.dtype == x.q.dtype
    assert_close("o", done.o, want.o, LIMITS[x.q.dtype])
    assert_close("lse2", done.lse2.double(), want.lse * 1.4426950408889634, LSE_LIMIT, at_least=1.0)


def _fwd(variant: Any, given: Given, device: str) -> None:
    x = call(*given, size=variant.D, dtype=dtype_of(variant))
    check(x, to(launch.dualkv_fwd(*to(x, device).arguments()), "cpu"))


CASES = (
    # both dtypes and all sizes are emulated; the static tier assembles the others
    Cases(("dualkv.fwd",), _fwd, INPUTS, LARGE, emulated=("bf16-d128", "fp16-d64", "bf16-d256")),
)
