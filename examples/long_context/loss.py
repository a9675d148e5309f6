"""Cross entropy of a language model whose logits are never held for all tokens.

At 64K tokens a rank and a vocabulary of 152K, logits in fp32 take 40 GB. Here logits of a few rows
at a time are computed, and turned at once into the gradients of the loss:

    logits = h W^T,   loss = sum_i logsumexp(logits_i) - logits_i[y_i],   dlogits = softmax - onehot

so the backward computes no logits again. The gradients are those of the whole product: chunks of
rows are independent, and dW is added up in fp32.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a label that is not predicted, such as padding


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
    """Returns the sum of the cross entropies of all labels that are not IGNORED, in fp32.

    Args:
        hidden: [N, C].
        weight: [V, C], of the output layer.
        labels: int64 [N], already shifted.
        rows: how many rows have their logits in memory at a time.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dhidden = torch.empty_like(hidden) if wanted else None
        dweight = torch.zeros_like(weight, dtype=wide) if wanted else None
        for start in range(0, len(hidden), rows):
            h, y = hidden[start : start + rows], labels[start : start + rows, None]
            kept, y = y != IGNORED, y.clamp(min=0)
            logits = (h @ weight.T).to(wide)  # [rows, V]
            lse = logits.logsumexp(-1, keepdim=True)
            loss += ((lse - logits.gather(-1, y)) * kept).sum()
            if wanted:
                dlogits = logits.sub_(lse).exp_()
                dlogits.scatter_add_(-1, y, torch.full_like(lse, -1))
                dlogits = dlogits.mul_(kept).to(h.dtype)
                torch.mm(dlogits, weight, out=dhidden[start : start + rows])
                dweight += dlogits.T @ h
        if wanted:
            ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return dhidden * dloss.to(dhidden.dtype), dweight * dloss.to(dweight.dtype), None, None
