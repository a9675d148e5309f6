"""fused_fwd -- the gated delta rule, forward: one CTA per sequence, value head and V tile.

Per chunk (C = 64 tokens; gamma, e = e^gamma and d = e^(gamma_last - gamma) restart in each; S is
the state, kept transposed, [V, K], in fp32 registers from the first chunk to the last):
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

Bounded by latency, then by shared memory, which the right operands of all products come from.
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

from qla_kernels.gdn.chain import GATE_ROWS, TILE, gate, load, state, store
from qla_kernels.gdn.gated_tiles import SOURCE
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.math import CHUNK
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import ONE, Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    K: int
    tile_v: int  # columns of V a CTA computes: 64 or 128


VARIANTS = tuple(
    Variant(dtype, K, tile_v)
    for dtype in ("bfloat16", "float16")
    for K in (128, 64)
    for tile_v in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
}

RINGS = {"qkv": 3, "gate": 4, "p": 2}


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
        rings=RINGS,
        # q, k, v, A; P; O; gates; barriers and alignment
        smem_bytes=RINGS["qkv"] * CHUNK * (2 * v.K + v.tile_v + CHUNK) * 2
        + RINGS["p"] * CHUNK * CHUNK * 2
        + CHUNK * v.tile_v * 2
        + RINGS["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


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
def clear_padding(o, cu_seqlens, num_tokens, num_sequences, n, hv, i_tile, tile_v):
    """Rows of no sequence are zero; the sequences' CTAs share them."""
    lane = T.get_thread_binding() % 32
    first_row = cu_seqlens[num_sequences] + n
    for j in rolled(T.ceildiv(num_tokens - first_row, num_sequences)):
        if lane < tile_v // 8:
            for e in T.vectorized(8):
                o[first_row + j * num_sequences, hv, i_tile, lane * 8 + e] = 0


def build(v: Variant):
    plan = schedule(v)
    K, states = v.K, v.tile_v // TILE
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_bounds = T.dynamic("V, num_bounds")
    num_tiles = T.dynamic("num_tiles") if v.tile_v == 64 else 1  # V is 64 or 128
    num_h0, num_ht = T.dynamic("num_h0, num_ht")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def fused_fwd(
        q: T.StridedTensor((num_tokens, num_heads, K), (q_token, q_head, 1), v.dtype),
        k: T.StridedTensor((num_tokens, num_heads, K), (k_token, k_head, 1), v.dtype),
        val: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, v.tile_v),
            (v_token, v_head, v_tile, 1),
            v.dtype,
        ),
        g: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), v.dtype),
        cu_seqlens: T.Tensor((num_bounds,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        o: T.Tensor((num_tokens, num_value_heads, num_tiles, v.tile_v), v.dtype),
        ht: T.StridedTensor((num_ht, num_value_heads, K, V), (ht_n, ht_h, ht_k, ht_v), "float32"),
        scale: T.float32,
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel(
            (num_bounds - 1) * num_value_heads * num_tiles, threads=plan.threads
        ) as block:
            T.import_source(SOURCE)
            s_k = T.alloc_shared((RINGS["qkv"], CHUNK, K), v.dtype)
            s_q = T.alloc_shared((RINGS["qkv"], CHUNK, K), v.dtype)
            s_v = T.alloc_shared((RINGS["qkv"], CHUNK, v.tile_v), v.dtype)
            s_a = T.alloc_shared((RINGS["qkv"], CHUNK, CHUNK), v.dtype)
            s_p = T.alloc_shared((RINGS["p"], CHUNK, CHUNK), v.dtype)
            s_gate = T.alloc_shared((RINGS["gate"], GATE_ROWS, CHUNK), "float32")
            qkv_full = T.alloc_barrier([plan.arrivals("qkv_full")] * RINGS["qkv"])
            qkv_free = T.alloc_barrier([plan.arrivals("qkv_free")] * RINGS["qkv"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * RINGS["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * RINGS["gate"])
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * RINGS["p"])
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * RINGS["p"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            s_o0 = T.alloc_shared((CHUNK, TILE), v.dtype)
            o0_full = T.alloc_barrier([plan.arrivals("o0_full")])
            o0_free = T.alloc_barrier([plan.arrivals("o0_free")])
            s_o = [s_o0]
            o_rings = [Ring(o0_full, o0_free, 1)]
            if states == 2:
                s_o1 = T.alloc_shared((CHUNK, TILE), v.dtype)
                o1_full = T.alloc_barrier([plan.arrivals("o1_full")])
                o1_free = T.alloc_barrier([plan.arrivals("o1_free")])
                s_o.append(s_o1)
                o_rings.append(Ring(o1_full, o1_free, 1))
            swizzled = (s_v, s_p, *s_o)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            qkv = Ring(qkv_full, qkv_free, RINGS["qkv"])
            gates = Ring(gate_full, gate_free, RINGS["gate"])
            p_ring = Ring(p_full, p_free, RINGS["p"])

            hv, n, h = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            i_tile, v0 = T.alloc_var("int32"), T.alloc_var("int32")
            i_tile = block % num_tiles
            v0 = i_tile * v.tile_v
            hv = block // num_tiles % num_value_heads
            n = block // num_tiles // num_value_heads
            h = hv // (num_value_heads // num_heads)
            begin = cu_seqlens[n]
            length = cu_seqlens[n + 1] - cu_seqlens[n]
            num_chunks = T.ceildiv(length, CHUNK)

            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, states, K, v.dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o[0],
                    qkv, gates, p_ring, o_rings[0], num_chunks, n, hv, v0, has_h0, has_ht,
                )  # fmt: skip
            elif tx < plan.start("score"):  # nobody where a CTA has one state warpgroup
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, states, K, v.dtype, h0, ht, s_q, s_k, s_v, s_gate, s_a, s_p, s_o[-1],
                    qkv, gates, p_ring, o_rings[-1], num_chunks, n, hv, v0, has_h0, has_ht,
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
                        q, k, val, A, s_q, s_k, s_v, s_a, qkv, tail_full,
                        begin, length, num_chunks, h, hv, i_tile, v.tile_v, K,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(g, beta, s_gate, gates, begin, length, num_chunks, hv, scale)
                elif tx < plan.end("store"):
                    store(o, s_o, o_rings, begin, length, num_chunks, hv, i_tile)
                else:
                    clear_padding(
                        o, cu_seqlens, num_tokens, num_bounds - 1, n, hv, i_tile, v.tile_v
                    )

    return fused_fwd.with_attr("global_symbol", f"fused_fwd_{v.dtype}_k{v.K}_v{v.tile_v}")
