"""`CausalConv`: the operators conv_fwd and conv_bwd as a function for autograd, and its callers.

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
    """Runs the convolution on checked arguments; differentiable. x and the result are [B, T, C].

    Args:
        x: the tokens.
        weight: [C, W].
        bias: [C], or None.
        silu: whether to apply SiLU to the result.
        tables: which tokens are of which sequence, as operators take it; see ops.py.
        norm: (heads, size): the first heads * size channels are heads of `size` channels, whose L2
            norm becomes 1. (0, 0) for none.
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
    """Runs `convolve` and splits the result by channels, as for q, k and v; returns the views.

    `sizes` are the numbers of channels of the views, at most three. The backward reads the gradient
    of each view from its own tensor, so autograd does not concatenate them.
    """
    if not wants_gradients((x, weight, bias)):  # autograd takes time
        y = ops.conv_fwd.replayed(x, weight, bias, tables, silu, *norm)
        return _sections(y, sizes)
    sections: tuple[Tensor, ...] = CausalConv.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, silu, norm, tuple(sizes), *tables
    )
    return sections


class CausalConv(torch.autograd.Function):
    """Runs conv_fwd, and conv_bwd in the backward. Saves nothing but its inputs."""

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
