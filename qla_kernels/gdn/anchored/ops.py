"""The torch.library operators of a pool, with their CPU implementations.

    gdn_pool_extend   appends tokens to sequences, as prefill and decode do
    gdn_pool_reject   takes tokens back

Both change tensors of the pool in place. CUDA tensors go to anchored/launch.py, which is imported
at an operator's first call with one.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Extension, Slots, extend, live_slots
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import activated, l2norm_fwd, state_dtype
from qla_kernels.runtime.contents import check_words
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.op import Overwritten, op

POOL_OP = "GdnPool"


class Rejection(NamedTuple):
    """Tokens that are taken back from the ends of sequences."""

    lengths: Overwritten  # as Slots has it
    anchored: Tensor  # as Slots has it
    state_indices: Tensor  # [N], as in Extension
    num_tokens: Tensor  # [N] integers
    null_slot: int  # as in Extension


def _check_slots(call: Call, pool: Slots, extension: Extension, *_: Any) -> None:
    """Raises ValueError if two sequences have one slot, or an index is beyond int32."""
    indices, null_slot = extension.state_indices, extension.null_slot
    _check_indices(indices, live_slots(indices, len(pool.lengths), null_slot))


def _check_rejection(rejection: Rejection) -> None:
    """Raises ValueError if slots are wrong, or more tokens go than a tail holds."""
    lengths, anchored, state_indices, num_tokens, null_slot = rejection
    live = live_slots(state_indices, len(lengths), null_slot)
    _check_indices(state_indices, live)
    held = (lengths - anchored)[torch.where(live, state_indices, null_slot).long()]
    if (live & ((num_tokens < 0) | (num_tokens > held))).any():
        got, needs = f"num_tokens {num_tokens.tolist()}", f"0 to {held.tolist()} of them"
        fix = "take back at most the tokens of the last decode"
        raise ValueError(need(POOL_OP, got, needs, fix))


def _check_indices(state_indices: Tensor, live: Tensor) -> None:
    check_words(POOL_OP, "state_indices", state_indices)
    used = state_indices[live].tolist()
    if len(set(used)) < len(used):
        got = f"state_indices {state_indices.tolist()}"
        fix = "give each sequence a slot of its own"
        raise ValueError(need(POOL_OP, got, "different ones, or such of padding", fix))


LAUNCHES = "qla_kernels.gdn.anchored.launch"


@op(LAUNCHES, check=_check_slots)
def gdn_pool_extend(
    call: Call, pool: Slots, extension: Extension, options: Options
) -> Annotated[Tensor, "like v"]:
    _check_slots(call, pool, extension)
    q, k = call.q, call.k
    if options.use_qk_l2norm_in_kernel:
        q, k = l2norm_fwd(q), l2norm_fwd(k)
    g, beta = (x.to(state_dtype(q)) for x in activated(call, options))
    return extend(call._replace(q=q, k=k, g=g, beta=beta), pool, extension)


@op(LAUNCHES, check=_check_rejection)
def gdn_pool_reject(rejection: Rejection) -> None:
    _check_rejection(rejection)
    lengths, _, state_indices, num_tokens, null_slot = rejection
    live = live_slots(state_indices, len(lengths), null_slot)
    lengths.index_add_(0, state_indices[live].long(), -num_tokens[live].int())
