"""Checks of the arguments of `target_logprobs`.

    check_*, factors   raise ValueError if the call is malformed, on every device
    refusal            returns the text of an Unsupported if a well-formed call cannot be run

They look at types, shapes, dtypes and devices. Only `check_vocabulary` reads the values of a
tensor: on the CPU, and on a GPU under QLA_CHECK=1. The checks serve several functions: their
argument `op` is the name of the function that was called, with which the text of an error begins.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.head.parts import Parts
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import number
from qla_kernels.runtime.contents import are_read
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import FLOATS, Signature
from qla_kernels.runtime.sm90 import (
    DTYPES,
    Reason,
    dtype_name,
    one_of,
    refused_anywhere,
    refused_device,
)

ON_GPU = (*DTYPES, torch.float32)
ELSEWHERE = "compute logits and call SharedBatch.gather_logprobs"


CALL = Signature(
    "hidden [N, D] float; targets [L] int; rows [rows] int?",
    hidden="pass hidden[0] of a batch of 1, the input of the head",
    targets="pass one integer a target",
    rows="pass one integer a target",
)
PARTS = Signature(
    "hidden [N, D]; weight [V+, D]; bias [V]?; low [N, r]?; up [V, r]?",
    weight="pass the weight of the head, lm_head.weight",
    bias="pass the head's bias, or None",
)


def check_tensors(op: str, hidden: Tensor, targets: Tensor, rows: Tensor | None) -> None:
    """Raises ValueError unless the arguments of `target_logprobs` have the right shapes.

    Args:
        op: the name of the function, for the error.
        hidden: the input of the head, which must be [N, D] floats.
        targets: token ids, which must be [L] integers.
        rows: which row of hidden predicts each target, [L] integers; None: row i predicts target i,
            and L must be N.
    """
    CALL.check(op, hidden, targets, rows)
    wanted = hidden.shape[0] if rows is None else rows.shape[0]
    if targets.shape[0] != wanted:
        got = f"{targets.shape[0]} targets"
        fix = "pass rows, the row of hidden that predicts each target"
        raise ValueError(need(op, got, f"{wanted}, one for each row", fix))


def factors(op: str, temperature: Any, softcap: Any) -> tuple[float, float]:
    """Checks the factors of logits: returns (temperature, softcap) as floats.

    A softcap of None becomes 0. Raises ValueError, which names `op`, unless both are positive,
    finite numbers or CPU tensors of one element; a tensor on a GPU is refused, because reading it
    would wait for the GPU.
    """
    divisor = number(op, "temperature", temperature, "pass the temperature of sampling, as a float")
    if not 0 < divisor < float("inf"):
        fix = "pass the temperature of sampling; divide hidden by one that is learned"
        raise ValueError(need(op, f"temperature={temperature}", "a positive number", fix))
    cap = 0.0 if softcap is None else number(op, "softcap", softcap)
    if softcap is not None and not 0 < cap < float("inf"):
        fix = "pass config.final_logit_softcapping, or None"
        raise ValueError(need(op, f"softcap={softcap}", "a positive number", fix))
    return divisor, cap


def refusal(
    hidden: Tensor,
    parts: Parts,
    *,
    capability: tuple[int, int] | None = None,
    op: str = "target_logprobs",
) -> str | None:
    """Returns the reason why this version cannot run `target_logprobs`, or None if it can.

    Args:
        hidden: [N, D], the input of the head; under autocast, after its cast.
        parts: the head's weight, bias and LoRA factors, from `head_parts`.
        capability: answer as if the tensors were on a GPU of this compute capability: (9, 0).
        op: the name of the function, which begins the returned text.

    Raises:
        ValueError: the head's tensors do not fit hidden in shape or device.
    """
    PARTS.check(op, hidden, *parts)
    reason = _refused_tensors(hidden, parts)
    if reason is None and (hidden.is_cuda or capability is not None):
        capability = capability or device.capability(hidden.device)
        reason = refused_device(capability, hidden.dtype, ELSEWHERE, "hidden is", ON_GPU)
    return None if reason is None else need(op, *reason)


def _refused_tensors(hidden: Tensor, parts: Parts) -> Reason | None:
    """Returns the reason why no device can run the call: its dtypes, or a weight split over ranks.

    Under autocast, weights may be fp32, because autocast rounds them. LoRA's may always be fp32.
    """
    if hidden.dtype not in FLOATS:
        return f"hidden is {dtype_name(hidden.dtype)}", one_of(FLOATS), "cast it"
    weights = {"weight": parts.weight, "bias": parts.bias, "up": parts.up}
    for name, x in weights.items():
        if hasattr(x, "placements"):
            fix = "call it inside the model's forward, where FSDP has gathered the weight"
            return f"{name} is a DTensor", "a tensor that is whole on this rank", fix
        may_be_wide = name == "up" or under_autocast(hidden)
        allowed = (hidden.dtype, torch.float32) if may_be_wide else (hidden.dtype,)
        if x is not None and x.dtype not in allowed:
            got = f"{name} is {dtype_name(x.dtype)} and hidden {dtype_name(hidden.dtype)}"
            return got, "one dtype", "cast hidden, or call it under torch.autocast"
    return refused_anywhere(hidden.device, f"move them, or {ELSEWHERE}")


def under_autocast(x: Tensor) -> bool:
    """Returns whether torch.autocast is on for x's device; False for meta tensors."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def check_vocabulary(op: str, targets: Tensor, vocabulary: int) -> None:
    """Raises ValueError if a target, a token id, is not from 0 to vocabulary - 1.

    Checks targets on the CPU, and on a GPU only under QLA_CHECK=1; checks nothing while
    torch.compile traces. The log-probability of a wrong target that is not checked is NaN. The
    error names `op`.
    """
    if len(targets) and are_read(targets):
        for token in (int(targets.min()), int(targets.max())):
            if not 0 <= token < vocabulary:
                needs = f"0 to {vocabulary - 1}, the columns of logits"
                fix = "pass the whole weight of the head, and token ids as targets"
                raise ValueError(need(op, f"a target is {token}", needs, fix))
