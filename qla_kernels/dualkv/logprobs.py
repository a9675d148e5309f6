"""Log-probabilities of L target tokens from logits [M, vocabulary], without copying all to fp32.

With z = logits / temperature and, for row r, lse = log sum_j e^z_j and p = e^(z - lse):

    logprob of target t = z[r, t] - lse        entropy = -sum_j p_j log p_j
    dz_j = sum_t g_t ([j = t] - p_j)  +  h (-p_j log p_j - p_j entropy)

where g_t are the gradients of the row's log-probabilities, and h is the sum of the gradients of its
targets' entropies.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.derivatives import refuse_forward_mode, refuse_second_derivative

OP = "SharedBatch.gather_logprobs"

ELEMENTS = 1 << 25  # logits converted to fp32 at a time: 128 MiB


def target_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Returns (log-probabilities, entropies), both [L]; target i reads row rows[i] of logits.

    logits is [M, vocab]; rows and targets are [L]. Entropies are 0 if `entropy` is False. Raises
    Unsupported if logits have a forward-mode tangent.
    """
    refuse_forward_mode(OP, logits)
    logprobs, entropies = TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, rows, targets, temperature, entropy
    )
    return logprobs, entropies


class TargetLogprobs(torch.autograd.Function):
    """The autograd function of `target_logprobs`.

    Saves rows, targets, the logits (which are in memory anyway), and the LSE and the entropy of
    each row of logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities, entropies) of the targets, both [L]."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        lse = logits.new_empty(logits.shape[0], dtype=wide)
        entropies = torch.zeros_like(lse)
        for part in _parts(logits):
            z = logits[part].to(wide) / temperature
            lse[part] = z.logsumexp(-1)
            if entropy:
                entropies[part] = torch.special.entr((z - lse[part, None]).exp()).sum(-1)
        ctx.save_for_backward(logits, rows, targets, lse, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logits[rows, targets].to(wide) / temperature - lse[rows], entropies[rows]

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, g: Tensor, g_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of logits, in their dtype, and None for the other inputs."""
        logits, rows, targets, lse, entropies = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        g, g_entropy = g / ctx.temperature, g_entropy / ctx.temperature
        row_grad = torch.zeros_like(lse).index_put((rows,), g, accumulate=True)
        entropy_grad = torch.zeros_like(lse).index_put((rows,), g_entropy, accumulate=True)
        for part in _parts(logits):
            p = (logits[part].to(lse.dtype) / ctx.temperature - lse[part, None]).exp()
            dz = -row_grad[part, None] * p
            if ctx.entropy:
                per_token = torch.special.entr(p) - p * entropies[part, None]
                dz += entropy_grad[part, None] * per_token
            here = (rows >= part.start) & (rows < part.stop)
            row = (rows - part.start).clamp(0, part.stop - part.start - 1)
            dz.index_put_((row, targets), g.masked_fill(~here, 0), accumulate=True)
            dlogits[part] = dz.to(logits.dtype)
        return dlogits, None, None, None, None


def _parts(logits: Tensor) -> Iterator[slice]:
    """Returns slices of the rows of logits: at most ELEMENTS logits each, at least one row."""
    num_rows, vocabulary = logits.shape
    step = max(1, ELEMENTS // max(1, vocabulary))
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))
