"""The function `prefill_causal_conv1d`: prompts that go on from a pool of last tokens."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv.ops import conv_prefill
from qla_kernels.conv.validate import (
    PREFILL,
    PREFILL_OP,
    check_norm,
    check_pool,
    refusal,
    refused_rows,
)
from qla_kernels.runtime.contents import are_read, check_bounds
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.sm90 import require

PREFILLS = Programs(PREFILL_OP)


@torch.no_grad()
def prefill_causal_conv1d(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    *,
    start_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    qk_l2norm: tuple[int, int] | None = None,
    null_slot: int = -1,
) -> Tensor:
    """Runs `causal_conv1d` on packed prompts that go on from a pool, which is updated in place.

    Each slot of the pool holds the last width - 1 tokens of a sequence, the oldest first. Not
    differentiable. Arguments that are not listed are those of `causal_conv1d_update`.

    Args:
        x: [T, channels]. Tokens past the last sequence are not read, and their results are 0.
        cu_seqlens: [N + 1] int32 or int64, the bounds of the sequences.
        state_indices: [N] int32 or int64. The last tokens of sequence n go to slot
            state_indices[n], unless it is at most null_slot. Two sequences must not share a slot.
            Slots of sequences without tokens are not used.
        start_indices: [N]: the slot with the tokens before a sequence's first; None means
            state_indices. At most null_slot: there are none. It is the sequence's own slot, or one
            that no sequence overwrites.
        checkpoint_offsets: [N]: the last tokens after checkpoint_offsets[n] tokens of this call go
            to slot checkpoint_indices[n]. 0: nothing is kept.
        checkpoint_indices: [N].

    Returns:
        y [T, channels].

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    arguments = (
        x, conv_state, weight, bias, activation, cu_seqlens, state_indices, start_indices,
        checkpoint_offsets, checkpoint_indices, qk_l2norm, null_slot,
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else PREFILLS.find(*arguments)
    if type(lookup) is tuple:
        found: Tensor = lookup[0]
        return found
    kept = checkpoint_offsets, checkpoint_indices
    tables = cu_seqlens, state_indices, start_indices, *kept
    PREFILL.check(PREFILL_OP, x, conv_state, weight, bias, *tables)
    check_pool(PREFILL_OP, conv_state, weight, activation, null_slot)
    norm = check_norm(PREFILL_OP, qk_l2norm, x.shape[1])
    if (kept[0] is None) != (kept[1] is None):
        got, fix = "one of checkpoint_offsets and checkpoint_indices", "pass both, or neither"
        raise ValueError(need(PREFILL_OP, got, "both", fix))
    require(refusal(x, weight, bias, norm, op=PREFILL_OP))
    require(refused_rows(PREFILL_OP, conv_state))
    if are_read(cu_seqlens):
        check_bounds(PREFILL_OP, len(x), cu_seqlens)
    starts = state_indices if start_indices is None else start_indices
    given = (
        x, conv_state, weight, bias, cu_seqlens, starts, state_indices, *kept, null_slot,
        activation is not None, *norm,
    )  # fmt: skip
    return (PREFILLS.record(arguments, _run, *given) if lookup is RECORD else _run(*given))[0]


def _run(*given: Any) -> tuple[Tensor]:
    return (conv_prefill(*given),)
