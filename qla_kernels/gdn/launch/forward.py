"""The forward on a GPU, in order: allocates, chooses variants, launches; reads nothing back.

`forward_batch` is the order of the kernels, for a whole batch and for a rank's part of one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.gdn import heuristics, ops
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.launch import activations, segments
from qla_kernels.gdn.launch.backward import gdn_bwd, l2norm_bwd
from qla_kernels.gdn.launch.chains import public_states
from qla_kernels.gdn.launch.chunks import fused_fwd, gate, kkt_solve, l2norm_fwd
from qla_kernels.gdn.launch.segments import Maps, Segments
from qla_kernels.gdn.launch.tensors import (
    chunks_of,
    flat_parts,
    fresh_like,
    key_first,
    of_part,
    room_for_chunks,
    sequence_bounds,
)
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.validate import OP
from qla_kernels.sm90 import require_aligned
from qla_kernels.tile.constants import CHUNK

__all__ = ["fused_fwd", "gate", "gdn_bwd", "gdn_fwd", "kkt_solve", "l2norm_bwd", "l2norm_fwd"]


class FlatBatch(NamedTuple):
    """The tokens of one launch: [B, T, heads, size] or [B, T, HV], whose B and T flatten."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # fp32, natural log
    beta: Tensor  # fp32, or as q where the plan's kernel solves
    bounds: Tensor  # [N + 1] of the sequences, where B is 1; or 0, T, 2 T, ...


class SavedChunks(NamedTuple):
    """Tensors that the chain writes for the backward, or reads if it does not solve for A."""

    g_cum: Tensor  # [B, T, HV] fp32, natural log, cumulated within each chunk
    A: Tensor  # [B, T, HV, 64]

    def of_part(self, rows: slice) -> "SavedChunks":
        return SavedChunks(*of_part(rows, *self))


class Outputs(NamedTuple):
    """Tensors that the forward of one batch writes."""

    o: Tensor  # [B, T, HV, V]
    ht: Tensor | None  # [N, HV, K, V] fp32
    saved: SavedChunks | None


def gdn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    output_h: bool,
    is_train: bool,
    auto_cp: bool,
    enable_fwd_cp_cache: bool,
    warm_log_bound: float,
) -> GdnForward:
    require_aligned(OP, q=q, k=k, v=v)
    with device.of(q):
        bound = warm_log_bound if auto_cp else None
        plan, equal_lengths = _planned(q, v, cu_seqlens, cu_seqlens_cpu, bound)
        beta_range = activations.beta_range(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        # only kernels that solve read a beta of 16 bits
        as_is = q.dtype if plan.kernel.solves and not output_h else torch.float32
        g, beta = activations.activate(g, beta, A_log, dt_bias, beta_range, as_is)
        h0, o, saved = None if initial_state is None else initial_state.float(), fresh_like(v), None
        ht = _final_states(v, q, h0, cu_seqlens, state_v_first) if output_final_state else None
        if is_train or output_h or not plan.kernel.solves:
            saved = room_to_save(q, g)
        parts, found = flat_parts(q, k, v), None
        for rows in parts:
            q_b, k_b, v_b, g_b, beta_b, o_b = of_part(rows, q, k, v, g, beta, o)
            x = FlatBatch(q_b, k_b, v_b, g_b, beta_b, sequence_bounds(q_b, cu_seqlens))
            h0_b, ht_b = (key_first(state, rows, state_v_first) for state in (h0, ht))
            out = Outputs(o_b, ht_b, None if saved is None else saved.of_part(rows))
            found = forward_batch(x, scale, h0_b, plan, out, equal_lengths)
        h, cp_cache = None, list[Tensor]()
        if output_h:
            assert saved is not None
            h = public_states(k, v, beta, saved, h0, cu_seqlens, cu_seqlens_cpu, state_v_first)
        if enable_fwd_cp_cache:
            kept = found if len(parts) == 1 else None
            cp_cache = [*kept[0], *kept[1]] if kept else ops.empty_cache(q, *v.shape[2:])
    g_cum, A = saved if is_train and saved is not None else (None, None)
    return GdnForward(o, ht, g_cum, A, h, cp_cache)


def forward_batch(
    x: FlatBatch,
    scale: float,
    h0: Tensor | None,
    plan: Plan,
    out: Outputs,
    equal_lengths: bool = False,
    open_ends: tuple[bool, bool] = (False, False),
    exchange: Callable[[Maps, Segments], Tensor | None] | None = None,
) -> tuple[Segments, Maps] | None:
    """Launches the forward of one batch.

        segment_plan         cuts long sequences into segments, if the plan has segments
        gate, kkt_solve      A of every chunk, if the chain does not solve for it
        segment_map          the map that each segment applies to the state that enters it
        segment_scan         the state that enters each segment
        fused_fwd            the chain over the chunks of each segment, or of each sequence

    Args:
        x: the batch.
        scale: multiplies q.
        h0: [N, HV, K, V] fp32, the state that enters each sequence; zeros if None.
        plan: where to cut, and the variant of the chain.
        out: the tensors to write. A chain that does not solve needs room in `out.saved`.
        equal_lengths: the sequences are known to have one length, or nearly so.
        open_ends: whether the first sequence begins, and the last one ends, on another rank.
        exchange: called with the maps and the segments; returns the state [HV, V, K] that enters
            at an open start, or None.

    Returns:
        The segments and their maps, whose `left` then holds the start states; None if nothing was
        cut.
    """
    cut = table = None
    if plan.segment_chunks is not None:
        if not plan.kernel.solves:  # segment_plan writes the chunk table, too
            table = room_for_chunks(x.g.shape[0] * x.g.shape[1], x.bounds)
        cut = segments.cut(x.g, x.bounds, plan.segment_chunks, *open_ends, table)
    g, A, growth = x.g, None, None
    if not plan.kernel.solves:
        growth = torch.empty_like(x.g) if cut is not None and plan.grows else None
        g, A = kkt_solve(x.k, x.g, x.beta, x.bounds, table, out.saved, growth)
    if cut is None:
        fused_fwd(
            x.q, x.k, x.v, x.g, x.beta, scale, h0, x.bounds, *out, plan.kernel, None, equal_lengths
        )
        return None
    found = segments.maps(
        x.k, x.v, g, x.beta, A, h0, cut, plan.warm_log_bound, growth,
        early=not plan.kernel.solves,
    )  # fmt: skip
    entering = None if exchange is None else exchange(found, cut)
    starts = segments.start_states(found, h0, cut, entering)  # a view of found.left
    fused_fwd(x.q, x.k, x.v, x.g, x.beta, scale, starts, cut.bounds, *out, plan.kernel, cut.ends_of)
    return cut, found


def room_to_save(q: Tensor, g: Tensor) -> SavedChunks:
    """Returns g_cum and A, uninitialised."""
    return SavedChunks(torch.empty_like(g), q.new_empty(*g.shape, CHUNK))


def _planned(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    warm_log_bound: float | None,
) -> tuple[Plan, bool]:
    """Returns the plan, and whether whole sequences are known to have one length, or nearly so.

    Without a bound, the plan is one whose results do not depend on the batch.
    """
    if warm_log_bound is None:
        return Plan(heuristics.BATCH_INVARIANT, None), False
    B, T, HV, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = chunks_of(N, T * B, cu_seqlens_cpu)
    sms = device.sm_count(q.device)
    plan = gdn_plan.forward(chunks, HV, q.shape[-1], V, sms, warm_log_bound)
    known = cu_seqlens is None or cu_seqlens_cpu is not None
    return plan, known and len(chunks) == 1 and plan.segment_chunks is None


def _final_states(
    v: Tensor, q: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool
) -> Tensor:
    """Returns uninitialised final states: like h0, or contiguous in the caller's layout."""
    if h0 is not None:
        return fresh_like(h0)
    (B, _, HV, V), K = v.shape, q.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size = (V, K) if state_v_first else (K, V)
    return v.new_empty(N, HV, *size, dtype=torch.float32)
