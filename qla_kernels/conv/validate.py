"""The tensors of a call, checks of its other arguments, and `refusal`.

check_*      raise ValueError if the call is malformed, on every device
refusal      returns the text of an Unsupported if this version cannot run a well-formed call
"""

import torch
from torch import Tensor

from qla_kernels.conv import heads
from qla_kernels.conv.shapes import CHANNELS, WIDTHS
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import (
    check_activation,
    check_null_slot,
    described,
    integer,
)
from qla_kernels.runtime.contents import are_read, check_bounds
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import BOUNDS, FLOATS, Signature, check_packed
from qla_kernels.runtime.sm90 import (
    DTYPES,
    Reason,
    dtype_name,
    one_of,
    refused_anywhere,
    refused_device,
    refused_strides,
)

OP = "causal_conv1d"
UPDATE_OP = "causal_conv1d_update"
PREFILL_OP = "prefill_causal_conv1d"
SLOTS = "conv_state_indices"

FIXES = {
    "x": "reshape x",
    "weight": "pass conv.weight.squeeze(1), and x as [T, channels] or [B, channels, T]",
    "bias": "pass one number for each channel",
}
PARAMETERS = "weight [channels, width+]; bias [channels]?"
CALL = Signature(f"x [T, channels+] or [B, channels+, T]; {PARAMETERS}; {BOUNDS}", **FIXES)
UPDATE = Signature(
    f"x [N, channels+]; conv_state [slots, channels, places] as x; {PARAMETERS}; {SLOTS} [N] int?;"
    "out like x?",
    conv_state="pass the pool of last tokens",
    conv_state_indices="pass the slot of each sequence",
    out="leave it out",
    **FIXES,
)
PREFILL = Signature(
    f"x [T, channels+]; conv_state [slots, channels, places] as x; {PARAMETERS};"
    "cu_seqlens [N + 1] int; state_indices [N] int; start_indices [N] int?;"
    "checkpoint_offsets [N] int?; checkpoint_indices [N] int?",
    conv_state="pass the pool of last tokens",
    state_indices="pass the slot of each sequence",
    **FIXES,
)

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
    """Returns the reason why this version cannot run a call of `causal_conv1d`, or None if it can.

    The reason is an error text: what was passed, what is needed instead, and a remedy. It is the
    same with and without gradients.

    Args:
        x: [T, channels] or [B, channels, T].
        weight, bias: [channels, W], and [channels] or None.
        qk_l2norm: (heads, size): the first heads * size output channels are L2-normalised in
            groups of `size`. None: no channels are.
        capability: None answers for the device of the tensors; (9, 0) as if they were on a GPU of
            this compute capability.
        op: the name of the function, with which the text begins.
    """
    reason = _refused_everywhere(x, weight, bias)
    if reason is None and (x.is_cuda or capability is not None):
        capability = capability or device.capability(x.device)
        reason = _refused_on_cuda(x, weight, bias, capability) or _refused_heads(qk_l2norm)
    return None if reason is None else need(op, *reason)


def by_tokens(x: Tensor) -> Tensor:
    """Returns x as a view [B, T, C]; x is [T, C], as packed tokens are, or [B, C, T]."""
    return x.unsqueeze(0) if x.dim() == 2 else x.mT


def as_given(y: Tensor, x: Tensor) -> Tensor:
    """Returns y [B, T, C] as a view with the dimensions of x, [T, C] or [B, C, T].

    This is the inverse of `by_tokens`.
    """
    return y.squeeze(0) if x.dim() == 2 else y.mT


def token_step(x: Tensor) -> int:
    """Returns the distance in memory between neighbouring tokens of x [B, T, C], in elements.

    All neighbours must have the same distance; see `flattens`.
    """
    B, T, C = x.shape
    return x.stride(1) if T > 1 else x.stride(0) if B > 1 else C


def flattens(x: Tensor) -> bool:
    """Returns whether x [B, T, C] can be viewed as [B * T, C] without a copy.

    That is so if all neighbouring tokens lie the same distance apart in memory, also the last token
    of a row and the first token of the next row.
    """
    B, T, _ = x.shape
    return B == 1 or T == 1 or x.stride(0) == T * x.stride(1)


def _refused_everywhere(x: Tensor, weight: Tensor, bias: Tensor | None) -> Reason | None:
    if reason := refused_anywhere(x.device):
        return reason
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
    if reason := refused_device(capability, x.dtype, ELSEWHERE, "x is"):
        return reason
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
    """Checks the argument qk_l2norm of `causal_conv1d`; returns (number of heads, channels of one).

    None becomes (0, 0): no head is normalised. Raises ValueError unless `norm` is a pair of
    integers whose product is at most `channels`, the number of channels of x. The error names `op`.
    """
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
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Raises ValueError unless the arguments fit together in type, shape, dtype and device.

    Checks types, shapes, devices and the name of the activation, but not strides. Raises
    Unsupported if a tensor has a forward-mode tangent. The error names `op`.
    """
    CALL.check(op, x, weight, bias, cu_seqlens)
    check_activation(op, "activation", activation, ACTIVATIONS)
    if cu_seqlens is not None:
        rows = by_tokens(x)
        check_packed(op, rows.shape[0])
        if are_read(cu_seqlens):
            check_bounds(op, rows.shape[1], cu_seqlens)


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
    """Raises ValueError unless the arguments of `causal_conv1d_update` fit together.

    Args:
        op: the name of the function, for the error.
        x: [N, channels], the new tokens.
        rows: the conv-state cache [slots, channels, width - 1 or more].
        weight, bias, activation: of the convolution.
        indices: [N], the slot of each sequence. None needs a cache of at least N slots.
        null_slot: must be -1 or 0; slots up to it mark padding.
        out: None, or the tensor for the result, which must have x's shape and dtype.
    """
    UPDATE.check(op, x, rows, weight, bias, indices, out)
    check_pool(op, rows, weight, activation, null_slot)
    if indices is None and rows.shape[0] < len(x):
        got = f"{len(x)} sequences and {rows.shape[0]} slots, without {SLOTS}"
        raise ValueError(need(op, got, "a slot for each", "pass the slot of each sequence"))


def check_pool(
    op: str, rows: Tensor, weight: Tensor, activation: str | None, null_slot: int
) -> None:
    """Raises ValueError unless a conv-state cache can hold width - 1 inputs per slot.

    Also raises it for an unknown activation, or a null_slot other than -1 and 0.

    Args:
        op: the name of the function, for the error.
        rows: the conv-state cache [slots, channels, width - 1 or more].
        weight: [channels, width].
        activation, null_slot: arguments of the call.
    """
    check_activation(op, "activation", activation, ACTIVATIONS)
    if rows.shape[2] < (most := weight.shape[1] - 1):
        got = f"conv_state has shape {tuple(rows.shape)}"
        needs = f"[slots, channels, width - 1] with at least {most} places"
        raise ValueError(need(op, got, needs, UPDATE.fixes["conv_state"]))
    check_null_slot(op, null_slot)


def refused_rows(op: str, rows: Tensor) -> str | None:
    """Returns an error text if a conv-state cache cannot be updated in place, else None.

    It cannot if elements share memory, as after `expand`.

    Args:
        op: the name of the function, with which the text begins.
        rows: the conv-state cache [slots, channels, width - 1 or more].
    """
    if all(n == 1 or s for n, s in zip(rows.shape, rows.stride(), strict=True)):
        return None
    needs = "a place for each: they are overwritten"
    return need(op, "slots of conv_state share memory", needs, "pass it .contiguous()")
