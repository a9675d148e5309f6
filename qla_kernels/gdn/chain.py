"""Roles of the kernels that walk a sequence's chunks with a state in registers.

fused_fwd states the maths and what each step is for, under the numbers used here. The macros stand
apart from it because every such kernel has these roles, and copies of them would drift.
"""

import tilelang.language as T

from qla_kernels.tile.loops import rolled
from qla_kernels.tile.mask import clear_tail
from qla_kernels.tile.math import CHUNK, GATE_FLOOR, LOG2E

TILE = 64  # columns of V that one state warpgroup owns
TURN = 8  # named barriers 8 and 9: the state warpgroups' turns on the tensor cores

# rows of a gate slot; gated_tiles.cuh reads the first three
GATE_ROWS = 7
GAMMA, BETA, FALL, BETA_E, SCALE_E, D, LAST = range(GATE_ROWS)


def accumulator_layout(rows: int, columns: int) -> T.Fragment:
    """For a (columns, rows) fragment: the registers of a (rows, columns) wgmma accumulator.

    Reading x[c, r] next to an accumulator's y[r, c] is then a register of the same thread, and
    copying x to or from shared memory a transposing stmatrix or ldmatrix.
    """
    return T.Fragment(
        [columns, rows],
        forward_fn=lambda c, r: (
            r // 16 * 32 + r % 8 * 4 + c % 8 // 2,
            c // 8 * 4 + r % 16 // 8 * 2 + c % 2,
        ),
    )


@T.macro
def load(
    q, k, v, A, s_q, s_k, s_v, s_a, ring, tail_full,
    begin, length, num_chunks, h, hv, i_tile, tile_v, K,
):  # fmt: skip
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        slot = ring.slot(i)
        ring.acquire(i)
        if rows >= CHUNK:  # 1
            T.tma_copy(k[tok0 : tok0 + CHUNK, h, :], s_k[slot, :, :], barrier=ring.barrier(i))
            T.tma_copy(q[tok0 : tok0 + CHUNK, h, :], s_q[slot, :, :], barrier=ring.barrier(i))
            T.tma_copy(A[tok0 : tok0 + CHUNK, hv, :], s_a[slot, :, :], barrier=ring.barrier(i))
            T.tma_copy(
                v[tok0 : tok0 + CHUNK, hv, i_tile, :], s_v[slot, :, :], barrier=ring.barrier(i)
            )
            if T.shuffle_elect(32):
                ring.commit(i)
        else:  # the next sequence's rows, or nobody's, must not meet a product: 0 * NaN is NaN
            T.tma_copy(k[tok0 : tok0 + CHUNK, h, :], s_k[slot, :, :], barrier=tail_full[0])
            T.tma_copy(q[tok0 : tok0 + CHUNK, h, :], s_q[slot, :, :], barrier=tail_full[0])
            T.tma_copy(A[tok0 : tok0 + CHUNK, hv, :], s_a[slot, :, :], barrier=tail_full[0])
            T.tma_copy(v[tok0 : tok0 + CHUNK, hv, i_tile, :], s_v[slot, :, :], barrier=tail_full[0])
            if T.shuffle_elect(32):
                T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], 0)
            clear_tail(s_k, slot, rows, K)
            clear_tail(s_v, slot, rows, tile_v)
            clear_tail(s_a, slot, rows, CHUNK)
            T.fence_proxy_async()  # k, v and A: written by threads, read by wgmma
            T.sync_warp()
            if T.shuffle_elect(32):
                ring.commit(i)


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
def gate(g, beta, s_gate, ring, begin, length, num_chunks, hv, scale):
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


@T.macro
def load_transposed(s_v, slot, w, r_vt):
    """V^T of one state warpgroup, in accumulator registers: four transposing ldmatrix a thread."""
    lane = T.get_thread_binding() % 32
    warp = T.get_thread_binding() // 32 % 4
    for i in T.unroll(CHUNK // 16):
        T.call_extern(
            "handle",
            "tl::ptx_ldmatrix_x4_trans",
            T.access_ptr(
                s_v[
                    slot,
                    i * 16 + lane // 16 * 8 + lane % 8,
                    w * TILE + warp * 16 + lane // 8 % 2 * 8,
                ],
                "r",
                8,
            ),
            T.access_ptr(r_vt[i * 16 + lane % 4 * 2, warp * 16 + lane // 4], "w", 8),
        )


@T.macro
def take_turn(w, states):
    if states == 2:
        T.sync_threads(TURN + w, 256)


@T.macro
def give_turn(w, states):
    if states == 2:
        T.named_barrier_arrive(TURN + 1 - w, 256)


@T.macro
def state(
    w, states, K, dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
    qkv, gate_ring, p_ring, o_ring, num_chunks, n, hv, v0, has_h0, has_ht,
):  # fmt: skip
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_o = T.alloc_fragment((TILE, CHUNK), "float32")  # O^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    r_ot = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout(
        {r_vt: accumulator_layout(TILE, CHUNK), r_ot: accumulator_layout(TILE, CHUNK)}
    )
    if has_h0 != 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = h0[n, hv, c, v0 + w * TILE + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    if states == 2 and w == 1:
        T.named_barrier_arrive(TURN, 256)
    for i in T.serial(num_chunks):
        slot = qkv.slot(i)
        gate_slot = gate_ring.slot(i)
        qkv.wait(i)
        take_turn(w, states)
        T.wgmma_gemm(r_s16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
        give_turn(w, states)
        T.wgmma_gemm(r_s16, s_q[slot, :, :], r_o, transpose_B=True, clear_accum=True)
        load_transposed(s_v, slot, w, r_vt)
        gate_ring.wait(i)
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):  # 5
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        T.copy(r_x, r_w16)
        take_turn(w, states)
        T.wgmma_gemm(r_w16, s_a[slot, :, :], r_n, transpose_B=True, clear_accum=True)
        give_turn(w, states)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        for r, c in T.Parallel(TILE, CHUNK):
            r_o[r, c] *= s_gate[gate_slot, SCALE_E, c]
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
        T.copy(r_n, r_n16)
        gate_ring.release(i)
        p_ring.wait(i)
        take_turn(w, states)
        T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 6
        T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
        give_turn(w, states)
        T.wait_wgmma(1)  # S is ready, V'^T P^T in flight
        qkv.release(i)
        T.copy(r_s, r_s16)
        T.wait_wgmma(0)  # nothing may be in flight across the back edge: ptxas would serialise all
        p_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_ot[c, r] = r_o[r, c]
        o_ring.acquire(i)
        T.copy(r_ot, s_o)
        T.fence_proxy_async()  # s_o: written by threads, read by the TMA store
        o_ring.commit(i)
    if states == 2 and w == 0:
        T.sync_threads(TURN, 256)  # take the partner's last turn
    if has_ht != 0:
        for r, c in T.Parallel(TILE, K):
            ht[n, hv, c, v0 + w * TILE + r] = r_s[r, c]


@T.macro
def store_tile(o, s_o, ring, i, tok0, rows, hv, i_tile, column):
    lane = T.get_thread_binding() % 32
    ring.wait(i)
    if rows >= CHUNK:  # 7
        T.tma_copy(s_o, o[tok0 : tok0 + CHUNK, hv, i_tile, column : column + TILE])
        T.tma_store_wait(0)
    else:
        for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
            if step * 4 + lane // 8 < rows:
                for e in T.vectorized(8):
                    o[tok0 + step * 4 + lane // 8, hv, i_tile, column + lane % 8 * 8 + e] = s_o[
                        step * 4 + lane // 8, lane % 8 * 8 + e
                    ]
    ring.release(i)


@T.macro
def store(o, s_o, o_rings, begin, length, num_chunks, hv, i_tile):
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        store_tile(o, s_o[0], o_rings[0], i, tok0, rows, hv, i_tile, 0)
        if len(o_rings) == 2:
            store_tile(o, s_o[1], o_rings[1], i, tok0, rows, hv, i_tile, TILE)
