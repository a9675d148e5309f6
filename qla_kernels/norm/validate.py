"""Checks of a call of `gated_rms_norm`.

check_*      raise ValueError if the call is malformed, on every device
refusal      returns the text of an Unsupported if this version cannot run a well-formed call
"""

import torch
from torch import Tensor

from qla_kernels.norm.shapes import COLUMNS, PIECE
from qla_kernels.runtime import device
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import (
    CAPABILITY,
    DTYPES,
    Reason,
    alternatives,
    dtype_name,
    expect_tensors,
    one_of,
    refused_strides,
)

OP = "gated_rms_norm"

FLOATS = (*DTYPES, torch.float32, torch.float64)
WEIGHTS = (*DTYPES, torch.float32)  # dtypes of the weight on a GPU
ACTIVATIONS = ("silu", "swish", "sigmoid")
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
    """Returns the reason why this version cannot run the call, or None if it can run the call.

    The answer is the same with and without gradients.

    Args:
        x, gate, weight: as in `gated_rms_norm`, well formed.
        capability: answer for a GPU of this compute capability, whatever the tensors' device.
        op: the name of the function, which begins the returned text.
        names: what that function calls x and gate.
    """
    reason = _refused_everywhere(x, weight)
    if reason is None and (x.is_cuda or capability is not None):
        capability = capability or device.capability(x.device)
        reason = _refused_on_cuda({names[0]: x, names[1]: gate}, weight, capability)
    return None if reason is None else need(op, *reason)


def flattens(x: Tensor) -> bool:
    """Returns whether the tokens of x lie a constant distance apart."""
    if x.dim() < 4 or x.shape[0] == 1 or x.shape[1] == 1:
        return True
    return x.stride(0) == x.shape[1] * x.stride(1)


def _refused_everywhere(x: Tensor, weight: Tensor) -> Reason | None:
    if x.device.type not in ("cpu", "cuda", "meta"):
        return f"tensors are on {x.device.type}", "cpu or cuda", "move them"
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            return f"{name} is {dtype_name(tensor.dtype)}", one_of(FLOATS), f"cast {name}"
    return None


def _refused_on_cuda(
    rows: dict[str, Tensor], weight: Tensor, capability: tuple[int, int]
) -> Reason | None:
    if capability != CAPABILITY:
        got = f"device capability {capability[0]}.{capability[1]}"
        needs = f"{CAPABILITY[0]}.{CAPABILITY[1]} (Hopper)"
        return got, needs, f"run on an H100 or H200, or {ELSEWHERE}"
    both, (name, x) = " and ".join(rows), next(iter(rows.items()))
    if x.dtype not in DTYPES:
        got, needs = f"{name} is {dtype_name(x.dtype)}", f"{one_of(DTYPES)} on SM90"
        return got, needs, f"cast {both}, or {ELSEWHERE}"
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


def check_tensors(op: str, x: Tensor, gate: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless x, gate and weight fit together in type, shape, dtype and device.

    Strides are not checked. Raises Unsupported if a tensor has a forward-mode tangent.
    """
    expect_tensors(op, x=x, gate=gate, weight=weight)
    if x.dim() not in (2, 3, 4) or not x.shape[-1]:
        got, needs = f"x has shape {tuple(x.shape)}", "[N, V], [T, HV, V] or [B, T, HV, V]"
        raise ValueError(need(op, got, needs, "reshape x and gate"))
    if gate.shape != x.shape:
        got, needs = f"gate has shape {tuple(gate.shape)}", f"{tuple(x.shape)}, as x has"
        raise ValueError(need(op, got, needs, "reshape gate"))
    if weight.shape != x.shape[-1:]:
        got, needs = f"weight has shape {tuple(weight.shape)}", f"[V] = ({x.shape[-1]},)"
        raise ValueError(need(op, got, needs, "pass one number for each column of a head"))
    if gate.dtype != x.dtype:
        got, needs = f"gate is {dtype_name(gate.dtype)}", f"{dtype_name(x.dtype)}, as x"
        raise ValueError(need(op, got, needs, "cast one of them"))
    for name, tensor in (("gate", gate), ("weight", weight)):
        if tensor.device != x.device:
            got, fix = f"{name} is on {tensor.device}", f"pass {name}.to(x.device)"
            raise ValueError(need(op, got, f"{x.device}, as x", fix))
    refuse_forward_mode(op, x, gate, weight)


def check_options(op: str, eps: object, activation: object) -> None:
    """Raises ValueError unless eps is a float that is not negative, and the activation is known."""
    if type(eps) is not float or not 0 <= eps < float("inf"):
        needs = "a float that is not negative"
        raise ValueError(need(op, f"eps is {eps!r}", needs, "pass the model's, such as 1e-6"))
    if activation not in ACTIVATIONS:
        got, fix = f"activation={activation!r}", "apply any other one to the result"
        raise ValueError(need(op, got, alternatives(ACTIVATIONS), fix))


def check_packed(op: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """Raises ValueError unless cu_seqlens has the form of bounds of x [T, HV, V] or [1, T, ..]."""
    expect_tensors(op, cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        got = f"cu_seqlens is {dtype_name(cu_seqlens.dtype)} of shape {tuple(cu_seqlens.shape)}"
        needs = "int32 or int64 of shape [sequences + 1]"
        raise ValueError(need(op, got, needs, "cast or flatten it"))
    if not cu_seqlens.shape[0]:
        got = "cu_seqlens is empty"
        raise ValueError(need(op, got, "0 and the end of each sequence", "pass at least [0]"))
    if cu_seqlens.device != x.device:
        got, fix = f"cu_seqlens is on {cu_seqlens.device}", "pass cu_seqlens.to(x.device)"
        raise ValueError(need(op, got, f"{x.device}, as x", fix))
    if x.dim() == 4 and x.shape[0] != 1:
        got = f"cu_seqlens with a batch of {x.shape[0]}"
        raise ValueError(need(op, got, "packed tokens: a batch of 1", "pack the rows end to end"))
