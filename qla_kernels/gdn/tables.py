"""What chunk_table and segment_plan have in common: macros of one CTA that makes a table."""

import tilelang.language as T

from qla_kernels.tile.math import CHUNK

THREADS = 1024
WARPS = THREADS // 32


@T.macro
def count_on(total, all_before, s_sum):
    """From a number of each thread to sums, in order of the threads.

    total[0] becomes the sum up to this thread's and with it; all_before[0], which is included, that
    of all threads.
    """
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    before = T.alloc_var("int32")
    for d in T.unroll(5):
        below = T.shfl_up(total[0], 1 << d)
        if lane >= 1 << d:
            total[0] += below
    if lane == 31:
        s_sum[warp] = total[0]
    T.sync_threads()
    before = s_sum[lane]
    for d in T.unroll(5):
        below = T.shfl_up(before, 1 << d)
        if lane >= 1 << d:
            before += below
    total[0] += all_before[0] + T.shfl_sync(before - s_sum[lane], warp)
    all_before[0] += T.shfl_sync(before, 31)
    T.sync_threads()


@T.macro
def find(low, first, num, place):
    """low[0]: the one of `num` owners with first[low] <= place < first[low + 1]."""
    high, middle = T.alloc_var("int32"), T.alloc_var("int32")
    low[0] = 0
    high = num
    while low[0] + 1 < high:
        middle = (low[0] + high) // 2
        if first[middle] <= place:
            low[0] = middle
        else:
            high = middle


@T.macro
def place_chunks(cu_seqlens, chunks, num_chunks, first_chunk, s_sum):
    """As chunk_table says."""
    thread = T.get_thread_binding()
    total, all_before = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    low = T.alloc_local((1,), "int32")
    count, begin = T.alloc_var("int32"), T.alloc_var("int32")
    N = cu_seqlens.shape[0] - 1
    all_before[0] = 0
    for base in T.serial(T.ceildiv(N, THREADS)):  # 1
        n = base * THREADS + thread
        count = 0
        if n < N:
            count = T.cast(T.ceildiv(cu_seqlens[n + 1] - cu_seqlens[n], CHUNK), "int32")
        total[0] = count
        count_on(total, all_before, s_sum)
        if n < N:
            first_chunk[n] = total[0] - count
    if thread == 0:
        first_chunk[N] = all_before[0]
        num_chunks[0] = all_before[0]
    T.sync_threads()
    for i in T.serial(T.ceildiv(chunks.shape[0], THREADS)):  # 2
        c = i * THREADS + thread
        if c < chunks.shape[0]:
            chunks[c, 0] = 0
            chunks[c, 1] = 0
            if c < all_before[0]:
                find(low, first_chunk, N, c)
                begin = T.cast(cu_seqlens[low[0]], "int32") + (c - first_chunk[low[0]]) * CHUNK
                chunks[c, 0] = begin
                chunks[c, 1] = T.min(CHUNK, T.cast(cu_seqlens[low[0] + 1], "int32") - begin)
