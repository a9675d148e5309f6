"""Roles of the forward that move tiles between global and shared memory: load and store; zeros.

fused_fwd.py states the maths and the steps, with the numbers used here.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail


@T.macro
def fetch(rows, ring, i, begin):
    """Loads chunk i of one tensor."""
    ring.acquire(i)
    rows.copy(begin + i * CHUNK, ring.slot(i), ring.barrier(i))
    ring.commit(i)


@T.macro
def fetch_tail(rows, ring, tail_full, n, i, begin, length, tails):
    """Loads the tail, the incomplete last chunk of a sequence, and clears its rows past the end.

    These rows are of the next sequence, or of none. They must not enter a product: 0 * NaN is NaN.
    """
    ring.acquire(i)
    rows.copy(begin + i * CHUNK, ring.slot(i), tail_full[n])
    T.barrier_arrive(tail_full[n])
    T.barrier_wait(tail_full[n], tails % 2)
    clear_tail(rows.shared, ring.slot(i), length - i * CHUNK, rows.shared.shape[-1])
    T.fence_proxy_async()  # written by threads, read by wgmma
    ring.commit(i)


@T.macro
def load(leading, others, ahead, tail_full, begin, length, tails):
    """Loads all chunks of a sequence; `leading` and `others` are lists of (rows, ring).

    `leading` are the inputs of A and P. They are loaded `ahead` chunks before `others`, which only
    the state reads, and so do not wait for the slots of `others`. The tail is loaded after the loop
    and not within it, because the instruction cache has to hold the loops of all roles. `tails` is
    the number of tails that this CTA has loaded before.
    """
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
    """Stores a [64, 64] slot to rows of x [tokens, HV, columns, 64], and waits for the store."""
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
def store(o, A, s, ring, item, solves):
    """Stores O of all chunks and, if this kernel solves and the item saves it, A."""
    begin, length, hv = item.begin, item.length, item.hv
    first_column, saves = item.i_tile * ring.o.stages, item.saves
    whole, tail = T.alloc_var("int32"), T.alloc_var("int32")
    whole = length // CHUNK
    tail = length % CHUNK
    for i in rolled(whole):
        if solves:
            ring.a.wait(i)
            if saves != 0:
                chunk_out(A, s.a, ring.a.slot(i), begin + i * CHUNK, hv, 0)  # 7
            ring.a.release(i)
        for w in rolled(ring.o.stages):
            ring.o.wait(i * ring.o.stages + w)
            T.fence_proxy_async()  # s.o: written by threads, read by the TMA store
            chunk_out(o, s.o, w, begin + i * CHUNK, hv, first_column + w)  # 7
            ring.o.release(i * ring.o.stages + w)
    if tail > 0:
        tok0 = begin + whole * CHUNK
        if solves:
            ring.a.wait(whole)
            if saves != 0:
                tail_out(A, s.a, ring.a.slot(whole), tok0, tail, hv, 0)
            ring.a.release(whole)
        for w in rolled(ring.o.stages):
            ring.o.wait(whole * ring.o.stages + w)
            tail_out(o, s.o, w, tok0, tail, hv, first_column + w)
            ring.o.release(whole * ring.o.stages + w)


@T.macro
def clear_padding(x, first_row, num_tokens, num_sequences, hv, column):
    """Writes zeros to rows of x [tokens, HV, columns, 64] of no sequence; the CTAs share them."""
    lane = T.get_thread_binding() % 32
    for j in rolled(T.ceildiv(num_tokens - first_row, num_sequences)):
        if lane < TILE // 8:
            for e in T.vectorized(8):
                x[first_row + j * num_sequences, hv, column, lane * 8 + e] = 0


@T.macro
def clear_saved(A, g_cum, first_row, num_tokens, num_sequences, hv):
    clear_padding(A, first_row, num_tokens, num_sequences, hv, 0)
    for j in rolled(T.ceildiv(num_tokens - first_row, num_sequences)):
        if T.get_thread_binding() % 32 == 0:
            g_cum[first_row + j * num_sequences, hv] = 0
