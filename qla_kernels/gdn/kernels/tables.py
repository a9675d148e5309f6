"""Where sequences and chunks lie: bounds as every kernel reads them, and macros of one CTA that
makes a table.

A caller's bounds may say anything: the host never reads them. `inside` and `sequence_span` are the
only places where kernels do, and what comes out of them lies inside the tensors. A table is made of
such spans and has room for what right bounds need; wrong ones, whose sequences may lie over one
another, fill it and end there. What a kernel of ours has read from a table needs no second look.
"""

import tilelang.language as T

from qla_kernels.tile.constants import CHUNK

THREADS = 1024
WARPS = THREADS // 32


def inside(bound, num_tokens):
    """A bound as a number of tokens that there are; of an int64 its low word counts."""
    return T.max(0, T.min(T.cast(bound, "int32"), num_tokens))


@T.macro
def sequence_span(cu_seqlens, n, num_tokens, begin: T.Ref, length: T.Ref):
    """The tokens of sequence n: inside the tensors, and none where its end comes before its start.

    Roles that each find a sequence by themselves so walk the same chunks of it.
    """
    begin = inside(cu_seqlens[n], num_tokens)
    length = inside(cu_seqlens[n + 1], num_tokens)  # so that no difference overflows
    length = T.max(length - begin, 0)


@T.macro
def count_on(total, all_before, s_sum, most):
    """From a number of each thread to sums, in order of the threads, none of them above `most`.

    total[0] becomes the sum up to this thread's and with it; all_before[0], which is included, that
    of all threads.
    """
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    before = T.alloc_var("int32")
    for d in T.unroll(5):
        below = T.shfl_up(total[0], 1 << d)
        if lane >= 1 << d:
            total[0] = T.min(total[0] + below, most)
    if lane == 31:
        s_sum[warp] = total[0]
    T.sync_threads()
    before = s_sum[lane]
    for d in T.unroll(5):
        below = T.shfl_up(before, 1 << d)
        if lane >= 1 << d:
            before = T.min(before + below, most)
    below = T.shfl_sync(before, T.max(warp - 1, 0))
    total[0] = T.min(total[0] + all_before[0] + T.if_then_else(warp > 0, below, 0), most)
    all_before[0] = T.min(all_before[0] + T.shfl_sync(before, 31), most)
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
def place_chunks(cu_seqlens, chunks, num_chunks, first_chunk, num_tokens, s_sum):
    """As chunk_table says."""
    thread = T.get_thread_binding()
    total, all_before = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    low = T.alloc_local((1,), "int32")
    begin, length, before = (T.alloc_var("int32") for _ in range(3))
    N, most = cu_seqlens.shape[0] - 1, chunks.shape[0]
    all_before[0] = 0
    for base in T.serial(T.ceildiv(N, THREADS)):  # 1
        n = base * THREADS + thread
        total[0] = 0
        if n < N:
            sequence_span(cu_seqlens, n, num_tokens, begin, length)
            total[0] = T.ceildiv(length, CHUNK)
        count_on(total, all_before, s_sum, most)
        if n < N:
            first_chunk[n + 1] = total[0]
    if thread == 0:
        first_chunk[0] = 0
        num_chunks[0] = all_before[0]
    T.sync_threads()
    for i in T.serial(T.ceildiv(most, THREADS)):  # 2
        c = i * THREADS + thread
        if c < most:
            chunks[c, 0] = 0
            chunks[c, 1] = 0
            if c < all_before[0]:
                find(low, first_chunk, N, c)
                sequence_span(cu_seqlens, low[0], num_tokens, begin, length)
                before = (c - first_chunk[low[0]]) * CHUNK
                chunks[c, 0] = begin + before
                chunks[c, 1] = T.min(CHUNK, length - before)
