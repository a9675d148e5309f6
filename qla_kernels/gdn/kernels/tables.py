"""Reads the bounds of sequences, and makes tables of chunks: macros for kernels.

A caller's bounds may have any contents, because the host never reads them. Kernels read them by
`inside`, `sequence_span` and `read_span` only, whose results lie inside the tensors. Tables are
made from such spans, and have room for the entries of correct bounds. With wrong bounds, whose
sequences may overlap, a table is filled up and entries beyond its room are dropped. Numbers read
from a table that a kernel of this package made need no second check.
"""

from __future__ import annotations

import qla_kernels.tile.language as T
from qla_kernels.tile.constants import CHUNK

TABLE_THREADS = 1024
TABLE_WARPS = TABLE_THREADS // 32


def inside(bound, num_tokens):
    """Returns a bound, clamped to 0 <= bound <= num_tokens; of an int64 the low word is used."""
    return T.max(0, T.min(T.cast(bound, "int32"), num_tokens))


@T.macro
def sequence_span(cu_seqlens, n, num_tokens, begin: T.Ref, length: T.Ref):
    """Sets begin and length to the tokens of sequence n, clamped to lie inside the tensors.

    length is 0 if the sequence's end comes before its start. Roles that each call this get the same
    numbers, and so walk the same chunks.
    """
    begin = inside(cu_seqlens[n], num_tokens)
    length = inside(cu_seqlens[n + 1], num_tokens)  # so that no difference overflows
    length = T.max(length - begin, 0)


@T.macro
def read_span(spans, n, num_tokens, begin: T.Ref, length: T.Ref):
    """Does the same as `sequence_span` for spans [N, 2], each the bounds of a sequence.

    Of packed sequences they are a view of cu_seqlens, in which rows overlap.
    """
    begin = inside(spans[n, 0], num_tokens)
    length = inside(spans[n, 1], num_tokens)  # so that no difference overflows
    length = T.max(length - begin, 0)


@T.macro
def count_on(total, all_before, s_sum, most):
    """Replaces total[0] by its inclusive prefix sum over the threads, plus all_before[0].

    all_before[0] then grows by the sum over all threads. No sum exceeds `most`.
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
def least_of_warps(x, s_sum):
    """Replaces x[0], of which each warp has one, by the least of all warps."""
    thread = T.get_thread_binding()
    if thread % 32 == 0:
        s_sum[thread // 32] = x[0]
    T.sync_threads()
    x[0] = s_sum[thread % 32]
    for d in T.unroll(5):
        x[0] = T.min(x[0], T.shfl_xor(x[0], 1 << d))
    T.sync_threads()


@T.macro
def find_longest(cu_seqlens, num_tokens, s_sum, longest: T.Ref):
    """Sets longest to the chunks of the longest sequence; all threads call it."""
    thread = T.get_thread_binding()
    least = T.alloc_local((1,), "int32")  # -c, of which the least is wanted
    begin, length = T.alloc_var("int32"), T.alloc_var("int32")
    N = cu_seqlens.shape[0] - 1
    least[0] = 0
    for base in T.serial(T.ceildiv(N, TABLE_THREADS)):
        n = base * TABLE_THREADS + thread
        if n < N:
            sequence_span(cu_seqlens, n, num_tokens, begin, length)
            least[0] = T.min(least[0], -T.ceildiv(length, CHUNK))
    for d in T.unroll(5):
        least[0] = T.min(least[0], T.shfl_xor(least[0], 1 << d))
    least_of_warps(least, s_sum)
    longest = -least[0]


@T.macro
def find(low, first, num, place):
    """Sets low[0] to the owner, of `num`, with first[low[0]] <= place < first[low[0] + 1]."""
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
    """Writes chunks, num_chunks and first_chunk, by one CTA; chunk_table.py defines them."""
    thread = T.get_thread_binding()
    total, all_before = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    low = T.alloc_local((1,), "int32")
    begin, length, before = (T.alloc_var("int32") for _ in range(3))
    N, most = cu_seqlens.shape[0] - 1, chunks.shape[0]
    all_before[0] = 0
    for base in T.serial(T.ceildiv(N, TABLE_THREADS)):  # 1
        n = base * TABLE_THREADS + thread
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
    for i in T.serial(T.ceildiv(most, TABLE_THREADS)):  # 2
        c = i * TABLE_THREADS + thread
        if c < most:
            chunks[c, 0] = 0
            chunks[c, 1] = 0
            if c < all_before[0]:
                find(low, first_chunk, N, c)
                sequence_span(cu_seqlens, low[0], num_tokens, begin, length)
                before = (c - first_chunk[low[0]]) * CHUNK
                chunks[c, 0] = begin + before
                chunks[c, 1] = T.min(CHUNK, length - before)
