"""The tensors of a call of `gated_rms_norm`, and `refusal`."""

import torch
from torch import Tensor

from qla_kernels.norm.shapes import COLUMNS, PIECE
from qla_kernels.runtime import device
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import BOUNDS, FLOATS, Signature
from qla_kernels.runtime.sm90 import (
    DTYPES,
    Reason,
    dtype_name,
    one_of,
    refused_anywhere,
    refused_device,
    refused_strides,
)

OP = "gated_rms_norm"

CALL = Signature(
    f"x [N, V+] or [T, HV, V+] or [B, T, HV, V+]; gate like x; weight [V]; {BOUNDS}",
    x="reshape x and gate",
    gate="reshape gate",
    weight="pass one number for each column of a head",
)

WEIGHTS = (*DTYPES, torch.float32)  # dtypes of the weight on a GPU
ELSEWHERE = "use torch operators"
SIZES = range(PIECE, COLUMNS[-1] + 1, PIECE)  # V on a GPU
HEAD_SIZES = f"head sizes up to {COLUMNS[-1]}"


def refusal(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    capability: tuple[int, int] | None = None,
    op: str = OP,
    names: tuple[str, str] = ("x", "gate"),
) -> str | None:
    """Returns the reason why this version cannot run `gated_rms_norm`, or None if it can.

    Call it with arguments that fit together. The answer is the same with and without gradients.

    Args:
        x: heads of V columns: [B, T, HV, V], [T, HV, V] or [N, V].
        gate: the input of the activation, with x's shape and dtype.
        weight: [V].
        capability: answer as if x were on a GPU of this compute capability; None for x's own
            device.
        op: name of the function with which the returned text begins.
        names: what the returned text calls x and gate.
    """
    reason = _refused_everywhere(x, weight)
    if reason is None and (x.is_cuda or capability is not None):
        capability = capability or device.capability(x.device)
        reason = _refused_on_cuda({names[0]: x, names[1]: gate}, weight, capability)
    return None if reason is None else need(op, *reason)


def flattens(x: Tensor) -> bool:
    """Returns True if the tokens of x [B, T, HV, V] lie a constant distance apart in memory.

    The stride of the batch is then T times that of the tokens. Tensors with fewer dimensions have
    no batch: always True.
    """
    if x.dim() < 4 or x.shape[0] == 1 or x.shape[1] == 1:
        return True
    return x.stride(0) == x.shape[1] * x.stride(1)


def _refused_everywhere(x: Tensor, weight: Tensor) -> Reason | None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            return f"{name} is {dtype_name(tensor.dtype)}", one_of(FLOATS), f"cast {name}"
    return refused_anywhere(x.device)


def _refused_on_cuda(
    rows: dict[str, Tensor], weight: Tensor, capability: tuple[int, int]
) -> Reason | None:
    both = " and ".join(rows)
    name, x = next(iter(rows.items()))
    if reason := refused_device(capability, x.dtype, ELSEWHERE, f"{name} is"):
        return reason
    if weight.dtype not in WEIGHTS:
        got = f"the norm's weight is {dtype_name(weight.dtype)}"
        return got, one_of(WEIGHTS), "cast it"
    V = x.shape[-1]
    if V not in SIZES:
        needs = f"a multiple of {PIECE} up to {COLUMNS[-1]} on SM90"
        return f"head dimension V={V}", needs, f"pad {both} and the weight, or {ELSEWHERE}"
    for name, tensor in rows.items():
        if not flattens(tensor):
            got = f"the rows of a batch of {name} have stride {tensor.stride(0)}"
            needs = f"{tensor.shape[1] * tensor.stride(1)}, the tokens of a row"
            return got, needs, f"pass {name}.contiguous(), or one row at a time"
        if refused := refused_strides(name, tensor):
            return refused
    return None
