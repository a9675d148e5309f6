"""segment_plan -- tables of segments, of the order of heads, of chunks, and of whole sequences.

Sequence n has c_n = ceil(length_n / 64) chunks and p_n = max(1, ceil(c_n / segment_chunks))
segments of nearly the same number of chunks: segment j begins at chunk floor(j c_n / p_n).
    first_segment[n] = sum_{m < n} p_m, and first_segment[N] = num_segments
    bounds[p]        = the first token of segment p; segments lie end to end, as sequences do
    starts_of[p]     = n where segment p begins sequence n, else -1
    ends_of[p]       = n where segment p ends sequence n, else -1
The table is filled up with empty segments of no sequence. With wrong bounds, segments for which it
has no room are dropped; every first_segment[n] is a row of the table.

A batch that is cut over ranks has one or two stretches here: the first num_front sequences, and the
others, if any. The first sequence of a stretch may begin in another one, and the last one may go on
in another one. open_ends has a bit for each end of a stretch at which that is so, in order. An
empty segment precedes or follows the sequence there. All segments with tokens then have neighbours,
and the state that enters or leaves the stretch has its own row.

The order of heads is for segment_map and segment_map_bwd: heads that forget least come first,
because their segments have to be walked in full. The order is estimated from a few gates of each
head, and affects time only. The table of chunks equals chunk_table's; it is made if its capacity is
not 0.

If the host does not know the lengths, it passes bands (gdn/bands.py): rows (least, path, segments),
of which the last one with least <= c, c = max_n c_n, is taken. Of path 0, segments, segment_chunks
is the least number with which there are at most `segments` of them, or c if there is none; it is
found in two steps, each of which compares 32 candidates. Of any other path, the table has an empty
segment a sequence, which is of no sequence, and there are no chunks. Path i > 0 runs over whole
sequences: if it is taken, row i - 1 of whole_bounds is cu_seqlens, and that of whole_ends is
0, 1, ...; otherwise all sequences are empty and none ends. Sequences and segments of a path that is
not taken lie behind all tokens: no padding follows them, and the path writes nothing.

Steps (numbers appear again in the code):
    1  counts are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread finds the sequence of its segment by bisection of first_segment
    3  each warp sums gates of some heads; a head's place is the number of those with larger sums
    4  the longest sequence and its band: each CTA finds them for itself
    5  each warp counts the segments of a candidate for segment_chunks

Bounded by latency. Why this shape: as chunk_table. Each table has a CTA of its own, which saves
launches. An empty sequence has one empty segment, because its state has to be passed on. Every
segment but a sequence's last consists of whole chunks, so cutting moves no chunk's bounds.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.tables import (
    TABLE_THREADS,
    TABLE_WARPS,
    count_on,
    find,
    find_longest,
    inside,
    least_of_warps,
    place_chunks,
    sequence_span,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

TABLES = 4  # one CTA each
NO_CUT = 1 << 30  # chunks of a segment that no sequence has
SAMPLES = 4 * 32  # sampled gates of a head
LEAST = -200.0  # lower limit of a sampled gate, and its value if it is NaN


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"), Variant("int64"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and the rows


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=TABLE_WARPS, regs=64, computes="segments, heads or chunks"),),
        tiles={"sum": Tile((TABLE_WARPS,), "int32")},
    )


@T.macro
def take_band(
    cu_seqlens, bands, num_tokens, s_sum, longest: "T.Ref", path: "T.Ref", segments: "T.Ref"
):
    """Sets the longest sequence's chunks, and its band's path and segments; all threads call it."""
    find_longest(cu_seqlens, num_tokens, s_sum, longest)  # 4
    for i in T.serial(bands.shape[0]):
        if bands[i, 0] <= longest:
            path = bands[i, 1]
            segments = bands[i, 2]


@T.macro
def find_segment_chunks(
    cu_seqlens, num_tokens, s_sum, longest, segments, segment_chunks: "T.Ref"
):  # fmt: skip
    """Sets segment_chunks to the least number with which there are at most `segments`, or more."""
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    fits = T.alloc_local((1,), "int32")  # the number of the first warp whose candidate fits
    begin, length = T.alloc_var("int32"), T.alloc_var("int32")
    count, below, step = (T.alloc_var("int32") for _ in range(3))
    N = cu_seqlens.shape[0] - 1
    below = 0
    step = T.max(1, longest)
    for _ in T.unroll(2):  # 5
        step = T.ceildiv(step, TABLE_WARPS)
        count = 0
        for base in T.serial(T.ceildiv(N, 32)):
            n = base * 32 + lane
            if n < N:
                sequence_span(cu_seqlens, n, num_tokens, begin, length)
                count += T.max(1, T.ceildiv(T.ceildiv(length, CHUNK), below + (warp + 1) * step))
        for d in T.unroll(5):
            count += T.shfl_xor(count, 1 << d)
        fits[0] = T.if_then_else(count <= segments, warp, TABLE_WARPS - 1)
        least_of_warps(fits, s_sum)
        below += fits[0] * step
    segment_chunks = below + step


@T.macro
def place_whole(cu_seqlens, whole_bounds, whole_ends, path, num_tokens):
    """Writes the bounds of whole sequences for each path; only those of path - 1 have tokens."""
    thread = T.get_thread_binding()
    num_bounds = cu_seqlens.shape[0]
    for base in T.serial(T.ceildiv(num_bounds, TABLE_THREADS)):
        n = base * TABLE_THREADS + thread
        if n < num_bounds:
            for i in T.serial(whole_bounds.shape[0]):
                whole_bounds[i, n] = num_tokens
                whole_ends[i, n] = -1
                if path == i + 1:
                    whole_bounds[i, n] = inside(cu_seqlens[n], num_tokens)
                    whole_ends[i, n] = n


@T.macro
def clear_chunks(chunks, num_chunks, first_chunk):
    thread = T.get_thread_binding()
    most, num_bounds = chunks.shape[0], first_chunk.shape[0]
    if thread == 0:
        num_chunks[0] = 0
    for base in T.serial(T.ceildiv(most, TABLE_THREADS)):
        c = base * TABLE_THREADS + thread
        if c < most:
            chunks[c, 0] = 0
            chunks[c, 1] = 0
    for base in T.serial(T.ceildiv(num_bounds, TABLE_THREADS)):
        n = base * TABLE_THREADS + thread
        if n < num_bounds:
            first_chunk[n] = 0


def open_start(n, num_front, open_ends):
    """Returns 1 if an empty segment precedes sequence n, else 0."""
    back = T.if_then_else(n == num_front, open_ends >> 2 & 1, 0)
    return T.if_then_else(n == 0, open_ends & 1, back)


def open_end(n, N, num_front, open_ends):
    """Returns 1 if an empty segment follows sequence n, else 0."""
    back = T.if_then_else(n == N - 1, open_ends >> 3 & 1, 0)
    return T.if_then_else(n == num_front - 1, open_ends >> 1 & 1, back)


@T.macro
def place_segments(
    cu_seqlens, first_segment, bounds, starts_of, ends_of, num_tokens, s_sum, segment_chunks,
    num_front, open_ends, path,
):  # fmt: skip
    thread = T.get_thread_binding()
    total, all_before = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    low = T.alloc_local((1,), "int32")
    count, before = T.alloc_var("int32"), T.alloc_var("int32")
    begin, length = T.alloc_var("int32"), T.alloc_var("int32")
    N = cu_seqlens.shape[0] - 1
    rows = bounds.shape[0]
    most = rows - 1
    all_before[0] = 0
    for base in T.serial(T.ceildiv(N, TABLE_THREADS)):  # 1
        n = base * TABLE_THREADS + thread
        count = 0
        if n < N:
            sequence_span(cu_seqlens, n, num_tokens, begin, length)
            count = T.max(1, T.ceildiv(T.ceildiv(length, CHUNK), segment_chunks))
            count += open_start(n, num_front, open_ends) + open_end(n, N, num_front, open_ends)
        total[0] = count
        count_on(total, all_before, s_sum, most)
        if n < N - 1:
            first_segment[n + 1] = T.min(total[0], most - 1)
    if thread == 0:
        first_segment[0] = 0
        first_segment[N] = all_before[0]
    T.sync_threads()
    for i in T.serial(T.ceildiv(rows, TABLE_THREADS)):  # 2
        p = i * TABLE_THREADS + thread
        if p < rows:
            bounds[p] = T.if_then_else(path == 0, inside(cu_seqlens[N], num_tokens), num_tokens)
            starts_of[p] = -1
            ends_of[p] = -1
            if (p < all_before[0]) & (path == 0):
                find(low, first_segment, N, p)
                n = low[0]
                sequence_span(cu_seqlens, n, num_tokens, begin, length)
                before = p - first_segment[n]  # segments of this sequence, here and all
                count = first_segment[n + 1] - first_segment[n]
                if before == 0:
                    starts_of[p] = n
                if before + 1 == count:
                    ends_of[p] = n
                # leave out the empty segments at open ends
                before = T.max(0, before - open_start(n, num_front, open_ends))
                count -= open_start(n, num_front, open_ends) + open_end(n, N, num_front, open_ends)
                count = T.max(1, count)  # 0 if the table had no room for all of them
                bounds[p] = begin + T.min(
                    length, before * T.ceildiv(length, CHUNK) // count * CHUNK
                )


@T.macro
def order_heads(g, kept, heads, end):
    """Writes the heads in falling order of a sum of sampled gates among the first `end` tokens."""
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    before = T.alloc_var("int32")
    sample, total = T.alloc_var("float32"), T.alloc_var("float32")
    num_value_heads = g.shape[1]
    for i in T.serial(T.ceildiv(num_value_heads, TABLE_WARPS)):  # 3
        hv = i * TABLE_WARPS + warp
        total = 0
        if (hv < num_value_heads) & (end > 0):
            for j in T.unroll(SAMPLES // 32):
                sample = g[(j * 32 + lane) * (end // SAMPLES), hv]
                total += T.if_then_else(sample > LEAST, sample, LEAST)
        for d in T.unroll(5):
            total += T.shfl_xor(total, 1 << d)
        if (lane == 0) & (hv < num_value_heads):
            kept[hv] = total
    T.sync_threads()
    for i in T.serial(T.ceildiv(num_value_heads, TABLE_WARPS)):
        hv = i * TABLE_WARPS + warp
        before = 0
        if hv < num_value_heads:
            for j in T.serial(T.ceildiv(num_value_heads, 32)):
                other = j * 32 + lane
                if other < num_value_heads:
                    if (kept[other] > kept[hv]) | ((kept[other] == kept[hv]) & (other < hv)):
                        before += 1
        for d in T.unroll(5):
            before += T.shfl_xor(before, 1 << d)
        if (lane == 0) & (hv < num_value_heads):
            heads[before] = hv


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, rows, capacity = T.dynamic("num_bounds, rows, capacity")
    num_tokens, num_value_heads = T.dynamic("num_tokens, num_value_heads")
    num_bands, num_whole = T.dynamic("num_bands, num_whole")

    @T.prim_func
    def segment_plan(
        cu_seqlens: T.Tensor((num_bounds,), variant.dtype),
        first_segment: T.Tensor((num_bounds,), "int32"),
        bounds: T.Tensor((rows,), "int32"),
        starts_of: T.Tensor((rows,), "int32"),
        ends_of: T.Tensor((rows,), "int32"),
        g: T.Tensor((num_tokens, num_value_heads), "float32"),
        kept: T.Tensor((num_value_heads,), "float32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        first_chunk: T.Tensor((num_bounds,), "int32"),
        bands: T.Tensor((num_bands, 3), "int32"),
        whole_bounds: T.Tensor((num_whole, num_bounds), "int32"),
        whole_ends: T.Tensor((num_whole, num_bounds), "int32"),
        segment_chunks: T.int32,
        num_front: T.int32,
        open_ends: T.int32,
    ):
        with T.Kernel(TABLES, threads=plan.threads) as table:
            s = tiles(plan)
            longest, path, segments, most = (T.alloc_var("int32") for _ in range(4))
            await_previous()
            path = 0
            segments = 0
            most = segment_chunks
            if (num_bands > 0) & (table != 1):
                take_band(cu_seqlens, bands, num_tokens, s.sum, longest, path, segments)
            if table == 0:
                if num_bands > 0:
                    if (path == 0) & (segments > 0):
                        find_segment_chunks(
                            cu_seqlens, num_tokens, s.sum, longest, segments, most
                        )  # fmt: skip
                    else:
                        most = NO_CUT
                place_segments(
                    cu_seqlens, first_segment, bounds, starts_of, ends_of, num_tokens, s.sum,
                    most, num_front, open_ends, path,
                )  # fmt: skip
            elif table == 1:
                order_heads(g, kept, heads, inside(cu_seqlens[num_bounds - 1], num_tokens))
            elif table == 2:
                if (capacity > 0) & (path == 0):
                    place_chunks(cu_seqlens, chunks, num_chunks, first_chunk, num_tokens, s.sum)
                elif capacity > 0:
                    clear_chunks(chunks, num_chunks, first_chunk)
            else:
                place_whole(cu_seqlens, whole_bounds, whole_ends, path, num_tokens)

    return segment_plan
