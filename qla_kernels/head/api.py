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
    """Returns (log-probabilities, entropies) of L targets, both [L] in fp32; differentiable.

    Logits are products summed in fp32, which are not rounded to 16 bits, and of which a block of at
    most 528 MiB is in memory at a time: in the forward, and again in the backward. Under autocast
    products have autocast's dtype; otherwise hidden and weight have one.

    Args:
        op: the name of the caller's function, which begins the texts of errors.
        hidden: [N, D], the input of the head.
        head: a weight [V, D], or a module with one, such as nn.Linear or PEFT's LoRA around it.
        targets: [L] integers, columns of logits.
        rows: [L], the row of hidden that predicts each target; None if L is N and each row predicts
            one.
        temperature: divides the logits.
        softcap: c of c tanh(logits / c), of models with final_logit_softcapping.

    Raises:
        ValueError: arguments do not fit together.
        Unsupported: they fit, but this version cannot run them; see `refusal`.
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
    """Returns the tensors with which `head` makes logits of `hidden`."""
    return Parts(head) if isinstance(head, Tensor) else parts_of(op, head, hidden)
