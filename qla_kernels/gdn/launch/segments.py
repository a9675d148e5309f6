"""Long sequences in segments, on the GPU: where they are cut, and the state that enters each.

A segment begins a multiple of 64 tokens into its sequence, so to every other kernel it is a
sequence like any other: with `bounds` for cu_seqlens, and its start state for an initial state.

The first sequence of a shard may come from another rank, and the last one go on at another. Such an
open end has an empty segment of its own: what enters or leaves there is the state between two
segments. A `link` is what the sequence does to a state or gradient on its way through.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.gdn import heuristics
from qla_kernels.gdn.kernels import segment_map as segment_map_kernel
from qla_kernels.gdn.kernels import segment_map_bwd as segment_map_bwd_kernel
from qla_kernels.gdn.kernels import segment_plan as segment_plan_kernel
from qla_kernels.gdn.kernels import segment_scan as segment_scan_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.tensors import no_chunks, no_state, tokens
from qla_kernels.gdn.plan import capacity
from qla_kernels.sm90 import dtype_name
from qla_kernels.tile.constants import CHUNK
from qla_kernels.varlen import ChunkTable


class Segments(NamedTuple):
    """Segments of packed sequences, one after the other, with room for the most there can be.

    Behind the last one there are empty ones that belong to no sequence.
    """

    bounds: Tensor  # [capacity + 1] int32: segment p has the tokens bounds[p] to bounds[p + 1]
    starts_of: Tensor  # [capacity + 1] int32: the sequence that segment p begins, or -1
    ends_of: Tensor  # [capacity + 1] int32: the sequence that segment p ends, or -1
    first_segment: Tensor  # [N + 1] int32
    heads: Tensor  # [HV] int32: those first that look as if they forget least

    @property
    def capacity(self) -> int:
        return self.bounds.shape[0] - 1


class Maps(NamedTuple):
    """What segments do to the states that enter them: S_end = M S_start + b."""

    left: Tensor  # [capacity, HV, V, K] fp32: in row p + 1, b or all of what segment p leaves
    M: Tensor  # [capacity, HV, 2, K, K] bf16: where cold, M^T as the sum of two
    cold: Tensor  # [capacity, HV] int32: whether M is needed; unwritten for a sequence's last one


def of_cache(cp_cache: Sequence[Tensor]) -> tuple[Segments, Maps] | None:
    """What a forward kept, with start states in place of `left`; None if it cut nothing."""
    if not cp_cache or not cp_cache[0].numel():
        return None
    num = len(Segments._fields)
    return Segments(*cp_cache[:num]), Maps(*cp_cache[num:])


def cut(
    g: Tensor,
    cu_seqlens: Tensor,
    segment_chunks: int,
    open_start: bool = False,
    open_end: bool = False,
    table: ChunkTable | None = None,
) -> Segments:
    """Sequences of more than `segment_chunks` chunks, cut into segments of nearly equal length.

    Args:
        g: [B, T, HV] fp32, gates or their sums within chunks.
        table: room for the chunks of the sequences, written in the same launch.
    """
    (B, T, HV), N = g.shape, cu_seqlens.shape[0] - 1
    rows = capacity(B * T, N, segment_chunks) + open_start + open_end + 1
    sizes = (rows, rows, rows, N + 1, HV)
    segments = Segments(*(cu_seqlens.new_empty(n, dtype=torch.int32) for n in sizes))
    variant = segment_plan_kernel.Variant(dtype_name(cu_seqlens.dtype))
    jit.compile(segment_plan_kernel, variant)(
        cu_seqlens.contiguous(),
        segments.first_segment,
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        g.view(B * T, HV),
        g.new_empty(HV),
        segments.heads,
        *(table or no_chunks(segments.first_segment)),
        segment_chunks,
        int(open_start),
        int(open_end),
    )
    return segments


def maps(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor | None,
    h0: Tensor | None,
    segments: Segments,
    warm_log_bound: float,
    growth: Tensor | None = None,
    early: bool = False,
) -> Maps:
    """What each segment does to the state that enters it.

    Args:
        k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32, natural log: g_cum of kkt_solve where A is given, else gates.
        beta: [B, T, HV] fp32; where A is None, it may also be as k.
        A: [B, T, HV, 64] of kkt_solve; solved for again, and not kept, if None.
        h0: [N, HV, K, V] fp32, any strides; zeros if None.
        warm_log_bound: where the chunks at a segment's end leave less than e^this of the state that
            enters them, those chunks alone are taken.
        growth: [B, T, HV] fp32 of kkt_solve; found out here, from the keys, if None.
        early: A and growth come from the launch right before, all else from older ones.
    """
    (B, T, HV, V), K = v.shape, k.shape[-1]
    found = Maps(
        v.new_empty(segments.capacity, HV, V, K, dtype=torch.float32),
        v.new_empty(segments.capacity, HV, 2, K, K, dtype=torch.bfloat16),
        v.new_empty(segments.capacity, HV, dtype=torch.int32),
    )
    g, beta, is_16 = g.view(B * T, HV), beta.view(B * T, HV), beta.dtype != torch.float32
    variant = segment_map_kernel.Variant(dtype_name(k.dtype), K, A is None)
    jit.compile(segment_map_kernel, variant)(
        tokens(k),
        tokens(v, TILE),
        g,
        g if is_16 else beta,
        beta if is_16 else k.new_empty(0, HV),
        g if growth is None else growth.view(B * T, HV),
        v.new_empty(0, HV, CHUNK) if A is None else A.view(B * T, HV, CHUNK),
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        segments.heads,
        no_state(g, K, V) if h0 is None else h0,
        *found,
        warm_log_bound,
        int(h0 is not None),
        int(is_16),
        int(growth is not None),
        int(early),
    )
    return found


def start_states(
    found: Maps, h0: Tensor | None, segments: Segments, entering: Tensor | None = None
) -> Tensor:
    """The state that enters each segment, from what `maps` found; takes the place of `left`.

    entering: [HV, V, K] fp32, the state that enters the tokens at an open start.

    Returns [capacity, HV, K, V] fp32; rows of no segment are not written.
    """
    if entering is not None:
        found.left[1].copy_(entering)
    return _fold(found.left, h0, found, segments.first_segment, reverse=False).mT


def end_gradients(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    dht: Tensor | None,
    scale: float,
    found: Maps,
    segments: Segments,
    warm_log_bound: float,
) -> Tensor:
    """The gradient of the state that leaves each segment.

    As `left_gradients`, and then `fold_gradients`; found: of `maps`, with the same bound.
    """
    left = left_gradients(q, k, do, g_cum, beta, A, dht, scale, segments, warm_log_bound)
    return fold_gradients(left, dht, found, segments)


def left_gradients(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    dht: Tensor | None,
    scale: float,
    segments: Segments,
    warm_log_bound: float,
) -> Tensor:
    """The gradient of the state that enters each segment, as if nothing came after it.

    Args:
        q, k, do: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        dht: [N, HV, K, V] fp32, any strides; zeros if None.

    Returns:
        [capacity, HV, V, K] fp32: in row p - 1, that of segment p, or, where segment p is warm or
        a sequence's last, all there is.
    """
    (B, T, HV, V), K = do.shape, k.shape[-1]
    left = do.new_empty(segments.capacity, HV, V, K, dtype=torch.float32)
    variant = segment_map_bwd_kernel.Variant(dtype_name(k.dtype), K)
    jit.compile(segment_map_bwd_kernel, variant)(
        tokens(q),
        tokens(k),
        tokens(do, TILE),
        g_cum.view(B * T, HV),
        beta.view(B * T, HV),
        A.view(B * T, HV, CHUNK),
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        segments.heads,
        no_state(g_cum, K, V) if dht is None else dht,
        left,
        scale,
        warm_log_bound,
        int(dht is not None),
    )
    return left


def fold_gradients(
    left: Tensor,
    dht: Tensor | None,
    found: Maps,
    segments: Segments,
    entering: Tensor | None = None,
) -> Tensor:
    """The gradient of the state that leaves each segment; takes the place of `left`.

    entering: [HV, V, K] fp32, the gradient of the state that leaves the tokens at an open end.

    Returns [capacity, HV, K, V] fp32; rows of no segment are not written.
    """
    if entering is not None:
        left.index_copy_(0, segments.first_segment[-1:].long() - 2, entering[None])
    return _fold(left, dht, found, segments.first_segment, reverse=True).mT


def link(left: Tensor, found: Maps, segments: Segments, through: bool, reverse: bool) -> Tensor:
    """What the sequence at the open end that is left makes of what enters at the other one.

    Args:
        left: that of `maps`, or, in reverse, `left_gradients`; not changed.
        through: whether the sequence comes in at the other end, so that there is such a thing.

    Returns:
        [HV, V + K, K] fp32, transposed: rows of what leaves when nothing enters, then rows of the
        map from what enters to what leaves; zeros where nothing can come through.
    """
    HV, V, K = left.shape[1:]
    states = left.new_zeros(segments.capacity, HV, V + K, K)
    states[:, :, :V] = left
    bounds = segments.first_segment
    last = bounds[-1:].long() - 1  # the empty segment at an open end
    if through:
        identity = torch.cat([left.new_zeros(V, K), torch.eye(K, device=left.device)])
        if reverse:
            states.index_copy_(0, last - 1, identity.expand(1, HV, V + K, K))
        else:
            states[1] = identity
    _fold(states, None, found, bounds[:2] if reverse else bounds[-2:], reverse)
    return states[0] if reverse else states.index_select(0, last)[0]


def _fold(
    states: Tensor, given: Tensor | None, found: Maps, first_segment: Tensor, reverse: bool
) -> Tensor:
    K = states.shape[-1]
    columns = (len(first_segment) - 1) * states.shape[1] * states.shape[2]
    each = heuristics.scan_columns(columns, device.sm_count(states.device))
    variant = segment_scan_kernel.Variant(K, reverse, each)
    jit.compile(segment_scan_kernel, variant)(
        first_segment,
        no_state(states[0, :, 0, 0], K, states.shape[-2]) if given is None else given,
        states,
        found.M,
        found.cold,
        int(given is not None),
    )
    return states
