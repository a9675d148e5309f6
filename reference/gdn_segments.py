"""Long sequences in segments: runs of chunks that begin before their start state is known.

Over any run of chunks S_end = M S_start + b. Columns of [b | M] are independent, so one chain
yields both: from S = 0 with the values, b; from S = I with values 0, M (gates included). The first
segment of a sequence starts from its initial state instead of 0: its b is its end state, and M is
not needed.

Warm-up. |M| <= prod_t e^{g_t} max(1, |1 - beta_t |k_t|^2|). Where that bound over the last w chunks
of a segment is below e^-12 = 6e-6, b computed from those w chunks alone *is* the end state: the
segment is "warm" for that head. The second factor matters: keys with beta |k|^2 > 2 grow the state.

Fold. S_start(p) = b_{p-1} if p-1 is warm or first, else M_{p-1} S_start(p-1) + b_{p-1}.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from .chunks import Chunks, cut, sequence_spans
from .gdn_chunked import (
    Round,
    Tiles,
    chain,
    compute_dtype,
    end_states,
    forward_tiles,
    operand_rounding,
    outputs,
    start_states,
    value_tiles,
)

WARM_LOG_BOUND = -12.0


class Segments(NamedTuple):
    """P segments, sequence by sequence; an empty sequence has one empty segment."""

    spans: Tensor  # [P, 2] first and one-past-last flat token
    first: Tensor  # [N] the segment that begins each sequence
    last: Tensor  # [N] the segment that ends it


class SegmentMaps(NamedTuple):
    b: Tensor  # [P, HV, K, V]
    M: Tensor  # [P, HV, K, K]
    known: Tensor  # [P, HV] b is the end state, M is not needed: the segment is first or warm


def cut_segments(sequences: Tensor, segment_size: int) -> Segments:
    """Cut sequences, [N, 2] spans, into segments of `segment_size` tokens."""
    starts, ends = sequences.unbind(1)
    counts = ((ends - starts + segment_size - 1) // segment_size).clamp(min=1)
    first = counts.cumsum(0) - counts
    index = torch.arange(int(counts.sum()), device=starts.device) - first.repeat_interleave(counts)
    start = starts.repeat_interleave(counts) + index * segment_size
    end = (start + segment_size).minimum(ends.repeat_interleave(counts))
    return Segments(torch.stack([start, end], 1), first, first + counts - 1)


def warm_windows(
    chunks: Chunks, k: Tensor, beta: Tensor, gamma: Tensor, warm_log_bound: float = WARM_LOG_BOUND
) -> tuple[Tensor, Tensor]:
    """The fewest last chunks of each segment whose map is negligible, by the bound on |M|.

    k [n h i k], beta [n h r i] and gamma [n h r i] are tiles. Returns which chunks are in their
    segment's window [n h r], and which segments are warm [P h r]; every chunk of a segment that is
    not warm is in.
    """
    growth = 1 - beta * k.square().sum(-1)[:, :, None]
    log_bound = gamma[..., -1] + growth.abs().clamp(min=1).log().sum(-1)  # [n h r]
    grid = log_bound.new_zeros(
        len(chunks.longest_first), len(chunks.counts), *log_bound.shape[1:]
    )  # [P, steps, h, r]
    log_bound = grid.index_put((chunks.sequence, chunks.step), log_bound)
    below = log_bound.flip(1).cumsum(1).flip(1) < warm_log_bound  # bound over chunk i to the end
    starts_later = below.flip(1).cumsum(1).flip(1) - below.long()
    return (starts_later == 0)[chunks.sequence, chunks.step], below.any(1)


def segment_maps(
    chunks: Chunks,
    tiles: Tiles,
    gamma: Tensor,
    v: Tensor,
    segments: Segments,
    initial: Tensor,
    warm: bool,
    rounded: Round,
) -> SegmentMaps:
    """b and M of every segment by one chain over [v | 0] from [initial or 0 | I].

    A warm head's b runs over its window only: without values and initial state the state stays 0 up
    to the window, so dropping the values before it is the same as starting there.
    """
    K, V = tiles.k.shape[-1], v.shape[-1]
    in_window, is_warm = warm_windows(chunks, tiles.k, tiles.beta[..., 0], gamma)
    is_first = torch.zeros(len(segments.spans), dtype=torch.bool, device=v.device)
    is_first = is_first.index_fill(0, segments.first.to(v.device), True)
    kept = in_window | is_first[chunks.sequence, None, None] | (not warm)
    values = torch.where(kept[..., None, None], v, torch.zeros_like(v))
    no_values = v.new_zeros(*v.shape[:-1], K)

    identity = torch.eye(K, dtype=v.dtype, device=v.device).expand(*initial.shape[:-1], K)
    start = torch.cat([initial, identity], -1)
    run = chain(chunks, tiles, torch.cat([values, no_values], -1), start, rounded)
    b, M = torch.split(end_states(run.final, chunks), [V, K], -1)
    known = is_first[:, None] | (rearrange(is_warm, "p h r -> p (h r)") & warm)
    return SegmentMaps(b, M, known)


def fold(maps: SegmentMaps, segments: Segments, initial: Tensor, rounded: Round) -> Tensor:
    """The start state of every segment, [P, HV, K, V]; `initial` is that of every first segment."""
    first = set(segments.first.tolist())
    starts: list[Tensor] = []
    for p in range(len(segments.spans)):
        if p in first:
            starts.append(initial[p])
            continue
        b, M, known = maps.b[p - 1], maps.M[p - 1], maps.known[p - 1, :, None, None]
        starts.append(torch.where(known, b, hi_lo_product(M, starts[-1], rounded) + b))
    return torch.stack(starts) if starts else initial


def hi_lo_product(M: Tensor, S: Tensor, rounded: Round) -> Tensor:
    """M S from two-term operands; in 16 bits, one term each would cost a rounding per segment."""
    M_hi, S_hi = rounded(M), rounded(S)
    M_lo, S_lo = rounded(M - M_hi), rounded(S - S_hi)
    return M_hi @ S_hi + M_hi @ S_lo + M_lo @ S_hi


def segmented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segment_chunks: int = 4,
    warm: bool = True,
    chunk_size: int = 64,
    operand_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as `chunked`; returns o and the final states.

    warm=False folds every segment exactly; warm=True truncates where the bound allows it, which
    costs at most 6e-6 of the state before the window.
    """
    B, T, H, K = q.shape
    rounded = operand_rounding(operand_dtype)
    sequences = sequence_spans(B, T, cu_seqlens)
    segments = cut_segments(sequences, segment_chunks * chunk_size)
    chunks = cut(segments.spans, chunk_size, q.device)
    tiles, gamma = forward_tiles(chunks, q, k, g, beta, rounded)
    v_c = value_tiles(chunks, v, H, compute_dtype(q))

    first = segments.first.to(q.device)
    initial = v_c.new_zeros(len(segments.spans), v.shape[2], K, v.shape[3])
    if initial_state is not None:
        initial = initial.index_copy(0, first, initial_state.to(initial.dtype))
    in_chunk_order = start_states(initial, v_c, chunks, K)
    maps = segment_maps(chunks, tiles, gamma, v_c, segments, in_chunk_order, warm, rounded)
    starts = fold(maps, segments, initial, rounded)

    run = chain(chunks, tiles, v_c, start_states(starts, v_c, chunks, K), rounded)
    o = outputs(tiles, run, scale if scale is not None else K**-0.5, rounded)
    o = chunks.tokens(rearrange(o, "n h r i v -> n i (h r) v"), B, T).to(q.dtype)
    return o, end_states(run.final, chunks)[segments.last.to(q.device)]
