"""The forward on a GPU, in order: allocates, chooses variants, launches; reads nothing back.

`forward_batch` is the order of the kernels; `forward_by_length` is that of a batch whose lengths
the device alone knows.
"""

import torch
from torch import Tensor

from qla_kernels.gdn import choices, ops
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import activations, segments
from qla_kernels.gdn.launch.backward import gdn_bwd, l2norm_bwd
from qla_kernels.gdn.launch.chains import public_states
from qla_kernels.gdn.launch.chunks import fused_fwd, gate, kkt_solve, l2norm_fwd
from qla_kernels.gdn.launch.pools import Places
from qla_kernels.gdn.launch.segments import Maps, Segments, Whole
from qla_kernels.gdn.launch.steps import (
    Ends,
    FlatBatch,
    Outputs,
    SavedChunks,
    chain,
    chain_segments,
    cut_batch,
    map_segments,
    solve,
)
from qla_kernels.gdn.launch.tensors import (
    batch_of,
    flat_parts,
    fresh_like,
    key_first,
    pass_state_through,
    put_states,
    room_for,
    room_for_chunks,
    sequence_bounds,
    with_room,
)
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime import device
from qla_kernels.runtime.sm90 import require_aligned
from qla_kernels.runtime.varlen import ChunkTable

__all__ = ["fused_fwd", "gate", "gdn_bwd", "gdn_fwd", "kkt_solve", "l2norm_bwd", "l2norm_fwd"]


def gdn_fwd(call: Call, options: Options) -> GdnForward:
    """Runs the operator gdn_fwd on CUDA tensors."""
    require_aligned(OP, q=call.q, k=call.k, v=call.v)
    with device.of(call.q):
        plan, equal_lengths = planned(call, options)
        x = activated_batch(call, options)
        final_state, ht, out = _room(call, options, plan.solves, x)
        parts, found = flat_parts(x.q, x.k, x.v), None
        for rows in parts:
            part, out_b = x.of_part(rows), out.of_part(rows)
            if plan.bands:
                found = forward_by_length(part, call.scale, plan, out_b, options.is_train)
            else:
                found = forward_batch(part, call.scale, plan, out_b, equal_lengths)
        put_states(ht, out.ht)
        h, cp_cache = None, list[Tensor]()
        if options.output_h:
            assert out.saved is not None, "_room made it"
            h = public_states(call, options, x.beta, x.h0, out.saved)
        kept = found if len(parts) == 1 else None
        keeps = options.enable_fwd_cp_cache
        if keeps is None:
            keeps = kept is not None and _keeps(call, options, plan)
        if keeps:
            cp_cache = [*kept[0], *kept[1]] if kept else ops.empty_cache(call.q, *call.v.shape[2:])
    g_cum, A = out.saved if options.is_train and out.saved is not None else (None, None)
    return GdnForward(out.o, final_state, g_cum, A, h, cp_cache)


def forward_batch(
    x: FlatBatch,
    scale: float,
    plan: Plan,
    out: Outputs,
    equal_lengths: bool = False,
    made: tuple[Segments, ChunkTable | None] | None = None,
    places: Places | None = None,
) -> tuple[Segments, Maps] | None:
    """Launches the forward of one batch.

        segment_plan         cuts long sequences into segments, if the plan has segments
        pool_states          gathers the start states of sequences from a pool
        segment_places       where segments end in a pool
        gate, kkt_solve      A of every chunk, if the chain does not solve for it
        segment_map          the map that each segment applies to the state that enters it
        segment_scan         the state that enters each segment
        share_table          which chunks each CTA of fused_fwd gets, if the plan has equal shares
        fused_fwd            the chain over the chunks of each segment, or of each sequence
        pool_states          puts final states into a pool in bf16, if sequences were cut

    At K = 256 chunk_table and solve_score take the place of kkt_solve, wide_windows and wide_map
    that of segment_map, wide_scan that of segment_scan, and wide_fwd that of fused_fwd.

    Args:
        x: the batch.
        scale: multiplies q.
        plan: where to cut, and the variant of the chain.
        out: the tensors to write. A chain that does not solve needs room in `out.saved`.
        equal_lengths: the sequences are known to have one length, or nearly so.
        made: segments to take instead of those of the plan, and the chunk table if the plan's
            kernel does not solve.
        places: where states start and end in a pool; then neither x nor `out` has states.

    Returns:
        The segments and their maps, whose `left` then holds the start states; None if nothing was
        cut, and at K = 256, where a backward has no segments.
    """
    g, h0, bounds = x.g, x.h0, x.bounds
    wide = x.q.shape[-1] == WIDE
    if wide and (bounds.shape[0] == 1 or not out.o.numel()):  # no token that a sequence owns
        for fresh in (out.o, *(out.saved or ())):
            fresh.zero_()
        pass_state_through(h0, out.ht)
        return None
    cut = table = None
    if made is not None:
        cut, table = made
    elif plan.segment_chunks is not None:
        cut, table = cut_batch(x, plan)
    own = of_segments = None
    if cut is not None and places is not None:  # before kkt_solve, which `maps` may read early
        h0, own = places.start_states(), places
        if places.pool.dtype != torch.float32:  # as the start states of segments are
            own = places.in_fp32(bounds.shape[0] - 1)
        of_segments = own.of_segments(cut, bounds, g.shape[0] * g.shape[1])
    solved = solve(x, scale, plan, out.saved, table, cut)
    if cut is None:
        ends = Ends(bounds, h0, out.ht)
        how = {"places": places, "shares": plan.shares, "most_cut": plan.most_cut}
        chain(x, scale, plan.kernel, solved, out, ends, equal_lengths=equal_lengths, **how)
        return None
    found = map_segments(x._replace(h0=h0), plan, solved, cut)
    chain_segments(x, scale, plan, solved, out, cut, found, h0, of_segments)
    if places is not None and own is not None and own is not places:
        places.take(own.pool)
    return (cut, found) if isinstance(found, Maps) else None


def forward_by_length(
    x: FlatBatch, scale: float, plan: Plan, out: Outputs, saves: bool
) -> tuple[Segments, Maps] | None:
    """Launches the forward of a batch whose lengths the device alone knows: a plan with bands.

        segment_plan         finds the longest sequence; fills the tables of the path to take
        one stream           the path of segments: the kernels of `forward_batch`
        the caller's stream  fused_fwd over whole sequences, for each kernel of another path

    One of the paths has tokens. The others run beside it and write no results.

    Args:
        saves: `out.saved` is for a backward; otherwise only kernels that do not solve need it.

    Returns:
        As `forward_batch`, where segments are the only path, else None.
    """
    table, kernels, num_tokens = None, plan.whole, x.g.shape[0] * x.g.shape[1]
    if plan.has_segments and not plan.solves:
        table = room_for_chunks(num_tokens, x.bounds)
    shape = len(kernels), len(x.bounds)
    whole = Whole(*(x.bounds.new_empty(shape, dtype=torch.int32) for _ in Whole._fields))
    cut = segments.cut(x.g, x.bounds, None, table=table, bands=plan.bands, whole=whole)

    def over_segments() -> tuple[Segments, Maps] | None:
        if not plan.has_segments:
            return None
        return forward_batch(x, scale, plan, out, made=(cut, table))

    if not kernels:
        return over_segments()
    with device.fork(x.q) as aside:
        with aside:
            over_segments()
        for i, kernel in enumerate(kernels):
            path = plan.of_whole(kernel)
            fused_fwd(
                x.q, x.k, x.v, x.g, x.beta, scale, x.h0, whole.bounds[i], out.o, out.ht,
                out.saved if saves else None, kernel, whole.ends_of[i], early=False,
                shares=path.shares, most_cut=path.most_cut,
            )  # fmt: skip
    return None


def planned(call: Call, options: Options, one_path: bool = False) -> tuple[Plan, bool]:
    """Returns the plan, and whether whole sequences are known to have one length, or nearly so.

    Without auto_cp, the plan is one whose results do not depend on the batch. `one_path` is as for
    `choices.forward`.
    """
    wide = call.q.shape[-1] == WIDE
    if not options.auto_cp:
        batch_invariant = Plan(gdn_plan.BATCH_INVARIANT)
        HV, V = call.v.shape[2:]
        return gdn_plan.wide(0, HV, V, 1) if wide else batch_invariant, False
    batch, shape = batch_of(call)
    plan = choices.forward(batch, shape, options.warm_log_bound, one_path)
    if wide or plan.bands or not batch.known:
        return plan, False
    return plan, len(batch.chunks) == 1 and plan.segment_chunks is None


def _keeps(call: Call, options: Options, plan: Plan) -> bool:
    """Returns whether to keep segments for a backward where the caller leaves it open."""
    if not options.is_train:
        return False
    batch, shape = batch_of(call)
    return choices.keeps(batch, call.q.shape[2], shape, options.warm_log_bound, plan)


def activated_batch(call: Call, options: Options) -> FlatBatch:
    """Returns the call's inputs as kernels read them, with activated gates and betas."""
    as_is = torch.float32 if options.output_h else call.q.dtype  # for `public_states`
    raw = call.g, call.beta, call.A_log, call.dt_bias
    g, beta = activations.activate(*raw, options.beta_range, as_is)
    h0 = None if call.initial_state is None else call.initial_state.float()
    h0 = with_room(key_first(h0, options.state_v_first))
    return FlatBatch(call.q, call.k, call.v, g, beta, h0, sequence_bounds(g, call.cu_seqlens))


def _room(
    call: Call, options: Options, solves: bool, x: FlatBatch
) -> tuple[Tensor | None, Tensor | None, Outputs]:
    """Returns uninitialised results: final states in the caller's layout, with K first, and all as
    kernels write them.

    solves: no kernel is given an A.
    """
    final_state = saved = None
    if options.output_final_state and call.initial_state is not None:
        final_state = fresh_like(call.initial_state, torch.float32)
    elif options.output_final_state:
        size = options.state_size(call.q.shape[-1], call.v.shape[-1])
        shape = call.num_sequences, call.v.shape[2], *size
        final_state = call.v.new_empty(shape, dtype=torch.float32)
    if options.is_train or options.output_h or not solves:
        saved = SavedChunks.empty(call.q, x.g)
    ht = key_first(final_state, options.state_v_first)
    return final_state, ht, Outputs(fresh_like(call.v), room_for(ht), saved)
