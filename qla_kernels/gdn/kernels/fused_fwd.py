"""fused_fwd -- the gated delta rule, forward: one CTA per sequence, value head and V tile.

Per chunk (C = 64 tokens; gamma, e = e^gamma and d = e^(gamma_last - gamma) restart in each; S is the
state, kept transposed, [V, K], in fp32 registers from the first chunk to the last):
    A     from kkt_solve                                                            [C, C]
    P_ij  = scale e^(gamma_i - gamma_j) <q_i, k_j>, i >= j                          [C, C]
    W^T   = beta V^T - (beta e) S K^T                                               [V, C]
    V'^T  = W^T A^T                                                                 [V, C]
    O^T   = (scale e) S Q^T + V'^T P^T                                              [V, C]
    S     = e^gamma_last S + (d V'^T) K                                             [V, K]

Steps (numbers appear again in the roles):
    1 load    q, k, v, A of a chunk; in a tail, rows past the end of k, v and A become zero
    2 gate    gamma, beta, beta e, scale e, d, e^gamma_last of a chunk
    3 score   Q K^T, then P, one chunk ahead of the state
    4 state   S to 16 bits; S K^T and S Q^T
    5 state   W^T; V'^T
    6 state   S and O^T
    7 store   O out: TMA, or predicated rows where the chunk is a tail

Why this shape: the chain S -> W -> V' -> S is what a chunk waits for, so nothing on it leaves the
registers: every product's left operand is the previous accumulator, rounded in place, and its right
operand a tile that both state warpgroups share. A state warpgroup owns 64 columns of V for the
whole sequence; two of them alternate on the tensor cores, each computing while the other's products
run. P is made a chunk ahead by a third warpgroup, which only has to keep up. Solving for A there as
well makes that warpgroup the slowest: see docs/notes/gdn-forward.md.
"""

from typing import NamedTuple

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from qla_kernels.gdn.gated_tiles import SOURCE
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.math import CHUNK, GATE_FLOOR, LOG2E
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import ONE, Role, Schedule

TILE = 64  # columns of V that one state warpgroup owns


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    K: int
    tile_v: int  # columns of V a CTA computes: 64 or 128


VARIANTS = (Variant("bfloat16", 128, 128), Variant("bfloat16", 128, 64))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
}

TURN = 8  # named barriers 8 and 9: the state warpgroups' turns on the tensor cores
# rows of a gate slot
GAMMA, BETA, FALL, BETA_E, SCALE_E, D, LAST = range(7)  # the first three for gated_tiles.cuh


def schedule(v: Variant) -> Schedule:
    states = v.tile_v // TILE
    state_regs, score_regs, load_regs = (192, 96, 32) if states == 2 else (240, 120, 40)
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=state_regs,
                    waits=("qkv_full", "gate_full", "p_full", f"o{w}_free"),
                    signals=("qkv_free", "gate_free", "p_free", f"o{w}_full"),
                    computes=f"S, W, V', O of columns {TILE * w} to {TILE * w + TILE - 1}",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            Role(
                "score",
                warps=4,
                regs=score_regs,
                waits=("qkv_full", "gate_full", "p_free"),
                signals=("qkv_free", "gate_free", "p_full"),
                computes="P",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=load_regs,
                waits=("qkv_free", "tail_full"),
                signals=(("qkv_full", ONE), ("tail_full", ONE)),
                computes="q, k, v, A",
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=load_regs,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="gamma and its exponentials, beta",
            ),
            Role(
                "store",
                warps=1,
                regs=load_regs,
                waits=tuple(f"o{w}_full" for w in range(states)),
                signals=tuple(f"o{w}_free" for w in range(states)),
                computes="O out",
                uses=("tma_store",),
            ),
            Role("spare", warps=1, regs=load_regs, computes="fills the warpgroup"),
        ),
        rings={"qkv": 3, "gate": 4, "p": 2},
        smem_bytes=0,
    )


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
def load(q, k, v, A, s_q, s_k, s_v, s_a, ring, tail_full, begin, length, num_chunks, h, hv, v0, tile_v, K):
    lane = T.get_thread_binding() % 32
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
                v[tok0 : tok0 + CHUNK, hv, v0 : v0 + tile_v],
                s_v[slot, :, :],
                barrier=ring.barrier(i),
            )
            if T.shuffle_elect(32):
                ring.commit(i)
        else:  # the next sequence's rows, or nobody's, must not meet a product: 0 * NaN is NaN
            T.tma_copy(k[tok0 : tok0 + CHUNK, h, :], s_k[slot, :, :], barrier=tail_full[0])
            T.tma_copy(q[tok0 : tok0 + CHUNK, h, :], s_q[slot, :, :], barrier=tail_full[0])
            T.tma_copy(A[tok0 : tok0 + CHUNK, hv, :], s_a[slot, :, :], barrier=tail_full[0])
            T.tma_copy(
                v[tok0 : tok0 + CHUNK, hv, v0 : v0 + tile_v],
                s_v[slot, :, :],
                barrier=tail_full[0],
            )
            if T.shuffle_elect(32):
                T.barrier_arrive(tail_full[0])
            T.barrier_wait(tail_full[0], 0)
            for row in rolled(rows, CHUNK):
                for e in T.vectorized(K // 32):
                    s_k[slot, row, lane * (K // 32) + e] = 0
                for e in T.vectorized(tile_v // 32):
                    s_v[slot, row, lane * (tile_v // 32) + e] = 0
                for e in T.vectorized(2):
                    s_a[slot, row, lane * 2 + e] = 0
            T.fence_proxy_async()  # k, v and A: written by threads, read by wgmma
            T.sync_warp()
            if T.shuffle_elect(32):
                ring.commit(i)


@T.macro
def read_gates(g, beta, r_gate, begin, length, i, hv):
    """g and beta of tokens 2 lane and 2 lane + 1 of chunk i; 0 past the end, so gamma stays level."""
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
def score(s_q, s_k, s_gate, s_p, qkv, gate_ring, p_ring, num_chunks, scale, first_thread):
    r_next = T.alloc_fragment((CHUNK, CHUNK), "float32")  # Q K^T of the chunk after
    r_qk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    thread = T.get_thread_binding() - first_thread
    for slot, j in T.grid(p_ring.stages, CHUNK // 2):  # above the diagonal P stays zero for good
        s_p[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    if num_chunks > 0:
        qkv.wait(0)
        T.wgmma_gemm(s_q[0, :, :], s_k[0, :, :], r_qk, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        qkv.release(0)
    for i in T.serial(num_chunks):
        after = T.alloc_var("int32")
        after = T.min(i + 1, num_chunks - 1)  # the last pass repeats its own product, for no use
        qkv.wait(after)
        T.wgmma_gemm(  # 3
            s_q[qkv.slot(after), :, :],
            s_k[qkv.slot(after), :, :],
            r_next,
            transpose_B=True,
            clear_accum=True,
        )
        gate_ring.wait(i)
        p_ring.acquire(i)
        T.call_extern(
            "handle",
            "qla::gated_scores",
            r_qk.data,
            T.access_ptr(s_gate[gate_ring.slot(i), 0, 0], "r", 3 * CHUNK),
            T.access_ptr(s_p[p_ring.slot(i), 0, 0], "w", CHUNK * CHUNK),
            scale,
        )
        gate_ring.release(i)
        T.fence_proxy_async()  # P: written by threads, read by wgmma
        p_ring.commit(i)
        T.wait_wgmma(0)
        if i + 1 < num_chunks:
            qkv.release(after)
        T.copy(r_next, r_qk)


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
def store_tile(o, s_o, ring, i, tok0, rows, hv, column):
    lane = T.get_thread_binding() % 32
    ring.wait(i)
    if rows >= CHUNK:  # 7
        T.tma_copy(s_o, o[tok0 : tok0 + CHUNK, hv, column : column + TILE])
        T.tma_store_wait(0)
    else:
        for step in rolled(T.ceildiv(rows, 4)):  # 4 rows of 8 pieces of 16 bytes
            if step * 4 + lane // 8 < rows:
                for e in T.vectorized(8):
                    o[tok0 + step * 4 + lane // 8, hv, column + lane % 8 * 8 + e] = s_o[
                        step * 4 + lane // 8, lane % 8 * 8 + e
                    ]
    ring.release(i)


@T.macro
def store(o, s_o0, s_o1, o0, o1, states, begin, length, num_chunks, hv, v0):
    for i in rolled(num_chunks):
        tok0 = begin + i * CHUNK
        rows = length - i * CHUNK
        store_tile(o, s_o0, o0, i, tok0, rows, hv, v0)
        if states == 2:
            store_tile(o, s_o1, o1, i, tok0, rows, hv, v0 + TILE)


@T.macro
def clear_padding(o, first_row, num_tokens, hv, v0, tile_v, n, num_sequences):
    """Rows of no sequence are zero; the sequences' CTAs share them."""
    lane = T.get_thread_binding() % 32
    for j in rolled(T.ceildiv(num_tokens - first_row - n, num_sequences)):
        if lane < tile_v // 8:
            for e in T.vectorized(8):
                o[first_row + n + j * num_sequences, hv, v0 + lane * 8 + e] = 0


def build(v: Variant):
    plan = schedule(v)
    K, V = v.K, 128
    states, tiles_v = v.tile_v // TILE, V // v.tile_v
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    num_bounds, num_h0, num_ht = T.dynamic("num_bounds, num_h0, num_ht")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, g_token, g_head = T.dynamic("v_token, v_head, g_token, g_head")
    b_token, b_head = T.dynamic("b_token, b_head")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def fused_fwd(
        q: T.StridedTensor((num_tokens, num_heads, K), (q_token, q_head, 1), v.dtype),
        k: T.StridedTensor((num_tokens, num_heads, K), (k_token, k_head, 1), v.dtype),
        val: T.StridedTensor((num_tokens, num_value_heads, V), (v_token, v_head, 1), v.dtype),
        g: T.StridedTensor((num_tokens, num_value_heads), (g_token, g_head), "float32"),
        beta: T.StridedTensor((num_tokens, num_value_heads), (b_token, b_head), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), v.dtype),
        cu_seqlens: T.Tensor((num_bounds,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        o: T.Tensor((num_tokens, num_value_heads, V), v.dtype),
        ht: T.StridedTensor((num_ht, num_value_heads, K, V), (ht_n, ht_h, ht_k, ht_v), "float32"),
        scale: T.float32,
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel((num_bounds - 1) * num_value_heads * tiles_v, threads=plan.threads) as block:
            T.import_source(SOURCE)
            s_k = T.alloc_shared((plan.rings["qkv"], CHUNK, K), v.dtype)
            s_q = T.alloc_shared((plan.rings["qkv"], CHUNK, K), v.dtype)
            s_v = T.alloc_shared((plan.rings["qkv"], CHUNK, v.tile_v), v.dtype)
            s_a = T.alloc_shared((plan.rings["qkv"], CHUNK, CHUNK), v.dtype)
            s_p = T.alloc_shared((plan.rings["p"], CHUNK, CHUNK), v.dtype)
            s_o0 = T.alloc_shared((CHUNK, TILE), v.dtype)
            s_o1 = T.alloc_shared((CHUNK, TILE), v.dtype)
            s_gate = T.alloc_shared((plan.rings["gate"], 7, CHUNK), "float32")
            swizzled = (s_v, s_p, s_o0, s_o1)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            qkv_full = T.alloc_barrier([plan.arrivals("qkv_full")] * plan.slots("qkv_full"))
            qkv_free = T.alloc_barrier([plan.arrivals("qkv_free")] * plan.slots("qkv_free"))
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * plan.slots("gate_full"))
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * plan.slots("gate_free"))
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * plan.slots("p_full"))
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * plan.slots("p_free"))
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            o0_full = T.alloc_barrier([128])
            o0_free = T.alloc_barrier([32])
            o1_full = T.alloc_barrier([128])
            o1_free = T.alloc_barrier([32])
            qkv = Ring(qkv_full, qkv_free, plan.rings["qkv"])
            gates = Ring(gate_full, gate_free, plan.rings["gate"])
            p_ring = Ring(p_full, p_free, plan.rings["p"])
            o0 = Ring(o0_full, o0_free, 1)
            o1 = Ring(o1_full, o1_free, 1)

            hv = T.alloc_var("int32")
            n = T.alloc_var("int32")
            h = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            length = T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            hv = block // tiles_v % num_value_heads
            n = block // tiles_v // num_value_heads
            h = hv // (num_value_heads // num_heads)
            v0 = block % tiles_v * v.tile_v
            begin = cu_seqlens[n]
            length = cu_seqlens[n + 1] - cu_seqlens[n]
            num_chunks = T.ceildiv(length, CHUNK)

            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, states, K, v.dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o0,
                    qkv, gates, p_ring, o0, num_chunks, n, hv, v0, has_h0, has_ht,
                )  # fmt: skip
            elif tx < plan.start("score"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, states, K, v.dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o1,
                    qkv, gates, p_ring, o1, num_chunks, n, hv, v0, has_h0, has_ht,
                )  # fmt: skip
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                score(
                    s_q, s_k, s_gate, s_p, qkv, gates, p_ring, num_chunks, scale,
                    plan.start("score"),
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        q, k, val, A, s_q, s_k, s_v, s_a, qkv, tail_full, begin, length, num_chunks,
                        h, hv, v0, v.tile_v, K,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(g, beta, s_gate, gates, begin, length, num_chunks, hv, scale)
                elif tx < plan.end("store"):
                    store(o, s_o0, s_o1, o0, o1, states, begin, length, num_chunks, hv, v0)
                else:
                    clear_padding(
                        o,
                        cu_seqlens[num_bounds - 1],
                        num_tokens,
                        hv,
                        v0,
                        v.tile_v,
                        n,
                        num_bounds - 1,
                    )

    return fused_fwd.with_attr("global_symbol", f"fused_fwd_{v.dtype}_k{K}_v{v.tile_v}")
