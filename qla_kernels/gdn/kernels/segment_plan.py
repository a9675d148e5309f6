"""segment_plan -- where long sequences are cut into segments, by one CTA.

Sequence n has c_n = ceil(length_n / 64) chunks and p_n = max(1, ceil(c_n / segment_chunks))
segments of nearly the same number of chunks: segment j begins at chunk floor(j c_n / p_n).
    first_segment[n] = sum_{m < n} p_m, and first_segment[N] = num_segments
    bounds[p]        = the first token of segment p; segments lie end to end, as sequences do
    starts_of[p]     = n where segment p begins sequence n, else -1
    ends_of[p]       = n where segment p ends sequence n, else -1
Behind the last segment there are empty ones, of no sequence, up to the capacity of the table.

Where the first sequence has begun elsewhere (open_start), an empty segment begins it here; where
the last one goes on elsewhere (open_end), an empty segment ends it here. All segments with tokens
then have neighbours, and what enters or leaves the sequence has a row of its own.

The order of heads is for the kernels that map segments: heads that forget least come first, because
what they forget little of has to be walked in full. It is a guess from a few gates of each, and
nothing but time depends on it.

Steps (numbers appear again in the code):
    1  counts are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread finds the sequence of its segment by bisection of first_segment
    3  each warp sums gates of some heads; a head's place is the number of those with larger sums

Bounded by latency. Why this shape: as chunk_table. An empty sequence has one empty segment, because
its state has to be handed on; and every segment but a sequence's last is whole chunks, so cutting
moves no chunk's bounds.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.math import CHUNK
from qla_kernels.tile.schedule import Role, Schedule

THREADS = 1024
WARPS = THREADS // 32
SAMPLES = 4 * 32  # gates of a head
LEAST = -200.0  # what a gate counts for at least, and what one that is no number counts for


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"), Variant("int64"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and the rows


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=WARPS, regs=64, computes="first_segment, bounds, heads"),),
        smem_bytes=WARPS * 4,
    )


def build(v: Variant):
    plan = schedule(v)
    num_bounds, rows = T.dynamic("num_bounds, rows")
    num_tokens, num_value_heads = T.dynamic("num_tokens, num_value_heads")

    @T.prim_func
    def segment_plan(
        cu_seqlens: T.Tensor((num_bounds,), v.dtype),
        first_segment: T.Tensor((num_bounds,), "int32"),
        bounds: T.Tensor((rows,), "int32"),
        starts_of: T.Tensor((rows,), "int32"),
        ends_of: T.Tensor((rows,), "int32"),
        g: T.Tensor((num_tokens, num_value_heads), "float32"),
        kept: T.Tensor((num_value_heads,), "float32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        segment_chunks: T.int32,
        open_start: T.int32,
        open_end: T.int32,
    ):
        with T.Kernel(1, threads=plan.threads) as _:
            s_sum = T.alloc_shared((WARPS,), "int32")
            count, total, before, all_before = (T.alloc_var("int32") for _ in range(4))
            low, high = T.alloc_var("int32"), T.alloc_var("int32")
            sample, total_g = T.alloc_var("float32"), T.alloc_var("float32")
            begin, end = T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            await_previous()
            N = num_bounds - 1
            all_before = 0
            for base in T.serial(T.ceildiv(N, THREADS)):  # 1
                n = base * THREADS + thread
                count = 0
                if n < N:
                    begin = T.cast(cu_seqlens[n], "int32")
                    end = T.cast(cu_seqlens[n + 1], "int32")
                    count = T.max(1, T.ceildiv(T.ceildiv(end - begin, CHUNK), segment_chunks))
                    if n == 0:
                        count += open_start
                    if n == N - 1:
                        count += open_end
                total = count
                for d in T.unroll(5):
                    below = T.shfl_up(total, 1 << d)
                    if lane >= 1 << d:
                        total += below
                if lane == 31:
                    s_sum[warp] = total
                T.sync_threads()
                before = s_sum[lane]
                for d in T.unroll(5):
                    below = T.shfl_up(before, 1 << d)
                    if lane >= 1 << d:
                        before += below
                total += all_before + T.shfl_sync(before - s_sum[lane], warp)
                all_before += T.shfl_sync(before, 31)
                if n < N:
                    first_segment[n] = total - count
                T.sync_threads()
            if thread == 0:
                first_segment[N] = all_before
            T.sync_threads()
            for i in T.serial(T.ceildiv(rows, THREADS)):  # 2
                p = i * THREADS + thread
                if p < rows:
                    bounds[p] = T.cast(cu_seqlens[N], "int32")
                    starts_of[p] = -1
                    ends_of[p] = -1
                    if p < all_before:
                        low = 0
                        high = N
                        while low + 1 < high:  # first_segment[low] <= p < first_segment[high]
                            middle = (low + high) // 2
                            if first_segment[middle] <= p:
                                low = middle
                            else:
                                high = middle
                        begin = T.cast(cu_seqlens[low], "int32")
                        end = T.cast(cu_seqlens[low + 1], "int32")
                        before = p - first_segment[low]  # segments of this sequence, here and all
                        count = first_segment[low + 1] - first_segment[low]
                        if before == 0:
                            starts_of[p] = low
                        if before + 1 == count:
                            ends_of[p] = low
                        if low == 0:  # the same without the empty ones at open ends
                            before = T.max(0, before - open_start)
                            count -= open_start
                        if low == N - 1:
                            count -= open_end
                        bounds[p] = T.min(
                            end, begin + before * T.ceildiv(end - begin, CHUNK) // count * CHUNK
                        )
            for i in T.serial(T.ceildiv(num_value_heads, WARPS)):  # 3
                hv = i * WARPS + warp
                total_g = 0
                end = T.cast(cu_seqlens[N], "int32")
                if (hv < num_value_heads) & (end > 0):
                    for j in T.unroll(SAMPLES // 32):
                        sample = g[(j * 32 + lane) * (end // SAMPLES), hv]
                        total_g += T.if_then_else(sample > LEAST, sample, LEAST)
                for d in T.unroll(5):
                    total_g += T.shfl_xor(total_g, 1 << d)
                if (lane == 0) & (hv < num_value_heads):
                    kept[hv] = total_g
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_value_heads, WARPS)):
                hv = i * WARPS + warp
                before = 0
                if hv < num_value_heads:
                    for j in T.serial(T.ceildiv(num_value_heads, 32)):
                        other = j * 32 + lane
                        if other < num_value_heads:
                            if (kept[other] > kept[hv]) | (
                                (kept[other] == kept[hv]) & (other < hv)
                            ):
                                before += 1
                for d in T.unroll(5):
                    before += T.shfl_xor(before, 1 << d)
                if (lane == 0) & (hv < num_value_heads):
                    heads[before] = hv

    return segment_plan.with_attr("global_symbol", f"segment_plan_{v.dtype}")
