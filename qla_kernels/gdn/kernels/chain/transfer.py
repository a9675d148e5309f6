"""Roles of the forward that move tiles between global and shared memory: load and store.

fused_fwd states the maths and what each step is for, under the numbers used here.
"""

import tilelang.language as T

from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail


@T.macro
def fetch(rows, ring, i, begin):
    """Chunk i of one tensor."""
    ring.acquire(i)
    rows.copy(begin + i * CHUNK, ring.slot(i), ring.barrier(i))
    ring.commit(i)


@T.macro
def fetch_tail(rows, ring, tail_full, n, i, begin, length, tails):
    """The chunk that a sequence ends in. Its other rows, the next sequence's or nobody's, must not
    meet a product: 0 * NaN is NaN."""
    ring.acquire(i)
    rows.copy(begin + i * CHUNK, ring.slot(i), tail_full[n])
    T.barrier_arrive(tail_full[n])
    T.barrier_wait(tail_full[n], tails % 2)
    clear_tail(rows.shared, ring.slot(i), length - i * CHUNK, rows.shared.shape[-1])
    T.fence_proxy_async()  # written by threads, read by wgmma
    ring.commit(i)


@T.macro
def load(leading, others, ahead, tail_full, begin, length, tails):
    """`leading` and `others` are (rows, ring). What A and P are made of runs `ahead` chunks ahead
    of what only the state reads, and never waits behind it. The tail, `tails` of which this CTA has
    had, stays out of the loop: the instruction cache has all roles' loops to hold."""
    whole = T.alloc_var("int32")
    whole = length // CHUNK
    for j in rolled(whole + ahead):  # 1
        if j >= ahead:
            for rows, ring in others:
                fetch(rows, ring, j - ahead, begin)
        if j < whole:
            for rows, ring in leading:
                fetch(rows, ring, j, begin)
    if length % CHUNK != 0:
        for n, (rows, ring) in enumerate((*leading, *others)):
            fetch_tail(rows, ring, tail_full, n, whole, begin, length, tails)


@T.macro
def chunk_out(x, tile, slot, tok0, hv, column):
    """A [64, 64] slot into rows of x [tokens, HV, columns, 64]."""
    T.tma_copy(tile[slot, :, :], x[tok0 : tok0 + CHUNK, hv, column, :])
    T.tma_store_wait(0)


@T.macro
def tail_out(x, tile, slot, tok0, rows, hv, column):
    lane = T.get_thread_binding() % 32
    for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
        if step * 4 + lane // 8 < rows:
            for e in T.vectorized(8):
                x[tok0 + step * 4 + lane // 8, hv, column, lane % 8 * 8 + e] = tile[
                    slot, step * 4 + lane // 8, lane % 8 * 8 + e
                ]


@T.macro
def store(o, A, s_o, s_a, o_ring, a_ring, begin, length, hv, first_column, solves, saves):
    whole, tail = T.alloc_var("int32"), T.alloc_var("int32")
    whole = length // CHUNK
    tail = length % CHUNK
    for i in rolled(whole):
        if solves:
            a_ring.wait(i)
            if saves != 0:
                chunk_out(A, s_a, a_ring.slot(i), begin + i * CHUNK, hv, 0)  # 7
            a_ring.release(i)
        for w in rolled(o_ring.stages):
            o_ring.wait(i * o_ring.stages + w)
            chunk_out(o, s_o, w, begin + i * CHUNK, hv, first_column + w)  # 7
            o_ring.release(i * o_ring.stages + w)
    if tail > 0:
        tok0 = begin + whole * CHUNK
        if solves:
            a_ring.wait(whole)
            if saves != 0:
                tail_out(A, s_a, a_ring.slot(whole), tok0, tail, hv, 0)
            a_ring.release(whole)
        for w in rolled(o_ring.stages):
            o_ring.wait(whole * o_ring.stages + w)
            tail_out(o, s_o, w, tok0, tail, hv, first_column + w)
            o_ring.release(whole * o_ring.stages + w)
