"""The function `target_logprobs`."""

import torch
from torch import Tensor, nn

from qla_kernels.head.autograd import HeadLogprobs
from qla_kernels.head.parts import Parts, parts_of
from qla_kernels.head.validate import (
    check_tensors,
    check_vocabulary,
    factors,
    refusal,
    under_autocast,
)
from qla_kernels.runtime.sm90 import require


def target_logprobs(
    op: str,
    hidden: Tensor,
    head: Tensor | nn.Module,
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of L target tokens, and the entropies of their distributions.

    Both are [L], in fp32 (fp64 if hidden is fp64), and differentiable. Computes logits in blocks of
    at most 528 MiB, once in the forward and again in the backward, and never stores the logits of
    all tokens. Logits are summed in fp32 and are not rounded to 16 bits. Under autocast, hidden and
    the weight are cast to autocast's dtype; otherwise both must have the same dtype.

    Args:
        op: the name of the calling function, with which error texts begin.
        hidden: [N, D], the input of the head.
        head: its weight [V, D], or its module: an nn.Linear, or PEFT's LoRA around one.
        targets: [L] token ids, from 0 to V - 1.
        rows: [L], the row of hidden that predicts each target; None if row i predicts target i.
        temperature: divides the logits.
        softcap: c, for models that cap logits by c * tanh(logits / c); their config has it as
            final_logit_softcapping.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.head.refusal`.
    """
    check_tensors(op, hidden, targets, rows)
    temperature, softcap = factors(op, temperature, softcap)
    if under_autocast(hidden):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    parts = head_parts(op, head, hidden)
    require(refusal(hidden, parts, op=op))
    check_vocabulary(op, targets, parts.weight.shape[0])
    order = None
    if rows is None:
        first = torch.arange(len(hidden) + 1, dtype=torch.int32, device=hidden.device)
    else:
        order = rows.argsort(stable=True)
        ends = torch.arange(len(hidden) + 1, device=hidden.device)
        first = torch.searchsorted(rows[order].contiguous(), ends.to(rows.dtype), out_int32=True)
    logprobs, entropies = HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        op, hidden, *parts, targets, rows, order, first, temperature, softcap
    )
    return logprobs, entropies


def head_parts(op: str, head: Tensor | nn.Module, hidden: Tensor) -> Parts:
    """Returns the tensors from which a head computes logits: weight, bias, and LoRA's factors.

    The result is a record `Parts`: logits are hidden weight^T + bias + low up^T, where low is
    `hidden` times LoRA's first factor, computed here. bias, low and up are None if the head has
    none.

    Args:
        op: the name of the calling function, for the error.
        head: the weight [V, D], or a module: an nn.Linear, or PEFT's LoRA around one.
        hidden: [N, D], the input of the head.

    Raises:
        Unsupported: the head is a module of another kind.
    """
    return Parts(head) if isinstance(head, Tensor) else parts_of(op, head, hidden)
