"""Calls of the CUDA forward of shared-prompt attention, and what their results must be."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels import SharedLayout
from qla_kernels.dualkv.ops import SharedForward
from reference import dualkv
from tests.compare import assert_close
from tests.dualkv_inputs import Groups, qkv

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
FOREST = ([5, 130, 40, 3, 7, 20, 150], [-1, 0, 1, 1, 0, 4, -1])  # lengths, parents


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    layout: SharedLayout
    scale: float
    q_shift: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """As the operator takes them."""
        tables = self.layout.prepare(
            self.q.shape[1], self.k.shape[1], self.q_shift, self.q.shape[2]
        )
        return self.q, self.k, self.v, tables, self.scale, self.q_shift


def call(
    layout: SharedLayout | Groups,
    heads: tuple[int, int] = (1, 4),
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **others: Any,
) -> Call:
    """Random tensors for heads = (Hk, H)."""
    layout = layout if isinstance(layout, SharedLayout) else SharedLayout.from_lengths(layout)
    x = qkv(layout.num_tokens, heads, size, torch.float32, others.pop("spread", 1.0))
    q, k, v = (t.to(device, dtype) for t in x)
    scale = others.pop("scale", size**-0.5)
    return Call(q, k, v, layout.to(device), scale, **others)


def wanted(x: Call) -> Any:
    """o and natural lse in fp64, of the inputs as they are."""
    exact = (t.double() for t in (x.q, x.k, x.v))
    return dualkv.by_nodes(*exact, x.layout.nodes, x.scale, x.q_shift)


def check(x: Call, done: SharedForward) -> None:
    want = wanted(x)
    assert done.o.dtype == x.q.dtype
    assert_close("o", done.o, want.o, LIMITS[x.q.dtype])
    assert_close("lse2", done.lse2.double(), want.lse * 1.4426950408889634, LSE_LIMIT, at_least=1.0)
