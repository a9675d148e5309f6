"""Checks of a call: `refusal`, and the checks that every implementation shares.

    check_*      raise ValueError if the call is malformed, on every device
    refusal      returns the text of an Unsupported if this version cannot run a well-formed call

They look at types, shapes, dtypes, devices, strides and tangents. `check_bounds` reads values; it
runs only on the CPU and under QLA_CHECK=1.
"""

import torch
from torch import Tensor

from qla_kernels.conv import heads
from qla_kernels.conv.shapes import CHANNELS, WIDTHS
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import check_words, described, integer
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import (
    CAPABILITY,
    DTYPES,
    Reason,
    dtype_name,
    expect_tensors,
    one_of,
    refused_strides,
)

OP = "causal_conv1d"
UPDATE_OP = "causal_conv1d_update"

FLOATS = (*DTYPES, torch.float32, torch.float64)
WEIGHTS = (*DTYPES, torch.float32)  # dtypes of weight and bias on a GPU
ACTIVATIONS = (None, "silu", "swish")
FAR = 2**32  # bytes between tokens that kernels do not reach
ELSEWHERE = "use torch.nn.functional.conv1d on each sequence"


def refusal(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    qk_l2norm: tuple[int, int] | None = None,
    *,
    capability: tuple[int, int] | None = None,
    op: str = OP,
) -> str | None:
    """Returns the reason why this version cannot run the call, or None if it can run the call.

    The answer is the same with and without gradients.

    Args:
        x, weight, bias, qk_l2norm: as in `causal_conv1d`, well formed.
        capability: answer for a GPU of this compute capability, whatever the tensors' device.
        op: the name of the function, which begins the returned text.
    """
    reason = _refused_everywhere(x, weight, bias)
    if reason is None and (x.is_cuda or capability is not None):
        capability = capability or device.capability(x.device)
        reason = _refused_on_cuda(x, weight, bias, capability) or _refused_heads(qk_l2norm)
    return None if reason is None else need(op, *reason)


def by_tokens(x: Tensor) -> Tensor:
    """Returns a view [B, T, C] of x, which is [T, C] or [B, C, T]."""
    return x.unsqueeze(0) if x.dim() == 2 else x.mT


def as_given(y: Tensor, x: Tensor) -> Tensor:
    """Returns a view of y [B, T, C] in the shape of x, [T, C] or [B, C, T]."""
    return y.squeeze(0) if x.dim() == 2 else y.mT


def token_step(x: Tensor) -> int:
    """Returns the distance of the tokens of x [B, T, C] that flattens, in elements."""
    B, T, C = x.shape
    return x.stride(1) if T > 1 else x.stride(0) if B > 1 else C


def flattens(x: Tensor) -> bool:
    """Returns whether the tokens of x [B, T, C] lie a constant distance apart."""
    B, T, _ = x.shape
    return B == 1 or T == 1 or x.stride(0) == T * x.stride(1)


def _refused_everywhere(x: Tensor, weight: Tensor, bias: Tensor | None) -> Reason | None:
    if x.device.type not in ("cpu", "cuda", "meta"):
        return f"tensors are on {x.device.type}", "cpu or cuda", "move them"
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{name} is {dtype_name(tensor.dtype)}", one_of(FLOATS), f"cast {name}"
    if weight.shape[1] not in WIDTHS:
        needs = f"a width of {WIDTHS[0]} to {WIDTHS[-1]}"
        return f"weight has width {weight.shape[1]}", needs, f"pad it by zeros, or {ELSEWHERE}"
    return None


def _refused_on_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, capability: tuple[int, int]
) -> Reason | None:
    if capability != CAPABILITY:
        got = f"device capability {capability[0]}.{capability[1]}"
        needs = f"{CAPABILITY[0]}.{CAPABILITY[1]} (Hopper)"
        return got, needs, f"run on an H100 or H200, or {ELSEWHERE}"
    if x.dtype not in DTYPES:
        got, needs = f"x is {dtype_name(x.dtype)}", f"{one_of(DTYPES)} on SM90"
        return got, needs, f"cast it, or {ELSEWHERE}"
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in WEIGHTS:
            return f"{name} is {dtype_name(tensor.dtype)}", one_of(WEIGHTS), f"cast {name}"
    rows = by_tokens(x)
    contiguous = "x.contiguous()" if x.dim() == 2 else "x.mT.contiguous().mT"
    if rows.shape[2] % CHANNELS:
        needs = f"a multiple of {CHANNELS} on SM90"
        return f"x has {rows.shape[2]} channels", needs, "pad the channels of x, weight and bias"
    if not flattens(rows):
        got = f"the rows of a batch of {rows.shape[0]} have stride {rows.stride(0)}"
        needs = f"{rows.shape[1] * rows.stride(1)}, the tokens of a row"
        return got, needs, f"pass {contiguous}, or one row at a time"
    if (step := token_step(rows)) * rows.element_size() >= FAR:
        return f"tokens of x are {step} elements apart", "less than 4 GiB", f"pass {contiguous}"
    refused = refused_strides("x as [B, T, channels]", rows)
    return None if refused is None else (*refused[:2], f"pass {contiguous}")


def _refused_heads(norm: tuple[int, int] | None) -> Reason | None:
    if norm is None or not norm[0] or heads.takes(norm[1]):
        return None
    fix = "normalise with gated_delta_rule's use_qk_l2norm_in_kernel, or with torch"
    return f"qk_l2norm has heads of {norm[1]} channels", f"{heads.SIZES} on SM90", fix


def check_norm(op: str, norm: tuple[int, int] | None, channels: int) -> tuple[int, int]:
    """Returns qk_l2norm as operators take it; raises ValueError if it does not fit the channels."""
    if norm is None:
        return 0, 0
    fix = "pass (2 * H, K) for H queries and H keys"
    if not isinstance(norm, tuple | list) or len(norm) != 2:
        got = described("qk_l2norm", norm)
        raise ValueError(need(op, got, "(heads, channels of a head)", fix))
    count, size = (integer(op, "qk_l2norm", number, fix) for number in norm)
    if count < 0 or size < 1 or count * size > channels:
        needs = f"positive numbers with a product of at most {channels}, the channels of x"
        raise ValueError(need(op, f"qk_l2norm={tuple(norm)}", needs, fix))
    return count, size


def check_tensors(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    """Raises ValueError unless the arguments fit together in type, shape and device.

    Strides are not checked. Raises Unsupported if a tensor has a forward-mode tangent.
    """
    expect_tensors(op, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if x.dim() not in (2, 3):
        got, needs = f"x has {x.dim()} dimensions", "[T, channels] or [B, channels, T]"
        raise ValueError(need(op, got, needs, "reshape x"))
    C = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != C or 0 in weight.shape:
        got, needs = f"weight has shape {tuple(weight.shape)}", f"[channels, width] with {C}"
        fix = "pass conv.weight.squeeze(1), and x as [T, channels] or [B, channels, T]"
        raise ValueError(need(op, got, f"{needs} channels", fix))
    if bias is not None and bias.shape != (C,):
        got = f"bias has shape {tuple(bias.shape)}"
        raise ValueError(need(op, got, f"[channels] = ({C},)", "pass one number for each channel"))
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            got, fix = f"{name} is on {tensor.device}", f"pass {name}.to(x.device)"
            raise ValueError(need(op, got, f"{x.device}, as x", fix))
    if activation not in ACTIVATIONS:
        got, fix = f"activation={activation!r}", "apply any other activation to the result"
        raise ValueError(need(op, got, 'None, "silu" or "swish"', fix))
    refuse_forward_mode(op, x, weight, bias)


def check_packed(op: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """Raises ValueError unless cu_seqlens has the form of bounds of x [1, T, C]."""
    expect_tensors(op, cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"cu_seqlens is {dtype_name(cu_seqlens.dtype)}"
        raise ValueError(need(op, got, "int32 or int64", "cast it"))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        got = f"cu_seqlens has shape {tuple(cu_seqlens.shape)}"
        fix = "pass 0 and the end of each sequence"
        raise ValueError(need(op, got, "[sequences + 1]", fix))
    if cu_seqlens.device != x.device:
        got, fix = f"cu_seqlens is on {cu_seqlens.device}", "pass cu_seqlens.to(x.device)"
        raise ValueError(need(op, got, f"{x.device}, as x", fix))
    if x.shape[0] != 1:
        got = f"cu_seqlens with a batch of {x.shape[0]}"
        raise ValueError(need(op, got, "packed tokens: a batch of 1", "pack the rows end to end"))


def check_update(
    op: str,
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    indices: Tensor | None,
    null_slot: int,
    out: Tensor | None,
) -> None:
    """Raises ValueError unless the arguments of `causal_conv1d_update` fit together."""
    check_tensors(op, x, weight, bias, activation)
    expect_tensors(op, conv_state=rows, **({} if out is None else {"out": out}))
    (C, W), fix = weight.shape, "pass the pool of last tokens"
    if x.dim() != 2:
        got = f"x has shape {tuple(x.shape)}"
        raise ValueError(need(op, got, "[N, channels], a token of each sequence", "reshape x"))
    if rows.dim() != 3 or rows.shape[1] != C or rows.shape[2] < W - 1:
        got = f"conv_state has shape {tuple(rows.shape)}"
        needs = f"[slots, channels, width - 1] with {C} channels and at least {W - 1} places"
        raise ValueError(need(op, got, needs, fix))
    for name, tensor in (("conv_state", rows), ("out", out)):
        if tensor is not None and (tensor.dtype, tensor.device) != (x.dtype, x.device):
            got = f"{name} is {dtype_name(tensor.dtype)} on {tensor.device}"
            raise ValueError(need(op, got, f"{dtype_name(x.dtype)} on {x.device}, as x", fix))
    if out is not None and out.shape != x.shape:
        got = f"out has shape {tuple(out.shape)}"
        raise ValueError(need(op, got, f"{tuple(x.shape)}, as x has", "leave it out"))
    if type(null_slot) is not int or null_slot not in (-1, 0):
        needs = "-1, or 0 where slot 0 of the pool is no state either"
        raise ValueError(need(op, f"null_slot is {null_slot!r}", needs, "pass one of them"))
    check_indices(op, x, rows, indices)
    refuse_forward_mode(op, rows, out)


def check_indices(op: str, x: Tensor, rows: Tensor, indices: Tensor | None) -> None:
    """Raises ValueError unless each row of x [N, C] has a slot."""
    if indices is None:
        if rows.shape[0] < len(x):
            got = f"{len(x)} sequences and {rows.shape[0]} slots, without conv_state_indices"
            raise ValueError(need(op, got, "a slot for each", "pass the slot of each sequence"))
        return
    expect_tensors(op, conv_state_indices=indices)
    if indices.dtype not in (torch.int32, torch.int64):
        got = f"conv_state_indices is {dtype_name(indices.dtype)}"
        raise ValueError(need(op, got, "int32 or int64", "cast it"))
    if indices.shape != x.shape[:1] or indices.device != x.device:
        got = f"conv_state_indices has shape {tuple(indices.shape)} on {indices.device}"
        fix = "pass the slot of each sequence"
        raise ValueError(need(op, got, f"[N] = ({len(x)},) on {x.device}", fix))


def check_slots(op: str, indices: Tensor, num_slots: int, null_slot: int) -> None:
    """Raises ValueError if a slot is past the pool or beyond int32, or if two share a slot."""
    check_words(op, "conv_state_indices", indices)
    slots = [slot for slot in indices.tolist() if slot > null_slot]
    if len(set(slots)) < len(slots) or max(slots, default=-1) >= num_slots:
        needs = f"different slots below {num_slots}, or at most {null_slot} for padding"
        fix = "give each sequence a slot of its own"
        raise ValueError(need(op, f"conv_state_indices {indices.tolist()}", needs, fix))


def refused_rows(op: str, rows: Tensor) -> str | None:
    """Returns why the pool of last tokens cannot be updated in place, or None."""
    if all(n == 1 or s for n, s in zip(rows.shape, rows.stride(), strict=True)):
        return None
    needs = "a place for each: they are overwritten"
    return need(op, "slots of conv_state share memory", needs, "pass it .contiguous()")


def check_bounds(op: str, num_tokens: int, cu_seqlens: Tensor) -> None:
    """Raises ValueError unless cu_seqlens starts at 0, never falls, and ends within the tokens."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > num_tokens or ends != sorted(ends):
        needs = f"to start at 0, never fall, and end at or before T={num_tokens}"
        raise ValueError(need(op, f"cu_seqlens {ends}", needs, "rebuild it from the lengths"))
