"""`CausalConv`: the two operators as one differentiable function, and `convolve`, which calls it.

Autocast does not change dtypes here: it has no rule for either operator. The gradients are not
differentiable in turn; differentiating them raises Unsupported.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv import ops
from qla_kernels.conv.validate import OP
from qla_kernels.derivatives import refuse_second_derivative


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, tables: list[Tensor]
) -> Tensor:
    """Runs a call whose arguments have been checked; x and the result are [B, T, C]."""
    if not ops.wants_gradients(x, weight, bias):
        return ops.forward(x, weight, bias, tables, silu)  # autograd takes time
    y: Tensor = CausalConv.apply(x, weight, bias, silu, *tables)  # type: ignore[no-untyped-call]
    return y


class CausalConv(torch.autograd.Function):
    """Runs conv_fwd, and conv_bwd in the backward. Saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, *tables: Tensor
    ) -> Tensor:
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, *tables)
        return ops.forward(x, weight, bias, list(tables), silu)

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *tables = ctx.saved_tensors
        done = ops.backward(dy, x, weight, bias, tables, ctx.silu)
        return *done, None, *[None] * len(tables)
