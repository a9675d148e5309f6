"""What the gated norm's kernels must produce: shared by the emulated and the device tier.

Sums are in fp32 and each result is rounded once, so its error is half a unit in the last place.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.norm import ops
from qla_kernels.norm.ops import NormBackward
from reference import norm
from tests.compare import FP32, assert_close

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: FP32}

Forward = Callable[..., Tensor]
Backward = Callable[..., NormBackward]


class NormCase(NamedTuple):
    """The arguments of gated_norm_fwd, and dy."""

    x: Tensor
    gate: Tensor
    weight: Tensor
    tables: list[Tensor]
    eps: float
    silu: bool
    dy: Tensor


def case(
    shape: tuple[int, ...],
    where: str,
    dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype = torch.bfloat16,
    silu: bool = True,
    eps: float = 1e-6,
    padding: int = 0,
    bounds: torch.dtype = torch.int32,
    projection: int = 0,
) -> NormCase:
    """Random inputs [.., V]. With `projection`, x and gate are slices of [tokens, columns].

    `padding` tokens behind the last sequence are NaN, and so are `projection` columns on either
    side of a slice.
    """
    *tokens, V = shape
    *tokens, heads = tokens if len(tokens) > 1 else [*tokens, 1]

    def normal(around: int) -> Tensor:
        wide = torch.full((*tokens, heads * V + 2 * around), torch.nan, dtype=dtype)
        inner = slice(around, around + heads * V)
        end = tokens[-1] - padding
        wide[..., :end, inner] = torch.randn(*tokens[:-1], end, heads * V)
        found = wide.to(where)[..., inner].unflatten(-1, (heads, V))
        return found.squeeze(-2) if len(shape) == 2 else found

    tables = [torch.tensor([0, 1, tokens[-1] - padding]).to(where, bounds)] if padding else []
    weight = torch.randn(V).to(where, weights)
    return NormCase(
        normal(projection), normal(projection), weight, tables, eps, silu, normal(0).contiguous()
    )


def exact(c: NormCase) -> tuple[Tensor, norm.NormGradients]:
    """y and the gradients in fp64, on the CPU, from what the kernels are given; 0 for padding."""
    live = live_rows(c)
    x, gate, dy = (t.cpu().double()[live] for t in (c.x, c.gate, c.dy))
    given = x, gate, c.weight.cpu().double(), c.eps, not c.silu
    dx, dgate, dweight = norm.gated_rms_norm_backward(dy, *given)
    rows = [norm.gated_rms_norm(*given), dx, dgate]
    for i, found in enumerate(rows):
        rows[i] = torch.zeros(c.x.shape, dtype=torch.float64)
        rows[i][live] = found
    return rows[0], norm.NormGradients(*rows[1:], dweight)


def live_rows(c: NormCase) -> tuple[slice, ...]:
    """The index of the tokens that belong to a sequence."""
    end = slice(int(c.tables[0][-1]) if c.tables else None)
    return (slice(None), end) if c.x.dim() == 4 else (end,)


def check(
    c: NormCase, fwd: Forward = ops.gated_norm_fwd, bwd: Backward = ops.gated_norm_bwd
) -> None:
    """Both directions against fp64."""
    *call, dy = c
    y, done = fwd(*call), bwd(dy, *call)
    want, grads = exact(c)
    found = {"y": (y, want)}
    found |= {n: (a, b) for n, a, b in zip(done._fields, done, grads, strict=True)}
    for name, (got, truth) in found.items():
        assert got.is_contiguous()
        assert_close(name, got.cpu(), truth, ROUNDING[got.dtype])
    padding = torch.ones(c.x.shape, dtype=torch.bool)
    padding[live_rows(c)] = False
    for got in (y, done.dx, done.dgate):
        assert not got.cpu()[padding].any(), "rows of padding are not 0"
