"""The public function `causal_conv1d_update`: one token of each sequence, for decoding."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv.ops import conv_update
from qla_kernels.conv.validate import (
    SLOTS,
    UPDATE_OP,
    check_norm,
    check_update,
    refusal,
    refused_rows,
)
from qla_kernels.runtime.contents import are_read, check_places
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.sm90 import refused_strides, require

UPDATES = Programs(UPDATE_OP)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    qk_l2norm: tuple[int, int] | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Computes a decoding step of a depthwise causal convolution and updates the conv-state cache.

    Each of N sequences has one new token. Its slot of the cache holds the width - 1 inputs before
    this token, the oldest first. The call computes y for the new token, drops the oldest input and
    appends the new one, in one launch. Not differentiable. See `causal_conv1d` for the formula.

    Args:
        x: [N, channels], the new tokens. On a GPU in bf16 or fp16, with a multiple of 8 channels
            that are adjacent in memory, and a row stride that is a multiple of 16 bytes.
        conv_state: the cache [slots, channels, width - 1 or more] in x's dtype, any strides. Only
            the first width - 1 places of a slot are used.
        weight: [channels, width], width from 2 to 4.
        bias: [channels]; 0 if None.
        activation: None, "silu" or "swish" (the same as silu).
        conv_state_indices: [N] int32 or int64, the slot of each sequence; None: sequence n has slot
            n. Two sequences must not share a slot. A sequence whose slot is at most null_slot is
            padding: y is 0, and the cache is not changed. A slot past the cache raises ValueError
            on a CPU and under QLA_CHECK=1; otherwise a GPU treats it as padding. The same checks
            reject int64 values that do not fit in int32; otherwise a GPU reads their low 32 bits.
        qk_l2norm: (heads, size): the first heads * size channels of y are heads of `size` channels,
            and each is divided by its L2 norm. None: no head is.
        null_slot: -1, or 0 if slot 0 is reserved for padding.
        out: [N, channels] in x's dtype, or x itself; y is written to `out`, and `out` is returned.

    Returns:
        y [N, channels].

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    tensors = x, conv_state, weight, bias
    arguments = *tensors, activation, conv_state_indices, null_slot, out, qk_l2norm
    lookup = None if torch.compiler.is_compiling() else UPDATES.find(*arguments)
    if type(lookup) is tuple:
        return out if out is not None else lookup[0]
    check_update(UPDATE_OP, *tensors, activation, conv_state_indices, null_slot, out)
    norm = check_norm(UPDATE_OP, qk_l2norm, x.shape[1])
    require_update(*tensors, conv_state_indices, null_slot, out, norm=norm)

    given = tensors, out, conv_state_indices, null_slot, activation is not None, *norm
    results = UPDATES.record(arguments, _run, *given) if lookup is RECORD else _run(*given)
    return out if out is not None else results[0]


def _run(tensors: tuple[Any, ...], out: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Returns y, or nothing if it was written to `out`."""
    y = tensors[0].new_empty(tensors[0].shape) if out is None else out
    indices, null_slot, silu, *norm = others
    conv_update(*tensors, indices, null_slot, silu, y, *norm)
    return (y,) if out is None else ()


def require_update(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    op: str = UPDATE_OP,
    norm: tuple[int, int] | None = None,
) -> None:
    """Raises Unsupported if this version cannot run a well-formed call of `causal_conv1d_update`.

    Under QLA_CHECK=1 it also reads the slots of a GPU call, and raises ValueError if one is past
    the cache or if two sequences share one.

    Args:
        x: [N, channels], the new tokens.
        rows: the conv-state cache [slots, channels, width - 1 or more]; the last dimension holds
            the previous width - 1 inputs of a sequence, the oldest first.
        weight, bias: of the convolution, [channels, width] and [channels]; bias may be None.
        indices: [N], the slot of each sequence; None: sequence n has slot n.
        null_slot: slots up to this number mark padding; they are not checked.
        out: the tensor to which the call writes its result, or None.
        op: the name of the function, for the error.
        norm: (heads, size): the first heads * size output channels are L2-normalised in groups of
            `size`. None or (0, 0): no channels are.
    """
    require(refusal(x, weight, bias, norm, op=op))
    require(refused_rows(op, rows))
    if out is not None and out.is_cuda and (reason := refused_strides("out", out)):
        require(need(op, *reason))
    if indices is not None and indices.is_cuda and are_read(indices):
        check_places(op, SLOTS, indices, rows.shape[0], null_slot)
