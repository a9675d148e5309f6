"""segment_plan -- tables of segments, of the order of heads, and of chunks, made by one CTA each.

Sequence n has c_n = ceil(length_n / 64) chunks and p_n = max(1, ceil(c_n / segment_chunks))
segments of nearly the same number of chunks: segment j begins at chunk floor(j c_n / p_n).
    first_segment[n] = sum_{m < n} p_m, and first_segment[N] = num_segments
    bounds[p]        = the first token of segment p; segments lie end to end, as sequences do
    starts_of[p]     = n where segment p begins sequence n, else -1
    ends_of[p]       = n where segment p ends sequence n, else -1
The table is filled up with empty segments of no sequence. With wrong bounds, segments for which it
has no room are dropped; every first_segment[n] is a row of the table.

If the first sequence begins on another rank (open_start), an empty segment precedes it here. If the
last sequence continues on another rank (open_end), an empty segment follows it. All segments with
tokens then have neighbours, and the state that enters or leaves the sequence has its own row.

The order of heads is for segment_map and segment_map_bwd: heads that forget least come first,
because their segments have to be walked in full. The order is estimated from a few gates of each
head, and affects time only. The table of chunks equals chunk_table's; it is made if its capacity is
not 0.

Steps (numbers appear again in the code):
    1  counts are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread finds the sequence of its segment by bisection of first_segment
    3  each warp sums gates of some heads; a head's place is the number of those with larger sums

Bounded by latency. Why this shape: as chunk_table. The three CTAs run at the same time, which saves
a launch. An empty sequence has one empty segment, because its state has to be passed on. Every
segment but a sequence's last consists of whole chunks, so cutting moves no chunk's bounds.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.tables import (
    TABLE_THREADS,
    TABLE_WARPS,
    count_on,
    find,
    inside,
    place_chunks,
    sequence_span,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

TABLES = 3  # one CTA each
SAMPLES = 4 * 32  # sampled gates of a head
LEAST = -200.0  # lower limit of a sampled gate, and its value if it is NaN


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"), Variant("int64"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and the rows


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=TABLE_WARPS, regs=64, computes="segments, heads or chunks"),),
        smem_bytes=TABLE_WARPS * 4,
    )


@T.macro
def place_segments(
    cu_seqlens, first_segment, bounds, starts_of, ends_of, num_tokens, s_sum, segment_chunks,
    open_start, open_end,
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
            if n == 0:
                count += open_start
            if n == N - 1:
                count += open_end
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
            bounds[p] = inside(cu_seqlens[N], num_tokens)
            starts_of[p] = -1
            ends_of[p] = -1
            if p < all_before[0]:
                find(low, first_segment, N, p)
                n = low[0]
                sequence_span(cu_seqlens, n, num_tokens, begin, length)
                before = p - first_segment[n]  # segments of this sequence, here and all
                count = first_segment[n + 1] - first_segment[n]
                if before == 0:
                    starts_of[p] = n
                if before + 1 == count:
                    ends_of[p] = n
                if n == 0:  # leave out the empty segments at open ends
                    before = T.max(0, before - open_start)
                    count -= open_start
                if n == N - 1:
                    count -= open_end
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
        segment_chunks: T.int32,
        open_start: T.int32,
        open_end: T.int32,
    ):
        with T.Kernel(TABLES, threads=plan.threads) as table:
            s_sum = T.alloc_shared((TABLE_WARPS,), "int32")
            await_previous()
            if table == 0:
                place_segments(
                    cu_seqlens, first_segment, bounds, starts_of, ends_of, num_tokens, s_sum,
                    segment_chunks, open_start, open_end,
                )  # fmt: skip
            elif table == 1:
                order_heads(g, kept, heads, inside(cu_seqlens[num_bounds - 1], num_tokens))
            elif capacity > 0:
                place_chunks(cu_seqlens, chunks, num_chunks, first_chunk, num_tokens, s_sum)

    return segment_plan
