"""The forward on a GPU from and into a pool of states: the launches of gdn_fwd, on slots."""

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch.forward import activated_batch, forward_batch, planned
from qla_kernels.gdn.launch.pools import Checkpoints, Places
from qla_kernels.gdn.launch.steps import FlatBatch, Outputs, SavedChunks
from qla_kernels.gdn.launch.tensors import (
    WHOLE,
    flat_parts,
    key_first,
    sequence_bounds,
    with_room,
)
from qla_kernels.gdn.plan import POOL_16, Plan
from qla_kernels.gdn.prefill.ops import PREFILL_OP, Prefill
from qla_kernels.gdn.shapes import POOL_KEYS
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.runtime import device
from qla_kernels.runtime.native.recording import overwritten
from qla_kernels.runtime.sm90 import require_aligned
from qla_kernels.tile.constants import CHUNK

NEVER = 1 << 30  # chunks: no sequence has so many


@torch.no_grad()
def gdn_prefill(call: Call, prefill: Prefill, options: Options) -> None:
    """Runs the operator gdn_prefill on CUDA tensors."""
    o = prefill.o
    require_aligned(PREFILL_OP, q=call.q, k=call.k, v=call.v, out=o)
    if not o.numel() or not call.num_sequences:
        _without_tokens(call, prefill)
    else:
        with device.of(call.q):
            plan, equal_lengths = planned(call, options, one_path=True)
            in_place = call.q.shape[3] == POOL_KEYS
            if not in_place:
                assert prefill.checkpoints is None, "`prefill_refusal` says so"
            elif prefill.states.dtype == torch.bfloat16:
                plan = plan._replace(kernel=POOL_16)
            elif prefill.checkpoints is not None:
                plan = plan._replace(kernel=keeping(plan))
            x, places = activated_batch(call, options), _places(call, prefill, options)
            saved = None if plan.kernel.solves else SavedChunks.empty(call.q, x.g)
            out, parts = Outputs(o, None, saved), flat_parts(x.q, x.k, x.v)
            if not in_place:
                x, out = _gathered(x, out, places)
            for rows in parts:
                part = x.of_part(rows), call.scale, plan, out.of_part(rows), equal_lengths
                own = places if rows == WHOLE else places.of_part(rows)
                forward_batch(*part, places=own if in_place else None)
            if out.ht is not None:
                places.take(out.ht[:, :, : call.q.shape[3]])
    overwritten(prefill.states, prefill.checkpoints, o)


def keeping(plan: Plan) -> ForwardChoice:
    """Returns the kernel that keeps states on the way, for a plan: one that solves for A itself.

    There is none with 128 columns of V for segments.
    """
    width = plan.kernel.tile_v if plan.segment_chunks is None else 64
    return ForwardChoice(width, True)


def _places(call: Call, prefill: Prefill, options: Options) -> Places:
    starts, N = prefill.start_indices, call.num_sequences
    ends = _table(prefill.state_indices)
    kept = None
    if prefill.checkpoints is not None:
        states = key_first(prefill.checkpoints, options.state_v_first)
        assert states is not None, "there are checkpoints"
        first = prefill.checkpoint_starts
        entries = sequence_bounds(call.q[:1].expand(N, -1, -1, -1)[:, :1], None)
        if first is not None:
            entries = _table(first)
        chunks = prefill.first_checkpoints
        every = prefill.every // CHUNK or NEVER
        kept = Checkpoints(states, entries, None if chunks is None else _table(chunks), every)
    pool = key_first(prefill.states, options.state_v_first)
    assert pool is not None, "a prefill has a pool"
    return Places(pool, ends if starts is None else _table(starts), ends, prefill.null_slot, kept)


def _gathered(x: FlatBatch, out: Outputs, places: Places) -> tuple[FlatBatch, Outputs]:
    """Returns both with states of their own, gathered from the pool, and room for final ones.

    Kernels read and write all rows of a state that their variant has, which slots may not have.
    """
    h0 = with_room(places.start_states())
    assert h0 is not None, "there are states"
    return x._replace(h0=h0), out._replace(ht=torch.empty_like(h0))


def _table(x: Tensor) -> Tensor:
    return x.int().contiguous()


def _without_tokens(call: Call, prefill: Prefill) -> None:
    """Empty sequences: each state passes from where it starts to where it ends, or is kept."""
    prefill.o.zero_()
    pool, null, ends = prefill.states, prefill.null_slot, prefill.state_indices
    starts = ends if prefill.start_indices is None else prefill.start_indices
    start_known, known = ((x > null) & (x < len(pool)) for x in (starts, ends))
    states = pool[torch.where(start_known, starts, 0).long()]
    states = torch.where(start_known.view(-1, 1, 1, 1), states, 0)
    pool[ends[known].long()] = states[known]
    if prefill.checkpoints is not None and prefill.first_checkpoints is not None:
        entries = prefill.first_entries(call.num_sequences)
        kept = (entries >= 0) & (entries < len(prefill.checkpoints))
        kept &= prefill.first_checkpoints == 0
        prefill.checkpoints[entries[kept].long()] = states[kept].to(prefill.checkpoints.dtype)
