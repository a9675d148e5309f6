"""The torch.library operators of the token-by-token form, with their CPU implementations.

    gdn_recurrent         takes initial states and returns final states
    gdn_recurrent_slots   updates states of a pool in place, in the slots that indices name

CUDA tensors go to decode/launch.py, which is imported at an operator's first call with one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import contents
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import checked, state_dtype
from qla_kernels.operators import Overwritten, define_on_records, imported_late, refuse_backward

OP = "fused_recurrent_gated_delta_rule"


class Pool(NamedTuple):
    """States in slots; each sequence names the slot that holds its state."""

    states: Overwritten  # [slots, HV, K, V], or [slots, HV, V, K] if state_v_first
    state_indices: Tensor  # [N] int32 or int64; negative for a sequence of padding


class Decoded(NamedTuple):
    """Results of gdn_recurrent."""

    o: Tensor  # [B, T, HV, V] in q's dtype
    final_state: Tensor | None  # as in gdn_fwd's results


@torch.no_grad()
def _recurrent_on_cpu(call: Call, options: Options) -> Decoded:
    q, k, v, g, beta, scale, h0, cu_seqlens, _, A_log, dt_bias = call
    contents.check_bounds(OP, q.shape[1], cu_seqlens)
    gdn, wide = reference().gdn, state_dtype(q)
    q, k = q.to(wide), k.to(wide)  # a norm is not rounded
    if options.use_qk_l2norm_in_kernel:
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    if A_log is not None:
        g = gdn.gate(g, A_log, dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    h0 = h0.mT if options.state_v_first and h0 is not None else h0
    with torch.autocast("cpu", enabled=False):
        o, final = gdn.recurrent(q, k, v, g, beta, scale, h0, cu_seqlens)
    if options.state_v_first:
        final = final.mT.contiguous()
    return Decoded(o.to(v.dtype), final if options.output_final_state else None)


@torch.no_grad()
def _slots_on_cpu(call: Call, pool: Pool, options: Options) -> Tensor:
    _check_indices(call, pool)
    live = pool.state_indices >= 0
    slots = pool.state_indices[live].long()
    h0 = pool.states.new_zeros(live.shape[0], *pool.states.shape[1:])
    h0[live] = pool.states[slots]
    o, final = _recurrent_on_cpu(
        call._replace(initial_state=h0), options._replace(output_final_state=True)
    )
    assert final is not None, "it was asked for"
    pool.states[slots] = final[live].to(pool.states.dtype)
    if call.cu_seqlens is None:
        o[~live] = 0
    else:
        owner = torch.repeat_interleave(call.cu_seqlens.diff())
        o[0, : owner.shape[0]][~live[owner]] = 0
    return o


def _fake_recurrent(call: Call, options: Options) -> Decoded:
    q, (HV, V) = call.q, call.v.shape[2:]
    shape = call.num_sequences, HV, *options.state_size(q.shape[-1], V)
    final = q.new_empty(shape, dtype=state_dtype(q)) if options.output_final_state else None
    return Decoded(call.v.new_empty(call.v.shape), final)


def _fake_slots(call: Call, pool: Pool, options: Options) -> Tensor:
    return call.v.new_empty(call.v.shape)


def _check_indices(call: Call, pool: Pool, *_: Any) -> None:
    """Raises ValueError if cu_seqlens is wrong, or an index is used twice or is past the pool.

    Gates are not checked, because tokens of a sequence with a negative index may hold anything.
    """
    contents.check_bounds(OP, call.q.shape[1], call.cu_seqlens)
    slots, indices = pool.states.shape[0], pool.state_indices.tolist()
    used = [i for i in indices if i >= 0]
    if len(set(used)) < len(used) or max(used, default=-1) >= slots:
        needs = f"different ones below {slots}, or negative"
        fix = "give each sequence a slot of its own"
        raise ValueError(need(OP, f"state_indices {indices}", needs, fix))


def _check_gates(call: Call, *_: Any) -> None:
    contents.check_contents(OP, call.g, call.beta, call.cu_seqlens)


def _no_backward(ctx: Any, *grads: Tensor | None) -> None:
    needs = "a forward alone: it is for inference"
    raise Unsupported(need(OP, "a backward pass", needs, "train with chunk_gated_delta_rule"))


def recorded_gdn_recurrent(call: Call, options: Options) -> Decoded:
    """Runs gdn_recurrent by the dispatcher, so that autograd records it and refuses a backward."""
    return Decoded(*torch.ops.qla_kernels.gdn_recurrent(*call, *options))


LAUNCHES = "qla_kernels.gdn.decode.launch"
gdn_recurrent = define_on_records(
    "gdn_recurrent",
    (Call, Options),
    Decoded,
    _fake_recurrent,
    checked(imported_late(LAUNCHES, "gdn_recurrent"), _check_gates),
    checked(_recurrent_on_cpu, _check_gates),
)
refuse_backward("gdn_recurrent", _no_backward)
gdn_recurrent_slots = define_on_records(
    "gdn_recurrent_slots",
    (Call, Pool, Options),
    Tensor,
    _fake_slots,
    checked(imported_late(LAUNCHES, "gdn_recurrent_slots"), _check_indices),
    _slots_on_cpu,
)
