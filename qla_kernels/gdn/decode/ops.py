"""The torch.library operators of the token-by-token form, with their CPU implementations.

    gdn_recurrent         takes initial states and returns final states
    gdn_recurrent_slots   updates states of a pool in place, in the slots that indices name
    gdn_recurrent_norm    the same for one token, then RMSNorm and the output gate
    gdn_verify            runs draft tokens from slots of a pool, and keeps the state after each

The last three write o to a tensor of the caller and return nothing. CUDA tensors go to
decode/launch.py, which is imported at an operator's first call with one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.contents import check_contents
from qla_kernels.gdn.ops import state_dtype
from qla_kernels.runtime import contents
from qla_kernels.runtime.contents import check_words
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.op import Overwritten, op, refuse_backward

OP = "fused_recurrent_gated_delta_rule"
VERIFY_OP = "verify_gated_delta_rule"


class Pool(NamedTuple):
    """States in slots; each sequence names the slot that holds its state."""

    states: Overwritten  # [slots, HV, K, V], or [slots, HV, V, K] if state_v_first
    state_indices: Tensor  # [N] int32 or int64; at most null_slot for a sequence of padding
    o: Overwritten  # [B, T, HV, V] in q's dtype
    null_slot: int = -1  # or 0


class Slots(NamedTuple):
    """A Pool of a call that may leave the allocation of o to us."""

    states: Tensor
    state_indices: Tensor
    o: Tensor | None
    null_slot: int

    def with_room(self, v: Tensor) -> Pool:
        o = v.new_empty(v.shape) if self.o is None else self.o
        return Pool(self.states, self.state_indices, o, self.null_slot)


class Norm(NamedTuple):
    """RMSNorm over a head's columns of o, and its gate."""

    z: Tensor  # [N, HV, V] in q's dtype
    norm_weight: Tensor  # [V]
    eps: float
    sigmoid: bool  # the gate's activation, else silu
    ahead: bool = False  # the launch before writes no state and no index, and waits for all earlier


class Drafts(NamedTuple):
    """Where draft tokens start from, and where the states after them go."""

    states: Overwritten  # as Pool's; not changed if state_indices is [N]
    state_indices: Tensor  # [N, S]: slots after tokens 0, 1, ..; or [N]: slots to start from
    num_accepted: Tensor | None  # [N]; a sequence starts from its slot num_accepted - 1; 1 if None
    checkpoints: Overwritten | None  # [rows, S, HV, K, V], or [.., V, K]; with state_indices [N]
    checkpoint_indices: Tensor | None  # [N]: the row of each sequence
    parents: Tensor | None  # [N, S]: the token from whose state a token starts
    o: Overwritten  # [B, T, HV, V] in q's dtype
    null_slot: int = -1


class Decoded(NamedTuple):
    """Results of gdn_recurrent."""

    o: Tensor  # [B, T, HV, V] in q's dtype
    final_state: Tensor | None  # as in gdn_fwd's results


def _recurrence(call: Call, options: Options) -> tuple[Tensor, Tensor]:
    """Returns o before it is rounded, and the final states."""
    contents.check_bounds(OP, call.q.shape[1], call.cu_seqlens)
    h0 = call.initial_state
    h0 = h0.mT if options.state_v_first and h0 is not None else h0
    given = _activated(call, options)
    o, final = reference().gdn.recurrent(*given, call.scale, h0, call.cu_seqlens)
    return o, final.mT.contiguous() if options.state_v_first else final


def _activated(call: Call, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, g and beta after norm, gate and sigmoid, without rounding."""
    q, k, v, g, beta, *_ = call
    gdn, wide = reference().gdn, state_dtype(q)
    q, k = q.to(wide), k.to(wide)  # a norm is not rounded
    if options.use_qk_l2norm_in_kernel:
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    if call.A_log is not None:
        g = gdn.gate(g, call.A_log, call.dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    return q, k, v, g, beta


def _in_slots(call: Call, pool: Pool, options: Options) -> tuple[Tensor, Tensor]:
    """Updates the states; returns o before it is rounded, and which sequences have a slot."""
    _check_indices(call, pool)
    live = pool.state_indices > pool.null_slot
    slots = pool.state_indices[live].long()
    h0 = pool.states.new_zeros(live.shape[0], *pool.states.shape[1:])
    h0[live] = pool.states[slots]
    o, final = _recurrence(call._replace(initial_state=h0), options)
    pool.states[slots] = final[live].to(pool.states.dtype)
    return o, live


def _clear(o: Tensor, call: Call, sequences: Tensor) -> None:
    """Sets the rows of o of some sequences, a mask [N], to 0."""
    if call.cu_seqlens is None:
        o[sequences] = 0
    else:
        owner = torch.repeat_interleave(call.cu_seqlens.diff())
        o[0, : owner.shape[0]][sequences[owner]] = 0


def _fake_recurrent(call: Call, options: Options) -> Decoded:
    q, (HV, V) = call.q, call.v.shape[2:]
    shape = call.num_sequences, HV, *options.state_size(q.shape[-1], V)
    final = q.new_empty(shape, dtype=state_dtype(q)) if options.output_final_state else None
    return Decoded(call.v.new_empty(call.v.shape), final)


def _check_indices(call: Call, pool: Pool, *_: Any) -> None:
    """Raises ValueError if cu_seqlens is wrong, or an index is used twice or is past the pool.

    Gates are not checked, because tokens of a sequence with a negative index may hold anything.
    """
    contents.check_bounds(OP, call.q.shape[1], call.cu_seqlens)
    contents.check_places(
        OP, "state_indices", pool.state_indices, pool.states.shape[0], pool.null_slot
    )


def _check_drafts(call: Call, drafts: Drafts, *_: Any) -> None:
    """Raises ValueError if bounds, slots, rows or parents are wrong, or a sequence is too long."""
    T, indices, bounds = call.q.shape[1], drafts.state_indices, call.cu_seqlens
    contents.check_bounds(VERIFY_OP, T, bounds)
    count, null = drafts.states.shape[0], drafts.null_slot
    is_changed = indices.dim() == 2
    contents.check_places(VERIFY_OP, "state_indices", indices, count, null, apart=is_changed)
    if drafts.checkpoints is not None and drafts.checkpoint_indices is not None:
        rows = drafts.checkpoint_indices
        contents.check_places(VERIFY_OP, "checkpoint_indices", rows, len(drafts.checkpoints), -1)
    lengths = [T] * call.num_sequences if bounds is None else bounds.diff().tolist()
    room = indices.shape[1] if indices.dim() == 2 else T
    room = room if drafts.checkpoints is None else drafts.checkpoints.shape[1]
    room = room if drafts.parents is None else min(room, drafts.parents.shape[1])
    if max(lengths, default=0) > room:
        got, needs = f"sequences of {lengths} tokens", f"at most {room}, the states kept of each"
        raise ValueError(need(VERIFY_OP, got, needs, "widen the table, or pass fewer drafts"))
    if drafts.num_accepted is not None:
        accepted = drafts.num_accepted.tolist()
        if not all(1 <= x <= room for x in accepted):
            needs = f"numbers from 1 to {room}"
            fix = "count the tokens of the last step whose states hold"
            raise ValueError(need(VERIFY_OP, f"num_accepted_tokens {accepted}", needs, fix))
    if drafts.parents is not None:
        check_words(VERIFY_OP, "parents", drafts.parents)
        for n, length in enumerate(lengths):
            parents = drafts.parents[n, 1:length].tolist()
            if any(parent > t for t, parent in enumerate(parents)):
                got, needs = f"parents {parents} of tokens 1, 2, ..", "tokens before them"
                raise ValueError(need(VERIFY_OP, got, needs, "put parents before children"))


def _check_gates(call: Call, *_: Any) -> None:
    check_contents(OP, call)


def _no_backward(ctx: Any, *grads: Tensor | None) -> None:
    needs = "a forward alone: it is for inference"
    raise Unsupported(need(OP, "a backward pass", needs, "train with chunk_gated_delta_rule"))


LAUNCHES = "qla_kernels.gdn.decode.launch"


@op(LAUNCHES, _fake_recurrent, _check_gates)
def gdn_recurrent(call: Call, options: Options) -> Decoded:
    o, final = _recurrence(call, options)
    return Decoded(o.to(call.v.dtype), final if options.output_final_state else None)


refuse_backward("gdn_recurrent", _no_backward)


def recorded_gdn_recurrent(call: Call, options: Options) -> Decoded:
    """Runs gdn_recurrent by the dispatcher, so that autograd records it and refuses a backward."""
    return Decoded(*torch.ops.qla_kernels.gdn_recurrent(*call, *options))


@op(LAUNCHES, check=_check_indices)
def gdn_recurrent_slots(call: Call, pool: Pool, options: Options) -> None:
    o, live = _in_slots(call, pool, options)
    _clear(o, call, ~live)
    pool.o.copy_(o)


@op(LAUNCHES, check=_check_indices)
def gdn_recurrent_norm(call: Call, pool: Pool, norm: Norm, options: Options) -> None:
    o, live = _in_slots(call, pool, options)
    z, weight, eps, sigmoid, _ = norm
    y = reference().gdn.gated_rms_norm(o, z.unsqueeze(1), weight, eps, sigmoid)
    _clear(y, call, ~live)
    pool.o.copy_(y)


@op(LAUNCHES, check=_check_drafts)
def gdn_verify(call: Call, drafts: Drafts, options: Options) -> None:
    _check_drafts(call, drafts)
    indices, rows, N = drafts.state_indices, drafts.checkpoint_indices, call.num_sequences
    slots = indices
    if indices.dim() == 2:
        accepted = indices.new_ones(N) if drafts.num_accepted is None else drafts.num_accepted
        last = accepted.long().clamp(1, max(indices.shape[1], 1)) - 1
        slots = indices.gather(1, last[:, None])[:, 0]
    live = slots > drafts.null_slot
    if rows is not None:
        live &= rows >= 0
    pool = drafts.states.mT if options.state_v_first else drafts.states
    h0 = pool.new_zeros(N, *pool.shape[1:])
    h0[live] = pool[slots[live].long()]
    given = _activated(call, options)
    o, states = reference().gdn.draft_recurrent(
        *given, drafts.parents, call.scale, h0, call.cu_seqlens
    )
    _clear(o, call, ~live)
    drafts.o.copy_(o)
    bounds = call.cu_seqlens
    for n in live.nonzero()[:, 0].tolist():
        after = states[n] if bounds is None else states[0, bounds[n] : bounds[n + 1]]
        after = after.mT if options.state_v_first else after
        if drafts.checkpoints is not None and rows is not None:
            drafts.checkpoints[rows[n], : len(after)] = after.to(drafts.checkpoints.dtype)
        elif indices.dim() == 2:
            for t, slot in enumerate(indices[n, : len(after)].tolist()):
                if slot > drafts.null_slot:
                    drafts.states[slot] = after[t].to(drafts.states.dtype)
