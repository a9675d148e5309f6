"""`SharedPrefixAttention`: the operators dualkv_fwd and dualkv_bwd as a function for autograd.

Autocast does not change dtypes here: it has no rule for either operator. The gradients are not
differentiable in turn; differentiating them raises Unsupported.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qla_kernels.dualkv import ops
from qla_kernels.dualkv.validate import OP
from qla_kernels.runtime.derivatives import refuse_second_derivative


def natural_lse(lse2: Tensor) -> Tensor:
    """Converts the kernels' base-2 lse to the natural logarithm that callers get."""
    return lse2 * math.log(2)


class SharedPrefixAttention(torch.autograd.Function):
    """Runs dualkv_fwd, and dualkv_bwd in the backward; returns (o, lse), or (o, None).

    Besides its inputs it saves o and lse2 (4 bytes per token and head) for the backward. Both
    results are differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        q_shift: int,
        deterministic: bool,
        return_lse: bool,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs dualkv_fwd; returns (o, lse), lse None without return_lse."""
        done = ops.dualkv_fwd.replayed(q, k, v, list(tables), scale, q_shift)
        ctx.set_materialize_grads(False)  # an unused lse costs no tensor of zeros
        ctx.scale, ctx.q_shift, ctx.deterministic = scale, q_shift, deterministic
        ctx.save_for_backward(q, k, v, done.o, done.lse2, *tables)
        return done.o, natural_lse(done.lse2) if return_lse else None

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs dualkv_bwd; returns dq, dk, dv, and None for each further input."""
        q, k, v, o, lse2, *tables = ctx.saved_tensors
        if do is None:  # only lse was used
            do = o.new_zeros(()).expand(o.shape)
        grads = ops.dualkv_bwd.replayed(
            do, q, k, v, o, lse2, dlse, tables, ctx.scale, ctx.q_shift, ctx.deterministic
        )
        return *grads, *[None] * (4 + len(tables))
