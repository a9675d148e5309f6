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
def load(
    q, k, v, A, s_q, s_k, s_v, s_a, qk, v_ring, a_ring, tail_full,
    begin, length, num_chunks, h, hv, i_tile, K, tile_v, solves,
):  # fmt: skip
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        slot = qk.slot(i)
        v_slot = v_ring.slot(i)
        qk.acquire(i)
        if rows >= CHUNK:  # 1
            T.tma_copy(k[tok0 : tok0 + CHUNK, h, :], s_k[slot, :, :], barrier=qk.barrier(i))
            T.tma_copy(q[tok0 : tok0 + CHUNK, h, :], s_q[slot, :, :], barrier=qk.barrier(i))
            qk.commit(i)
            if not solves:
                a_slot = a_ring.slot(i)
                a_ring.acquire(i)
                T.tma_copy(
                    A[tok0 : tok0 + CHUNK, hv, 0, :], s_a[a_slot, :, :], barrier=a_ring.barrier(i)
                )
                a_ring.commit(i)
            v_ring.acquire(i)
            T.tma_copy(
                v[tok0 : tok0 + CHUNK, hv, i_tile, :], s_v[v_slot, :, :], barrier=v_ring.barrier(i)
            )
            v_ring.commit(i)
        else:  # the next sequence's rows, or nobody's, must not meet a product: 0 * NaN is NaN
            v_ring.acquire(i)
            T.tma_copy(k[tok0 : tok0 + CHUNK, h, :], s_k[slot, :, :], barrier=tail_full[0])
            T.tma_copy(q[tok0 : tok0 + CHUNK, h, :], s_q[slot, :, :], barrier=tail_full[0])
            T.tma_copy(
                v[tok0 : tok0 + CHUNK, hv, i_tile, :], s_v[v_slot, :, :], barrier=tail_full[0]
            )
            if not solves:
                a_slot = a_ring.slot(i)
                a_ring.acquire(i)
                T.tma_copy(
                    A[tok0 : tok0 + CHUNK, hv, 0, :], s_a[a_slot, :, :], barrier=tail_full[0]
                )
            T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], 0)
            clear_tail(s_k, slot, rows, K)
            clear_tail(s_v, v_slot, rows, tile_v)
            if not solves:
                clear_tail(s_a, a_slot, rows, CHUNK)
            T.fence_proxy_async()  # k and A: written by threads, read by wgmma
            qk.commit(i)
            v_ring.commit(i)
            if not solves:
                a_ring.commit(i)


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
    qk, v_ring, gate_ring, a_ring, p_ring, o_ring, num_chunks, n, hv, v0, has_h0, has_ht,
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
        slot = qk.slot(i)
        gate_slot = gate_ring.slot(i)
        qk.wait(i)
        take_turn(w, states)
        T.wgmma_gemm(r_s16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
        give_turn(w, states)
        if states == 1:
            T.copy(r_o, r_o16)  # of the chunk before; at first nobody's
        T.wgmma_gemm(r_s16, s_q[slot, :, :], r_o, transpose_B=True, clear_accum=True)
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
        qk.release(i)
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
    if has_ht != 0:
        for r, c in T.Parallel(TILE, K):
            ht[n, hv, c, v0 + w * TILE + r] = r_s[r, c]


@T.macro
def inverse_out(A, s_a, ring, begin, length, num_chunks, hv, saves):
    lane = T.get_thread_binding() % 32
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        slot = ring.slot(i)
        ring.wait(i)
        if saves != 0:
            if rows >= CHUNK:  # 7
                T.tma_copy(s_a[slot, :, :], A[tok0 : tok0 + CHUNK, hv, 0, :])
                T.tma_store_wait(0)
            else:
                for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
                    if step * 4 + lane // 8 < rows:
                        for e in T.vectorized(8):
                            A[tok0 + step * 4 + lane // 8, hv, 0, lane % 8 * 8 + e] = s_a[
                                slot, step * 4 + lane // 8, lane % 8 * 8 + e
                            ]
        ring.release(i)


@T.macro
def store(o, s_o, ring, begin, length, num_chunks, hv, first_column):
    lane = T.get_thread_binding() % 32
    for j in rolled(num_chunks * ring.stages):
        tok0 = begin + j // ring.stages * CHUNK
        rows = length - j // ring.stages * CHUNK
        slot = ring.slot(j)
        ring.wait(j)
        if rows >= CHUNK:  # 7
            T.tma_copy(s_o[slot, :, :], o[tok0 : tok0 + CHUNK, hv, first_column + slot, :])
            T.tma_store_wait(0)
        else:
            for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
                if step * 4 + lane // 8 < rows:
                    for e in T.vectorized(8):
                        o[
                            tok0 + step * 4 + lane // 8, hv, first_column + slot, lane % 8 * 8 + e
                        ] = s_o[slot, step * 4 + lane // 8, lane % 8 * 8 + e]
        ring.release(j)
