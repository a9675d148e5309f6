"""Roles of the forward: gates and the state; chain_solve and chain_transfer have the others.

fused_fwd states the maths and what each step is for, under the numbers used here. The block is
two-dimensional: threadIdx.x is a thread of its warpgroup and threadIdx.y the warpgroup, so that
both state warpgroups run one loop. Two copies of it, with the other roles, would not fit the SM's
instruction cache, 32 KB.
"""

import tilelang.language as T

from qla_kernels.gdn.kernels.chain.layout import (
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
from qla_kernels.tile.constants import CHUNK, GATE_FLOOR, LN2, LOG2E
from qla_kernels.tile.loops import rolled


@T.macro
def read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token, end, hv):
    """g and beta of this lane's two tokens of a chunk, as they are: to convert would be to wait.
    0 past the end: gamma stays level."""
    for e in T.unroll(2):
        r_gate[e] = 0
        r_gate[2 + e] = 0
        r_beta16[e] = 0
        if token + e < end:
            r_gate[e] = g[token + e, hv]
            if is_16 != 0:
                r_beta16[e] = beta16[token + e, hv]
            else:
                r_gate[2 + e] = beta[token + e, hv]


@T.macro
def gate(
    g, beta, beta16, is_16, g_cum, s_gate, ring, begin, length, num_chunks, hv, scale, saves
):  # fmt: skip
    """beta is in fp32; or, where is_16, 16 bits wide in beta16."""
    lane = T.get_thread_binding() % 32
    r_gate = T.alloc_local((4,), "float32")  # of the chunk to come: two g, two beta
    r_beta16 = T.alloc_local((2,), beta16.dtype)
    g2 = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    total = T.alloc_var("float32")
    token, end = T.alloc_var("int32"), T.alloc_var("int32")
    token = begin + 2 * lane
    end = begin + length
    read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token, end, hv)
    for i in rolled(num_chunks):
        for e in T.unroll(2):
            g2[e] = T.max(r_gate[e] * LOG2E, GATE_FLOOR)
            b[e] = r_gate[2 + e] + r_beta16[e]  # one of them is 0
        # arrive while this chunk is made
        read_gates(g, beta, beta16, is_16, r_gate, r_beta16, token + CHUNK, end, hv)
        total = g2[0] + g2[1]  # inclusive scan of the pairs over the warp
        for d in T.unroll(5):
            below = T.shfl_up(total, 1 << d)
            if lane >= 1 << d:
                total += below
        g2[0] = total - g2[1]
        g2[1] = total
        fall0 = T.shfl_sync(total, lane // 8 * 8 + 7)  # gamma of the last token of the 16
        last = T.shfl_sync(total, 31)
        ring.acquire(i)  # 2
        slot = ring.slot(i)
        for e in T.unroll(2):
            s_gate[slot, GAMMA, 2 * lane + e] = g2[e]
            s_gate[slot, BETA, 2 * lane + e] = b[e]
            s_gate[slot, FALL, 2 * lane + e] = T.exp2(fall0 - g2[e])
            s_gate[slot, BETA_E, 2 * lane + e] = b[e] * T.exp2(g2[e])
            s_gate[slot, SCALE_E, 2 * lane + e] = scale * T.exp2(g2[e])
            s_gate[slot, D, 2 * lane + e] = T.exp2(last - g2[e])
        s_gate[slot, LAST, lane] = T.exp2(last)
        ring.commit(i)
        if saves != 0:
            for e in T.unroll(2):
                if token + e < end:
                    g_cum[token + e, hv] = g2[e] * LN2
        token += CHUNK


def move_state(function, K, r_s, state, n, hv, v):
    """S^T from or to 64 columns of a [n, HV, K, V] tensor, by inline CUDA: in a loop here, each of
    the 64 addresses is found on its own, which takes 5 KB of instructions."""
    return T.call_extern(
        "handle",
        f"qla::{function}<{K}>",
        r_s.data,
        T.access_ptr(state[n, hv, 0, v], "rw", 1),
        *(T.cast(stride, "int64") for stride in state.strides[2:]),
    )


@T.macro
def put_out(r_o16, s_o, ring, w, i):
    ring.acquire(i)
    T.call_extern("handle", "qla::stage_transposed", r_o16.data, slot_of(s_o, w))
    T.fence_proxy_async()  # s_o: written by threads, read by the TMA store
    ring.commit(i)


@T.macro
def first_turn(w, states):
    """Two state warpgroups start with the first one's turn on the tensor cores .."""
    if states == 2:
        if w == 1:
            T.call_extern("handle", "tl::__named_barrier_arrive", TURN, 256)


@T.macro
def last_turn(w, states):
    """.. and end with the second one's."""
    if states == 2:
        if w == 0:
            T.call_extern("handle", "tl::__sync_thread_partial", TURN, 256)


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
        move_state("load_state", K, r_s, h0, n, hv, v0 + w * TILE)
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    if states == 1:
        T.clear(r_o)
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
    row = T.alloc_var("int32")  # of ht
    row = -1
    if has_ht == 1:
        row = n
    if has_ht == 2:
        row = ends_of[n]  # the sequence that this segment ends, if any
    if row >= 0:
        move_state("store_state", K, r_s, ht, row, hv, v0 + w * TILE)
