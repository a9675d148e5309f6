"""The public function `causal_conv1d_update`: one token of each sequence, for decoding."""

import torch
from torch import Tensor

from qla_kernels.arguments import checks_contents
from qla_kernels.conv.ops import conv_update
from qla_kernels.conv.validate import (
    UPDATE_OP,
    check_slots,
    check_update,
    refusal,
    refused_rows,
)
from qla_kernels.errors import need
from qla_kernels.programs import RECORD, Programs
from qla_kernels.sm90 import refused_strides, require

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
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Runs `causal_conv1d` for one token of each of N sequences, on a pool of their last tokens.

    Each slot of the pool holds the width - 1 tokens before the next one, the oldest first; the
    token of x takes the place of the newest. One launch. Not differentiable.

    Args:
        x: [N, channels], as in `causal_conv1d`.
        conv_state: the pool [slots, channels, width - 1 or more] in x's dtype, any strides; only
            the first width - 1 places are used. It is overwritten.
        weight, bias, activation: as in `causal_conv1d`.
        conv_state_indices: [N] int32 or int64, the slot of each sequence. Two sequences must not
            share one. A sequence whose slot is at most null_slot is padding: its y is 0, and
            nothing of it is written. On a GPU so is one whose slot is past the pool; on a CPU, and
            under QLA_CHECK=1, that is a ValueError. Of int64 numbers a GPU reads the low word;
            those that do not fit in int32 are a ValueError there too. None: sequence n has slot n.
        null_slot: -1, or 0 if slot 0 is no state.
        out: [N, channels] in x's dtype, or x itself; y is written to it and returned.

    Returns:
        y [N, channels].

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    given = x, conv_state, weight, bias, activation, conv_state_indices, null_slot, out
    found = None if torch.compiler.is_compiling() else UPDATES.find(*given)
    if type(found) is tuple:
        for changed in (conv_state, out):
            if changed is not None:
                torch.autograd.graph.increment_version(changed)
        return out if out is not None else found[0]
    check_update(UPDATE_OP, *given)
    require_update(x, conv_state, weight, bias, conv_state_indices, null_slot, out)

    def run() -> tuple[Tensor, ...]:
        y = x.new_empty(x.shape) if out is None else out
        silu = activation is not None
        conv_update(x, conv_state, weight, bias, conv_state_indices, null_slot, silu, y)
        return (y,) if out is None else ()

    done = UPDATES.record(given, run) if found is RECORD else run()
    return out if out is not None else done[0]


def require_update(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    op: str = UPDATE_OP,
) -> None:
    """Raises Unsupported if this version cannot run a well-formed call.

    Under QLA_CHECK=1 it also reads the slots, and raises a ValueError if they are wrong.
    """
    require(refusal(x, weight, bias, op=op))
    require(refused_rows(op, rows))
    if out is not None and out.is_cuda and (reason := refused_strides("out", out)):
        require(need(op, *reason))
    asked = checks_contents() and not torch.compiler.is_compiling()
    if asked and indices is not None and indices.is_cuda:
        check_slots(op, indices, rows.shape[0], null_slot)
