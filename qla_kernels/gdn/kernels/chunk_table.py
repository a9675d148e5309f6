"""chunk_table -- where each chunk of packed sequences lies, by one CTA.

Sequence n has c_n = ceil(length_n / 64) chunks:
    first_chunk[n] = sum_{m < n} c_m, and first_chunk[N] = num_chunks
    chunks[c]      = (first token, tokens) of chunk c; (0, 0) from num_chunks on

Steps (numbers appear again in the code):
    1  counts are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread finds the sequence of its chunk by bisection of first_chunk

Bounded by latency: a few microseconds whatever the lengths are. Why this shape: as tensor
operations the table costs ten launches, which is what a short forward takes altogether.
`varlen.chunk_table` is the same table for any device.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.math import CHUNK
from qla_kernels.tile.schedule import Role, Schedule

THREADS = 1024
WARPS = THREADS // 32


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"), Variant("int64"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and capacity


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=WARPS, regs=64, computes="first_chunk, chunks"),),
        smem_bytes=WARPS * 4,
    )


def build(v: Variant):
    plan = schedule(v)
    num_bounds, capacity = T.dynamic("num_bounds, capacity")

    @T.prim_func
    def chunk_table(
        cu_seqlens: T.Tensor((num_bounds,), v.dtype),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        first_chunk: T.Tensor((num_bounds,), "int32"),
    ):
        with T.Kernel(1, threads=plan.threads) as _:
            s_sum = T.alloc_shared((WARPS,), "int32")
            count, total, before, all_before = (T.alloc_var("int32") for _ in range(4))
            low, high = T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            await_previous()
            N = num_bounds - 1
            all_before = 0
            for base in T.serial(T.ceildiv(N, THREADS)):  # 1
                n = base * THREADS + thread
                count = 0
                if n < N:
                    count = T.cast(T.ceildiv(cu_seqlens[n + 1] - cu_seqlens[n], CHUNK), "int32")
                total = count
                for d in T.unroll(5):
                    below = T.shfl_up(total, 1 << d)
                    if lane >= 1 << d:
                        total += below
                if lane == 31:
                    s_sum[warp] = total
                T.sync_threads()
                before = all_before
                for w in T.serial(WARPS):
                    if w < warp:
                        before += s_sum[w]
                    all_before += s_sum[w]
                if n < N:
                    first_chunk[n] = before + total - count
                T.sync_threads()
            if thread == 0:
                first_chunk[N] = all_before
                num_chunks[0] = all_before
            for i in T.serial(T.ceildiv(capacity, THREADS)):  # 2
                c = i * THREADS + thread
                if c < capacity:
                    if c < all_before:
                        low = 0
                        high = N
                        while low + 1 < high:  # first_chunk[low] <= c < first_chunk[high]
                            middle = (low + high) // 2
                            if first_chunk[middle] <= c:
                                low = middle
                            else:
                                high = middle
                        begin = T.cast(cu_seqlens[low], "int32") + (c - first_chunk[low]) * CHUNK
                        chunks[c, 0] = begin
                        chunks[c, 1] = T.min(CHUNK, T.cast(cu_seqlens[low + 1], "int32") - begin)
                    else:
                        chunks[c, 0] = 0
                        chunks[c, 1] = 0

    return chunk_table.with_attr("global_symbol", f"chunk_table_{v.dtype}")
