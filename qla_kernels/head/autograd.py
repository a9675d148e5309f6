"""`HeadLogprobs`: the operators head_fwd and head_bwd as one function for autograd.

The gradients are not differentiable in turn; differentiating them raises Unsupported.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.head import ops
from qla_kernels.head.ops import Wanted
from qla_kernels.runtime.derivatives import refuse_second_derivative


class HeadLogprobs(torch.autograd.Function):
    """Runs head_fwd, and head_bwd in the backward; returns (log-probabilities, entropies), [L].

    Besides its inputs it saves two numbers for each row of hidden: log-sum-exp and entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        order: Tensor | None,
        first: Tensor,
        temperature: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """Runs head_fwd; `order` sorts the targets by row, None if they are sorted already."""
        targets = (targets if order is None else targets[order]).to(torch.int32)
        inputs = hidden, weight, bias, low, up
        logprobs, lse2, entropy = ops.head_fwd(*inputs, targets, first, temperature, softcap)
        ctx.save_for_backward(*inputs, targets, order, first, lse2, entropy)
        ctx.op, ctx.numbers = op, (temperature, softcap)
        if order is None:
            return logprobs, entropy.clone()
        assert rows is not None, "they were sorted"
        return torch.empty_like(logprobs).index_copy(0, order, logprobs), entropy[rows]

    @staticmethod
    def backward(ctx: Any, dlogprobs: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
        """Runs head_bwd; returns the gradients of the tensors that need them."""
        once = refuse_second_derivative(ctx.op)(_gradients)
        grads: tuple[Tensor | None, ...] = once(ctx, dlogprobs, dentropy)
        return grads


def _gradients(ctx: Any, dlogprobs: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, targets, order, first, lse2, entropy = ctx.saved_tensors
    if order is not None:
        dlogprobs, dentropy = dlogprobs[order], dentropy[order]
    wanted = Wanted(*ctx.needs_input_grad[1:6])
    upstream = dlogprobs.contiguous(), dentropy.contiguous()
    saved: Any = *inputs, targets, first, lse2, entropy, *ctx.numbers, list(wanted)
    grads = ops.head_bwd(*upstream, *saved)
    return None, *grads, *[None] * 6
