"""`CausalConv`: the two operators as one differentiable function, and two functions that call it.

Autocast does not change dtypes here: it has no rule for either operator. The gradients are not
differentiable in turn; differentiating them raises Unsupported.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv import ops
from qla_kernels.conv.validate import OP
from qla_kernels.runtime.derivatives import refuse_second_derivative, wants_gradients

NO_NORM = (0, 0)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    tables: list[Tensor],
    norm: tuple[int, int] = NO_NORM,
) -> Tensor:
    """Runs a call whose arguments have been checked; x and the result are [B, T, C].

    The first norm[0] * norm[1] channels are heads of norm[1] channels, which are normalised.
    """
    return convolve_sections(x, weight, bias, silu, tables, norm, (x.shape[2],))[0]


def convolve_sections(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    tables: list[Tensor],
    norm: tuple[int, int],
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    """Runs `convolve`, and returns views of the result, of so many channels each; at most three.

    The backward reads their gradients where they are: nothing is put together.
    """
    if not wants_gradients((x, weight, bias)):  # autograd takes time
        y = ops.conv_fwd.replayed(x, weight, bias, tables, silu, *norm)
        return _sections(y, sizes)
    sections: tuple[Tensor, ...] = CausalConv.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, silu, norm, tuple(sizes), *tables
    )
    return sections


class CausalConv(torch.autograd.Function):
    """Runs conv_fwd, and conv_bwd in the backward. Saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        norm: tuple[int, int],
        sizes: tuple[int, ...],
        *tables: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.options = silu, *norm
        ctx.save_for_backward(x, weight, bias, *tables)
        y = ops.conv_fwd.replayed(x, weight, bias, list(tables), silu, *norm)
        return _sections(y, sizes)

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *tables = ctx.saved_tensors
        done = ops.conv_bwd.replayed(dy, x, weight, bias, tables, *ctx.options, *others)
        return *done, None, None, None, *[None] * len(tables)


def _sections(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return (y,) if len(sizes) == 1 else torch.split(y, list(sizes), 2)
