"""chunk_grads -- the gradients of q, k, v, g and beta, every chunk by itself.

Per chunk (C = 64 tokens; gamma, e = e^gamma and d = e^(gamma_last - gamma) restart in each, and
G_ij = e^(gamma_i - gamma_j)), key head and each of its value heads, with S0 the state that enters
the chunk and dS the gradient of the state that leaves it, both kept transposed, [V, K]:
    W    = V - e (K S0)            V' = A (beta W)                               [C, V]
    P    = scale G o Q K^T, on and below the diagonal                            [C, C]
    dV'  = d (K dS) + P^T dO       Y  = A^T dV'          dV = beta Y             [C, V]
    dP   = dO V'^T                 dP0 = scale G o dP, on and below the diagonal [C, C]
    E    = -Y V'^T                 F = beta G o E, below the diagonal            [C, C]
    dQi  = scale e (dO S0^T)   dKi = d (V' dS^T)   dKu = -beta e (Y S0^T)        [C, K]
    dQ   = dQi + dP0 K                                    summed over the value heads
    dK   = dKi + dKu + dP0^T Q + (F + F^T) K              summed over the value heads
    dbeta_i  = <Y_i, W_i> + sum_j (G o E o K K^T)_ij
    X        = dP0 o Q K^T + F o K K^T, below the diagonal
    dgamma_i = <Q_i, dQi_i> + <K_i, dKu_i> + sum_j (X_ij - X_ji)
    dg_i     = sum_{j >= i} dgamma_j + sum_{j < i} <K_j, dKi_j> + e^gamma_last <dS, S0>
E is the gradient of A's inverse, -A^T dA A^T with dA = dV' (beta W)^T: both factors are there.

Steps (numbers appear again in the roles); a CTA walks over pairs of chunk and key head, and in each
over the value heads in order:
     1 load    each tile as soon as its readers have left it; rows past a chunk's end become zero
     2 gates   gamma, beta and their exponentials
     3 value   <dS, S0>; W, and beta W in place of v
     4 value   V'
     5 value   Y in place of dV', dV in place of beta W, <Y, W>
     6 query   P; dV'
     7 query   dQi
     8 query   dP, dP0, its share of X; dP0 K
     9 key     dKi
    10 key     E, F, its share of X; (F + F^T) K
    11 key     dP0^T Q
    12 key     dKu
    13 store   dV out
    14 sums    dg, dbeta out
After the last value head, query and key write dQ and dK from registers.

Bounded by memory: 120 + 64/r KB a value head, half of it the two states (K = V = 128, r value heads
a key head). Why this shape: a CTA has all value heads of a key head, so dQ and dK stay in registers
until they are whole, and neither atomics nor a second pass adds anything up. Three warpgroups of
about equal work each own what they accumulate. Every tile has one slot or two, which is enough if
it is loaded again at once when its last reader leaves, and for that readers come early. dQ and dK
take 64 registers a thread, so what is scaled before it is added comes in pieces of 64 columns.
Summing dP0 and F over the value heads before their products with K and Q would save 1.5 of 10
products at r = 2; their registers were not there: every wgmma was serialised.
"""

from typing import NamedTuple

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from qla_kernels.gdn import grad_tiles as tiles
from qla_kernels.gdn import grads, grads_out
from qla_kernels.gdn.grads import GATE_ROWS, SUM_ROWS, Rings, Tiles, Walk, free, full
from qla_kernels.tile.math import CHUNK
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule

VALUE, QUERY, KEY = 8, 9, 10  # named barriers of the three warpgroups


class Variant(NamedTuple):
    dtype: str  # of everything but gates, beta and their gradients
    K: int
    V: int


VARIANTS = tuple(
    Variant(dtype, K, V) for dtype in ("bfloat16", "float16") for K in (128, 64) for V in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warpgroups
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the table of chunks
}

# slots of loaded tiles and of gates; dv lies in v's
RINGS = {"q": 1, "k": 1, "v": 2, "do": 1, "a": 1, "h": 1, "ds": 1, "gate": 2, "dv": 2}


def schedule(v: Variant) -> Schedule:
    of_all = ("k", "h", "ds", "gate")  # what all three warpgroups read
    return Schedule(
        roles=(
            Role(
                "value",
                warps=4,
                regs=160,
                waits=(*full(*of_all, "v", "a", "dvn"), "vn_free", "sums_free"),
                signals=(*free(*of_all, "a"), *full("vn", "y", "dv", "sums")),
                computes="W, V', Y, dV; <dS, S0>, <Y, W>",
                uses=("wgmma",),
            ),
            Role(
                "query",
                warps=4,
                regs=152,
                waits=(*full(*of_all, "q", "do", "vn"), *free("y", "dp0", "sums")),
                signals=(*free(*of_all, "q", "do", "vn"), *full("dvn", "dp0", "sums")),
                computes="P, dV', dP, dQ",
                uses=("wgmma",),
            ),
            Role(
                "key",
                warps=4,
                regs=152,
                waits=(*full(*of_all, "q", "vn", "y", "dp0"), "sums_free"),
                signals=(*free(*of_all, "q", "vn", "y", "dp0"), "sums_full"),
                computes="E, F, dK",
                uses=("wgmma",),
            ),
            *grads.serving_roles(regs=48),
        ),
        rings=RINGS,
        # q, k; v, dO, V', dV'; S0, dS; A, P, Q K^T, K K^T, F; gates, sums; barriers, alignment
        smem_bytes=(RINGS["q"] + RINGS["k"]) * CHUNK * v.K * 2
        + (RINGS["v"] + RINGS["do"] + 2) * CHUNK * v.V * 2
        + (RINGS["h"] + RINGS["ds"]) * v.V * v.K * 2
        + (RINGS["a"] + 4) * CHUNK * CHUNK * 2
        + (RINGS["gate"] * GATE_ROWS + SUM_ROWS) * CHUNK * 4
        + 1024,
    )


@T.macro
def value(s, ring, walk, K, V):
    r_w = T.alloc_fragment((CHUNK, V), "float32")  # K S0, then W
    r_n = T.alloc_fragment((CHUNK, V), "float32")  # V', then Y
    step = T.alloc_var("int32")
    for i in T.serial(walk.num_pairs):
        k = ring.k.slot(i)
        ring.k.wait(i)
        for r in T.serial(walk.group):
            step = i * walk.group + r
            gate, v, a = ring.gate.slot(step), ring.v.slot(step), ring.a.slot(step)
            h, ds = ring.h.slot(step), ring.ds.slot(step)
            ring.h.wait(step)
            T.wgmma_gemm(s.k[k, :, :], s.h[h, :, :], r_w, transpose_B=True, clear_accum=True)
            ring.gate.wait(step)
            ring.ds.wait(step)
            ring.sums.acquire(step)
            tiles.put_tile_dot(  # 3
                s.h[h, 0, 0],
                s.ds[ds, 0, 0],
                K * V,
                s.gate[gate, grads.E, CHUNK - 1],
                s.sums[grads.STATE, 0],
            )
            ring.ds.release(step)
            T.wait_wgmma(0)
            ring.h.release(step)
            ring.v.wait(step)
            tiles.correct_values(
                r_w, s.v[v, 0, 0], s.gate[gate, grads.E, 0], s.gate[gate, grads.BETA, 0], V
            )
            T.fence_proxy_async()  # beta W: written by threads, read by wgmma
            T.sync_threads(VALUE, 128)
            ring.a.wait(step)
            T.wgmma_gemm(s.a[a, :, :], s.v[v, :, :], r_n, clear_accum=True)  # 4
            ring.vn.acquire(step)
            T.wait_wgmma(0)
            tiles.put_tile(r_n, s.vn[0, 0], V)
            T.fence_proxy_async()  # V': written by threads, read by wgmma
            ring.vn.commit(step)
            ring.dvn.wait(step)
            T.wgmma_gemm(s.a[a, :, :], s.y, r_n, transpose_A=True, clear_accum=True)  # 5
            T.wait_wgmma(0)
            ring.a.release(step)
            T.sync_threads(VALUE, 128)  # all warps' products have read dV' and beta W
            tiles.finish_values(
                r_n,
                r_w,
                s.y[0, 0],
                s.v[v, 0, 0],
                s.gate[gate, grads.BETA, 0],
                s.sums[grads.Y_W, 0],
                V,
            )
            ring.gate.release(step)
            ring.sums.commit(step)
            T.fence_proxy_async()  # Y and dV: written by threads, read by wgmma and TMA
            ring.y.commit(step)
            ring.dv.commit(step)
        ring.k.release(i)


@T.macro
def query(dq, s, ring, walk, scale, first_thread, dtype, K, V):
    r_x = T.alloc_fragment((CHUNK, tiles.PANEL), "float32")
    r_dq = T.alloc_fragment((CHUNK, K), "float32")
    r_dp0 = T.alloc_fragment((CHUNK, CHUNK), dtype)
    dot = T.alloc_local((2,), "float32")
    step = T.alloc_var("int32")
    thread = T.get_thread_binding() - first_thread
    for j in T.serial(CHUNK // 2):  # above the diagonal P stays zero for good
        s.p[thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(walk.num_pairs):
        k, q = ring.k.slot(i), ring.q.slot(i)
        ring.k.wait(i)
        ring.q.wait(i)
        T.clear(r_dq)
        for r in T.serial(walk.group):
            step = i * walk.group + r
            gate, do = ring.gate.slot(step), ring.do.slot(step)
            h, ds = ring.h.slot(step), ring.ds.slot(step)
            T.wgmma_gemm(s.q[q, :, :], s.k[k, :, :], r_x, transpose_B=True, clear_accum=True)  # 6
            ring.gate.wait(step)
            T.wait_wgmma(0)
            tiles.put_tile(r_x, s.qk[0, 0], CHUNK)  # each warp reads its own rows only
            ring.dp0.acquire(step)
            tiles.gated_scores(r_x, s.gate[gate, 0, 0], s.p[0, 0], scale)
            T.fence_proxy_async()  # P: written by threads, read by wgmma
            T.sync_threads(QUERY, 128)
            ring.ds.wait(step)
            ring.do.wait(step)
            ring.dvn.acquire(step)
            for c in tiles.panels(V):
                T.wgmma_gemm(
                    s.k[k, :, :],
                    s.ds[ds, c : c + tiles.PANEL, :],
                    r_x,
                    transpose_B=True,
                    clear_accum=True,
                )
                T.wait_wgmma(0)
                for row, column in T.Parallel(CHUNK, tiles.PANEL):
                    r_x[row, column] *= s.gate[gate, grads.D, row]
                T.wgmma_gemm(s.p, s.do[do, :, c : c + tiles.PANEL], r_x, transpose_A=True)
                T.wait_wgmma(0)
                tiles.put_tile(r_x, s.y[0, c], tiles.PANEL)
            ring.ds.release(step)
            T.fence_proxy_async()  # dV': written by threads, read by wgmma
            ring.dvn.commit(step)
            ring.h.wait(step)
            for e in T.unroll(2):
                dot[e] = 0
            for c in tiles.panels(K):  # 7
                T.wgmma_gemm(s.do[do, :, :], s.h[h, :, c : c + tiles.PANEL], r_x, clear_accum=True)
                T.wait_wgmma(0)
                tiles.add_scaled(r_dq, c, r_x, s.gate[gate, grads.SCALE_E, 0], 1, s.q[q, 0, c], dot)
            ring.h.release(step)
            ring.vn.wait(step)
            T.wgmma_gemm(s.do[do, :, :], s.vn, r_x, transpose_B=True, clear_accum=True)  # 8
            ring.sums.acquire(step)
            T.wait_wgmma(0)
            ring.do.release(step)
            ring.vn.release(step)
            tiles.scores_backward(
                r_x, s.gate[gate, 0, 0], s.qk[0, 0], scale, dot, s.sums[grads.COLUMNS_Q, 0]
            )
            ring.gate.release(step)
            T.copy(r_x, r_dp0)
            T.wgmma_gemm(r_dp0, s.k[k, :, :], r_dq)
            tiles.put_row_sums(dot, s.sums[grads.OF_Q, 0])
            ring.sums.commit(step)
            T.sync_threads(QUERY, 128)  # all warps' products have read P
            tiles.put_tile(r_x, s.p[0, 0], CHUNK)
            T.fence_proxy_async()  # dP0: written by threads, read by the key role's wgmma
            ring.dp0.commit(step)
            T.wait_wgmma(0)
        ring.k.release(i)
        ring.q.release(i)
        grads_out.put_rows(dq, r_dq, walk, i, K)


@T.macro
def key(dk, s, ring, walk, K):
    r_x = T.alloc_fragment((CHUNK, tiles.PANEL), "float32")
    r_dk = T.alloc_fragment((CHUNK, K), "float32")
    dot, dot_i = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    step = T.alloc_var("int32")
    for i in T.serial(walk.num_pairs):
        k, q = ring.k.slot(i), ring.q.slot(i)
        ring.k.wait(i)
        ring.q.wait(i)
        T.wgmma_gemm(s.k[k, :, :], s.k[k, :, :], r_x, transpose_B=True, clear_accum=True)
        T.clear(r_dk)
        T.wait_wgmma(0)
        tiles.put_tile(r_x, s.kk[0, 0], CHUNK)  # each warp reads its own rows only
        T.sync_warp()
        for r in T.serial(walk.group):
            step = i * walk.group + r
            gate, h, ds = ring.gate.slot(step), ring.h.slot(step), ring.ds.slot(step)
            for e in T.unroll(2):
                dot[e] = 0
                dot_i[e] = 0
            ring.gate.wait(step)
            ring.vn.wait(step)
            ring.ds.wait(step)
            for c in tiles.panels(K):  # 9
                T.wgmma_gemm(s.vn, s.ds[ds, :, c : c + tiles.PANEL], r_x, clear_accum=True)
                T.wait_wgmma(0)
                tiles.add_scaled(r_dk, c, r_x, s.gate[gate, grads.D, 0], 1, s.k[k, 0, c], dot_i)
            ring.ds.release(step)
            ring.y.wait(step)
            T.wgmma_gemm(s.y, s.vn, r_x, transpose_B=True, clear_accum=True)  # 10
            ring.sums.acquire(step)
            T.wait_wgmma(0)
            ring.vn.release(step)
            tiles.system_backward(
                r_x,
                s.gate[gate, 0, 0],
                s.kk[0, 0],
                dot,
                s.sums[grads.E_KK, 0],
                s.sums[grads.COLUMNS_K, 0],
            )
            tiles.put_symmetric(r_x, s.f[0, 0])
            T.fence_proxy_async()  # F + F^T: written by threads, read by wgmma
            T.sync_threads(KEY, 128)
            T.wgmma_gemm(s.f, s.k[k, :, :], r_dk)
            T.wait_wgmma(0)
            ring.dp0.wait(step)
            T.wgmma_gemm(s.p, s.q[q, :, :], r_dk, transpose_A=True)  # 11
            T.wait_wgmma(0)
            ring.dp0.release(step)
            ring.h.wait(step)
            for c in tiles.panels(K):  # 12
                T.wgmma_gemm(s.y, s.h[h, :, c : c + tiles.PANEL], r_x, clear_accum=True)
                T.wait_wgmma(0)
                tiles.add_scaled(r_dk, c, r_x, s.gate[gate, grads.BETA_E, 0], -1, s.k[k, 0, c], dot)
            ring.h.release(step)
            ring.y.release(step)
            ring.gate.release(step)
            tiles.put_row_sums(dot, s.sums[grads.OF_K, 0])
            tiles.put_row_sums(dot_i, s.sums[grads.K_DKI, 0])
            ring.sums.commit(step)
        ring.k.release(i)
        ring.q.release(i)
        grads_out.put_rows(dk, r_dk, walk, i, K)


def build(v: Variant):
    plan = schedule(v)
    K, V = v.K, v.V
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    capacity = T.dynamic("capacity")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, v_r = T.dynamic("v_token, v_head, v_r")
    do_token, do_head, do_r = T.dynamic("do_token, do_head, do_r")

    def tile(datum: str, rows: int, columns: int):
        return T.alloc_shared((RINGS[datum], rows, columns), v.dtype)

    def barrier(name: str):
        return T.alloc_barrier([plan.arrivals(name)] * plan.slots(name))

    @T.prim_func
    def chunk_grads(
        q: T.StridedTensor((num_tokens, num_heads, K), (q_token, q_head, 1), v.dtype),
        k: T.StridedTensor((num_tokens, num_heads, K), (k_token, k_head, 1), v.dtype),
        val: T.StridedTensor((num_tokens, num_heads, group, V), (v_token, v_head, v_r, 1), v.dtype),
        do: T.StridedTensor(
            (num_tokens, num_heads, group, V), (do_token, do_head, do_r, 1), v.dtype
        ),
        g_cum: T.Tensor((num_tokens, num_heads, group), "float32"),
        beta: T.Tensor((num_tokens, num_heads, group), "float32"),
        A: T.Tensor((num_tokens, num_heads, group, CHUNK), v.dtype),
        h: T.Tensor((capacity, num_heads, group, V, K), v.dtype),
        ds: T.Tensor((capacity, num_heads, group, V, K), v.dtype),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        dq: T.Tensor((num_tokens, num_heads, K), v.dtype),
        dk: T.Tensor((num_tokens, num_heads, K), v.dtype),
        dv: T.Tensor((num_tokens, num_heads, group, V), v.dtype),
        dg: T.Tensor((num_tokens, num_heads, group), "float32"),
        dbeta: T.Tensor((num_tokens, num_heads, group), "float32"),
        scale: T.float32,
        walkers: T.int32,
    ):
        with T.Kernel(walkers, threads=plan.threads) as first:
            T.import_source(tiles.SOURCE)
            s_q, s_k = tile("q", CHUNK, K), tile("k", CHUNK, K)
            s_v, s_do = tile("v", CHUNK, V), tile("do", CHUNK, V)
            s_a, s_h, s_ds = tile("a", CHUNK, CHUNK), tile("h", V, K), tile("ds", V, K)
            s_vn, s_y = (T.alloc_shared((CHUNK, V), v.dtype) for _ in range(2))
            s_p, s_qk, s_kk, s_f = (T.alloc_shared((CHUNK, CHUNK), v.dtype) for _ in range(4))
            s_gate = T.alloc_shared((RINGS["gate"], GATE_ROWS, CHUNK), "float32")
            s_sums = T.alloc_shared((SUM_ROWS, CHUNK), "float32")
            swizzled = (s_q, s_k, s_v, s_do, s_a, s_h, s_ds, s_vn, s_y, s_p, s_qk, s_kk, s_f)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            q_full, q_free = barrier("q_full"), barrier("q_free")
            k_full, k_free = barrier("k_full"), barrier("k_free")
            v_full, v_free = barrier("v_full"), barrier("v_free")
            do_full, do_free = barrier("do_full"), barrier("do_free")
            a_full, a_free = barrier("a_full"), barrier("a_free")
            h_full, h_free = barrier("h_full"), barrier("h_free")
            ds_full, ds_free = barrier("ds_full"), barrier("ds_free")
            vn_full, vn_free = barrier("vn_full"), barrier("vn_free")
            dvn_full, y_full, y_free = barrier("dvn_full"), barrier("y_full"), barrier("y_free")
            dv_full, tail_full = barrier("dv_full"), barrier("tail_full")
            dp0_full, dp0_free = barrier("dp0_full"), barrier("dp0_free")
            gate_full, gate_free = barrier("gate_full"), barrier("gate_free")
            sums_full, sums_free = barrier("sums_full"), barrier("sums_free")
            s = Tiles(
                s_q, s_k, s_v, s_do, s_a, s_h, s_ds, s_vn, s_y, s_p, s_qk, s_kk, s_f, s_gate, s_sums
            )  # fmt: skip
            ring = Rings(
                q=Ring(q_full, q_free, RINGS["q"]),
                k=Ring(k_full, k_free, RINGS["k"]),
                v=Ring(v_full, v_free, RINGS["v"]),
                do=Ring(do_full, do_free, RINGS["do"]),
                a=Ring(a_full, a_free, RINGS["a"]),
                h=Ring(h_full, h_free, RINGS["h"]),
                ds=Ring(ds_full, ds_free, RINGS["ds"]),
                vn=Ring(vn_full, vn_free, 1),
                dvn=Ring(dvn_full, y_free, 1),
                y=Ring(y_full, y_free, 1),
                dv=Ring(dv_full, v_free, RINGS["dv"]),
                dp0=Ring(dp0_full, dp0_free, 1),
                gate=Ring(gate_full, gate_free, RINGS["gate"]),
                sums=Ring(sums_full, sums_free, 1),
            )
            num_pairs = T.alloc_var("int32")
            num_pairs = T.ceildiv(num_chunks[0] * num_heads - first, walkers)
            walk = Walk(chunks, first, walkers, num_pairs, num_heads, group)

            tx = T.get_thread_binding()
            if tx < plan.end("value"):
                T.set_max_nreg(plan.role("value").regs, 1)
                value(s, ring, walk, K, V)
            elif tx < plan.end("query"):
                T.set_max_nreg(plan.role("query").regs, 1)
                query(dq, s, ring, walk, scale, plan.start("query"), v.dtype, K, V)
            elif tx < plan.end("key"):
                T.set_max_nreg(plan.role("key").regs, 1)
                key(dk, s, ring, walk, K)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    grads.load(q, k, val, do, A, h, ds, s, ring, tail_full, walk, K, V)
                elif tx < plan.end("gates"):
                    grads.gates(g_cum, beta, s_gate, ring.gate, walk, scale)
                    grads_out.clear_padding(
                        dq, dk, dv, dg, dbeta, walk, num_chunks[0], num_tokens, K, V
                    )
                elif tx < plan.end("store"):
                    grads_out.store(dv, s_v, ring.dv, walk, V)
                else:
                    grads_out.sums(dg, dbeta, s_sums, ring.sums, walk)

    return chunk_grads.with_attr("global_symbol", f"chunk_grads_{v.dtype}_k{v.K}_v{v.V}")
