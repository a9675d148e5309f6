"""Checks of a call: `refusal`, and the checks that every implementation shares.

    check_*, factors   raise ValueError if the call is malformed, on every device
    refusal            returns the text of an Unsupported if a well-formed call cannot be run

They look at types, shapes, dtypes and devices. `check_vocabulary` reads targets; it does so on the
CPU, and under QLA_CHECK=1.
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
    """Raises ValueError unless hidden is [N, D], and targets and rows fit to it."""
    CALL.check(op, hidden, targets, rows)
    wanted = hidden.shape[0] if rows is None else rows.shape[0]
    if targets.shape[0] != wanted:
        got = f"{targets.shape[0]} targets"
        fix = "pass rows, the row of hidden that predicts each target"
        raise ValueError(need(op, got, f"{wanted}, one for each row", fix))


def factors(op: str, temperature: Any, softcap: Any) -> tuple[float, float]:
    """Returns both as floats; a softcap of None is 0. Raises ValueError unless they are positive.

    A temperature on a GPU has to be read by the caller.
    """
    found = number(op, "temperature", temperature, "pass the temperature of sampling, as a float")
    if not 0 < found < float("inf"):
        fix = "pass the temperature of sampling; divide hidden by one that is learned"
        raise ValueError(need(op, f"temperature={temperature}", "a positive number", fix))
    cap = 0.0 if softcap is None else number(op, "softcap", softcap)
    if softcap is not None and not 0 < cap < float("inf"):
        fix = "pass config.final_logit_softcapping, or None"
        raise ValueError(need(op, f"softcap={softcap}", "a positive number", fix))
    return found, cap


def refusal(
    hidden: Tensor,
    parts: Parts,
    *,
    capability: tuple[int, int] | None = None,
    op: str = "target_logprobs",
) -> str | None:
    """Returns the reason why this version cannot run the call, or None if it can run the call.

    Args:
        hidden: [N, D] in the dtype of the products.
        parts: the head's tensors.
        capability: answer for a GPU of this compute capability, whatever the tensors' device.
        op: the name of the function, which begins the returned text.

    Raises:
        ValueError: the head's tensors do not fit to hidden.
    """
    PARTS.check(op, hidden, *parts)
    reason = _refused_tensors(hidden, parts)
    if reason is None and (hidden.is_cuda or capability is not None):
        capability = capability or device.capability(hidden.device)
        reason = refused_device(capability, hidden.dtype, ELSEWHERE, "hidden is", ON_GPU)
    return None if reason is None else need(op, *reason)


def _refused_tensors(hidden: Tensor, parts: Parts) -> Reason | None:
    """Returns the reason, on any device, for dtypes and for tensors that are spread over ranks.

    Under autocast, weights may be the fp32 numbers that autocast rounds. LoRA's may always be.
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
    """Returns whether autocast is on for x's device; it does not exist for meta tensors."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def check_vocabulary(op: str, targets: Tensor, vocabulary: int) -> None:
    """Raises ValueError if a target is not in 0 .. vocabulary - 1.

    Checks targets on the CPU, and those on a GPU only under QLA_CHECK=1; checks nothing while
    torch.compile traces. Otherwise the log-probability of such a target is NaN.
    """
    if len(targets) and are_read(targets):
        for token in (int(targets.min()), int(targets.max())):
            if not 0 <= token < vocabulary:
                needs = f"0 to {vocabulary - 1}, the columns of logits"
                fix = "pass the whole weight of the head, and token ids as targets"
                raise ValueError(need(op, f"a target is {token}", needs, fix))
