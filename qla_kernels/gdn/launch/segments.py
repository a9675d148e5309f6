"""Cuts long sequences into segments on the GPU, and computes the state that enters each segment.

A segment begins a multiple of 64 tokens into its sequence, so that the other kernels can treat it
as a sequence: `bounds` then serves as cu_seqlens, and its start state as an initial state.

A sequence of a batch that is cut over ranks may begin or continue elsewhere: it has an open end
here. An empty segment is added there, so that the state that enters or leaves lies between two
segments, like any other (sharded/links.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.kernels import segment_map as segment_map_kernel
from qla_kernels.gdn.kernels import segment_map_bwd as segment_map_bwd_kernel
from qla_kernels.gdn.kernels import segment_plan as segment_plan_kernel
from qla_kernels.gdn.kernels import segment_scan as segment_scan_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.tensors import no_chunks, no_state, tokens
from qla_kernels.gdn.lengths import capacity
from qla_kernels.gdn.shapes import key_room
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.device_tables import kept, numbers
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.runtime.varlen import ChunkTable
from qla_kernels.tile.constants import CHUNK

Rows = tuple[tuple[int, int, int], ...]


class Segments(NamedTuple):
    """Tables of the segments of packed sequences, with room for the most segments there can be.

    Segments lie end to end. Rows after the last segment are empty segments of no sequence.
    """

    bounds: Tensor  # [capacity + 1] int32: segment p has the tokens bounds[p] to bounds[p + 1]
    starts_of: Tensor  # [capacity + 1] int32: the sequence that segment p begins, or -1
    ends_of: Tensor  # [capacity + 1] int32: the sequence that segment p ends, or -1
    first_segment: Tensor  # [N + 1] int32
    heads: Tensor  # [HV] int32: an order of the heads; those that seem to forget least come first

    @property
    def capacity(self) -> int:
        return self.bounds.shape[0] - 1


class OpenEnds(NamedTuple):
    """Which ends of the sequences on this rank are open."""

    num_front: int  # the batch has one or two stretches: these sequences, and the others
    bits: int  # from the lowest: the first stretch's start and end, the second's start and end


NO_ENDS = OpenEnds(0, 0)


class Whole(NamedTuple):
    """Tables of whole sequences for the kernels of several paths, of which one has tokens."""

    bounds: Tensor  # [paths, N + 1] int32: cu_seqlens for the path that is taken, else all T
    ends_of: Tensor  # [paths, N + 1] int32: n for sequence n of the path that is taken, else -1


class Maps(NamedTuple):
    """The affine maps of the segments: S_end = M S_start + b. K is that of the kernels' variant.

    A segment is warm for a head if b is the state that leaves it, and cold if M is needed.
    """

    left: Tensor  # [capacity, HV, V, K] fp32: row p + 1 has b of segment p, transposed
    M: Tensor  # [capacity, HV, 2, K, K] bf16: if cold, M^T as the sum of two terms
    cold: Tensor  # [capacity, HV] int32: 1 if M is needed; not written for a sequence's last one


def of_cache(cp_cache: Sequence[Tensor]) -> tuple[Segments, Maps] | None:
    """Returns the segments and maps in a forward's cache, or None if it holds no segments.

    `left` of these maps holds the start states.
    """
    if not cp_cache or not cp_cache[0].numel():
        return None
    num = len(Segments._fields)
    return Segments(*cp_cache[:num]), Maps(*cp_cache[num:])


def cut(
    g: Tensor,
    cu_seqlens: Tensor,
    segment_chunks: int | None,
    open_ends: OpenEnds = NO_ENDS,
    table: ChunkTable | None = None,
    bands: Rows = (),
    whole: Whole | None = None,
) -> Segments:
    """Cuts sequences of more than `segment_chunks` chunks into segments of nearly equal length.

    Args:
        g: [B, T, HV] fp32, gates or their sums within chunks; samples of it decide the order of
            heads.
        segment_chunks: the most chunks of a segment; None if there are bands.
        open_ends: sequences that began, or continue, on another rank.
        table: if given, the chunks of the sequences are written to it by the same launch.
        bands: those of a plan, of which the longest sequence decides: segment_plan.
        whole: if given, written by the same launch.

    Returns:
        The tables, filled by one launch.
    """
    (B, T, HV), N = g.shape, cu_seqlens.shape[0] - 1
    if segment_chunks is not None:
        most = capacity(B * T, N, segment_chunks)
    else:
        most = max(N, *(segments for _, _, segments in bands))
    rows = most + open_ends.bits.bit_count() + 1
    sizes = (rows, rows, rows, N + 1, HV)
    segments = Segments(*(cu_seqlens.new_empty(n, dtype=torch.int32) for n in sizes))
    first = segments.first_segment
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
        *(table or no_chunks(first)),
        first.as_strided((0, 3), (3, 1)) if not bands else _rows_of(cu_seqlens.device, bands),
        *(whole or Whole(*[first.as_strided((0, N + 1), (N + 1, 1))] * 2)),
        0 if segment_chunks is None else segment_chunks,
        *open_ends,
    )
    return segments


@kept(256)
def _rows_of(on: torch.device, rows: Rows) -> Tensor:
    return numbers(rows, on)


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
    """Returns the map of each segment but a sequence's last one, which no later segment needs.

    Args:
        k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32, natural log: g_cum of kkt_solve if A is given, else gates.
        beta: [B, T, HV] fp32; if A is None, it may also have k's dtype.
        A: [B, T, HV, 64] of kkt_solve; if None, the kernel solves for it and does not store it.
        h0: [N, HV, K, V] fp32, any strides; zeros if None.
        warm_log_bound: if the last chunks of a segment scale the state before them by less than
            e^this, only these chunks are walked, from a state of 0, and the segment is warm.
        growth: [B, T, HV] fp32 of kkt_solve; if None, the kernel computes it from the keys.
        early: A and growth come from the launch right before this one and all other inputs from
            earlier launches; the kernel then reads these before that launch ends.
    """
    (B, T, HV, V), K = v.shape, key_room(k.shape[-1])
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


def start_states(found: Maps, h0: Tensor | None, segments: Segments) -> Tensor:
    """Folds the maps of `maps` into the state that enters each segment.

    Overwrites found.left, whose row behind an open start has the state that enters there.

    Returns:
        [capacity, HV, K, V] fp32, a view of found.left; rows of no segment are not written.
    """
    return fold(found.left, h0, found, segments.first_segment, reverse=False).mT


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
    """Returns the gradient of the state that leaves each segment, [capacity, HV, K, V] fp32.

    Runs `left_gradients`, and then `fold_gradients` with the maps `found`.
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
    """Returns the gradient of the state that enters each segment if no gradient came from behind.

    Only a sequence's last segment starts from a gradient, dht; the others start from 0. A
    sequence's first segment is left out.

    Args:
        q, k, do: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        dht: [N, HV, K, V] fp32, any strides; zeros if None.
        warm_log_bound: as in `maps`, for the first chunks of a segment.

    Returns:
        [capacity, HV, V, K] fp32: row p - 1 has the gradient of segment p. If segment p is warm or
        a sequence's last, that is already the full gradient of the state between p - 1 and p.
    """
    (B, T, HV, V), K = do.shape, key_room(k.shape[-1])
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


def fold_gradients(left: Tensor, dht: Tensor | None, found: Maps, segments: Segments) -> Tensor:
    """Folds the result of `left_gradients` into the gradient of the state that leaves each segment.

    Overwrites `left`, whose row before an open end has the gradient of the state that leaves there.

    Returns:
        [capacity, HV, K, V] fp32, a view of `left`; rows of no segment are not written.
    """
    return fold(left, dht, found, segments.first_segment, reverse=True).mT


def fold(
    states: Tensor, given: Tensor | None, found: Maps, first_segment: Tensor, reverse: bool
) -> Tensor:
    """Runs segment_scan on `states` over the sequences of consecutive rows of first_segment."""
    K = states.shape[-1]
    columns = (len(first_segment) - 1) * states.shape[1] * states.shape[2]
    each = gdn_plan.scan_columns(columns, device.sm_count(states.device))
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
