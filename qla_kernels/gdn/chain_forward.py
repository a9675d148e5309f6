"""Roles of the forward: all but the solve, which is in chain_solve.

fused_fwd states the maths and what each step is for, under the numbers used here. The block is
two-dimensional: threadIdx.x is a thread of its warpgroup and threadIdx.y the warpgroup, so that
both state warpgroups run one loop. Two copies of it, with the other roles, would not fit the SM's
instruction cache, 32 KB.
"""

import tilelang.language as T

from qla_kernels.gdn.chain import (
    BETA,
    BETA_E,
    FALL,
    GAMMA,
    LAST,
    SCALE_E,
    TILE,
    TURN,
    D,
    accumulator_layout,
    give_turn,
    load_transposed,
    slot_of,
    take_turn,
)
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.math import CHUNK, GATE_FLOOR, LN2, LOG2E


@T.macro
def fetch(rows, ring, tail_full, tail, i, begin, length):
    """Chunk i of one tensor. A tail's other rows, the next sequence's or nobody's, must not meet a
    product: 0 * NaN is NaN."""
    tok0 = begin + i * CHUNK
    left = length - i * CHUNK
    slot = ring.slot(i)
    ring.acquire(i)
    if left >= CHUNK:  # 1
        rows.copy(tok0, slot, ring.barrier(i))
        ring.commit(i)
    else:
        rows.copy(tok0, slot, tail_full[tail])
        T.barrier_arrive(tail_full[tail])
        T.barrier_wait(tail_full[tail], 0)
        clear_tail(rows.shared, slot, left, rows.shared.shape[-1])
        T.fence_proxy_async()  # written by threads, read by wgmma
        ring.commit(i)


@T.macro
def load(leading, others, ahead, tail_full, begin, length, num_chunks):
    """`leading` and `others` are (rows, ring). What A and P are made of runs `ahead` chunks ahead
    of what only the state reads, and never waits behind it."""
    for j in rolled(num_chunks + ahead):
        if j >= ahead:
            for n, (rows, ring) in enumerate(others):
                fetch(rows, ring, tail_full, len(leading) + n, j - ahead, begin, length)
        if j < num_chunks:
            for n, (rows, ring) in enumerate(leading):
                fetch(rows, ring, tail_full, n, j, begin, length)


@T.macro
def read_gates(g, beta, r_gate, begin, length, i, hv):
    """g and beta of tokens 2 lane and 2 lane + 1 of chunk i; 0 past the end: gamma stays level."""
    lane = T.get_thread_binding() % 32
    for e in T.unroll(2):
        r_gate[e] = 0
        r_gate[2 + e] = 0
        if i * CHUNK + 2 * lane + e < length:
            r_gate[e] = g[begin + i * CHUNK + 2 * lane + e, hv]
            r_gate[2 + e] = beta[begin + i * CHUNK + 2 * lane + e, hv]


@T.macro
def gate(g, beta, g_cum, s_gate, ring, begin, length, num_chunks, hv, scale, saves):
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the chunk to come: two g, two beta
    g2 = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    total = T.alloc_var("float32")
    read_gates(g, beta, r_gate, begin, length, 0, hv)
    for i in rolled(num_chunks):
        for e in T.unroll(2):
            g2[e] = T.max(r_gate[e] * LOG2E, GATE_FLOOR)
            b[e] = r_gate[2 + e]
        read_gates(g, beta, r_gate, begin, length, i + 1, hv)  # arrives while this chunk is made
        total = g2[0] + g2[1]  # inclusive scan of the pairs over the warp
        for d in T.unroll(5):
            below = T.shfl_up(total, 1 << d)
            if lane >= 1 << d:
                total += below
        g2[0] = total - g2[1]
        g2[1] = total
        end = T.shfl_sync(total, lane // 8 * 8 + 7)  # gamma of the last token of the 16
        last = T.shfl_sync(total, 31)
        ring.acquire(i)  # 2
        slot = ring.slot(i)
        for e in T.unroll(2):
            s_gate[slot, GAMMA, 2 * lane + e] = g2[e]
            s_gate[slot, BETA, 2 * lane + e] = b[e]
            s_gate[slot, FALL, 2 * lane + e] = T.exp2(end - g2[e])
            s_gate[slot, BETA_E, 2 * lane + e] = b[e] * T.exp2(g2[e])
            s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(g2[e])
            s_gate[slot, D, 2 * lane + e] = T.exp2(last - g2[e])
        s_gate[slot, LAST, lane] = T.exp2(last)
        ring.commit(i)
        if saves != 0:
            for e in T.unroll(2):
                if i * CHUNK + 2 * lane + e < length:
                    g_cum[begin + i * CHUNK + 2 * lane + e, hv] = g2[e] * LN2


@T.macro
def put_out(r_o16, s_o, ring, w, i):
    ring.acquire(i)
    T.call_extern("handle", "qla::stage_transposed", r_o16.data, slot_of(s_o, w))
    T.fence_proxy_async()  # s_o: written by threads, read by the TMA store
    ring.commit(i)


@T.macro
def state(
    states, K, dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
    q_ring, k_ring, v_ring, gate_ring, a_ring, p_ring, o_ring,
    num_chunks, n, hv, v0, has_h0, has_ht, ends_of,
):  # fmt: skip
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_o = T.alloc_fragment((TILE, CHUNK), "float32")  # O^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_o16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    w = T.alloc_var("int32")
    w = T.get_thread_binding(1)
    if has_h0 != 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = h0[n, hv, c, v0 + w * TILE + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    if states == 1:
        T.clear(r_o)
    else:
        if w == 1:
            T.call_extern("handle", "tl::__named_barrier_arrive", TURN, 256)
    for i in T.serial(num_chunks):
        slot = k_ring.slot(i)
        gate_slot = gate_ring.slot(i)
        k_ring.wait(i)
        q_ring.wait(i)
        take_turn(w, states)
        T.wgmma_gemm(r_s16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
        give_turn(w, states)
        if states == 1:
            T.copy(r_o, r_o16)  # of the chunk before; at first nobody's
        T.wgmma_gemm(r_s16, s_q[q_ring.slot(i), :, :], r_o, transpose_B=True, clear_accum=True)
        if states == 1:
            if i > 0:
                put_out(r_o16, s_o, o_ring, w, i - 1)
        v_ring.wait(i)
        load_transposed(s_v, v_ring.slot(i), w, r_vt)
        gate_ring.wait(i)
        if states == 1:
            T.wait_wgmma(1)  # S K^T is ready, S Q^T in flight
        else:
            T.wait_wgmma(0)
            q_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):  # 5
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        v_ring.release(i)
        T.copy(r_x, r_w16)
        a_ring.wait(i)
        take_turn(w, states)
        T.wgmma_gemm(r_w16, s_a[a_ring.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
        give_turn(w, states)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        if states == 1:
            T.wait_wgmma(1)
            q_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_o[r, c] *= s_gate[gate_slot, SCALE_E, c]
        T.wait_wgmma(0)
        a_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
        if states == 1:
            T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 6
            T.copy(r_n, r_n16)
            gate_ring.release(i)
            p_ring.wait(i)
            T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
        else:
            T.copy(r_n, r_n16)
            gate_ring.release(i)
            p_ring.wait(i)
            take_turn(w, states)
            T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 6
            T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
            give_turn(w, states)
        T.wait_wgmma(1)  # S is ready, V'^T P^T in flight
        T.copy(r_s, r_s16)
        T.wait_wgmma(0)  # nothing may be in flight across the back edge: ptxas would serialise all
        k_ring.release(i)
        p_ring.release(i)
        if states == 2:
            T.copy(r_o, r_o16)
            put_out(r_o16, s_o, o_ring, w, i * states + w)
    if states == 1:
        if num_chunks > 0:
            T.copy(r_o, r_o16)
            put_out(r_o16, s_o, o_ring, w, num_chunks - 1)
    else:
        if w == 0:
            T.call_extern(
                "handle", "tl::__sync_thread_partial", TURN, 256
            )  # the partner's last turn
    row = T.alloc_var("int32")  # of ht
    row = -1
    if has_ht == 1:
        row = n
    if has_ht == 2:
        row = ends_of[n]  # the sequence that this segment ends, if any
    if row >= 0:
        for r, c in T.Parallel(TILE, K):
            ht[row, hv, c, v0 + w * TILE + r] = r_s[r, c]


@T.macro
def rows_out(x, tile, slot, tok0, rows, hv, column):
    """A [64, 64] slot into rows of x [tokens, HV, columns, 64]."""
    lane = T.get_thread_binding() % 32
    if rows >= CHUNK:
        T.tma_copy(tile[slot, :, :], x[tok0 : tok0 + CHUNK, hv, column, :])
        T.tma_store_wait(0)
    else:
        for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
            if step * 4 + lane // 8 < rows:
                for e in T.vectorized(8):
                    x[tok0 + step * 4 + lane // 8, hv, column, lane % 8 * 8 + e] = tile[
                        slot, step * 4 + lane // 8, lane % 8 * 8 + e
                    ]


@T.macro
def store(
    o, A, s_o, s_a, o_ring, a_ring, begin, length, num_chunks, hv, first_column, solves, saves
):
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        if solves:
            a_ring.wait(i)
            if saves != 0:
                rows_out(A, s_a, a_ring.slot(i), tok0, rows, hv, 0)  # 7
            a_ring.release(i)
        for w in rolled(o_ring.stages):
            j = i * o_ring.stages + w
            o_ring.wait(j)
            rows_out(o, s_o, w, tok0, rows, hv, first_column + w)  # 7
            o_ring.release(j)
