"""chunk_grads -- the gradients of q, k, v, g and beta, of every chunk independently.

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
E is the gradient of A's inverse, -A^T dA A^T with dA = dV' (beta W)^T, made of Y and V' alone.

Steps (numbers appear again in the roles); a CTA walks over pairs of chunk and key head, and within
each pair over the value heads in order:
     1 load    each tile as soon as its slot is released; rows past a chunk's end become zero
     2 gates   gamma, beta and their exponentials
     3 panel   W, and beta W in place of v
     4 panel   V'; <dS, S0>
     5 panel   dV'
     6 panel   Y in place of dV', dV in place of beta W, <Y, W>
     7 panel   dQi, dKi, dKu
     8 score   P; dP, dP0; E, F; X
     9 store   write dV
    10 sums    write dg, dbeta
After the last value head, the sums of dP0 and F are multiplied by K and Q, and dQ and dK are
written.

Bounded by memory: 120 + 64/r KB a value head, half of it the two states (K = V = 128, r value heads
a key head). Why this shape: a CTA has all value heads of a key head, so dQ and dK stay in registers
until they are complete, without atomics or a second pass. The [C, V] and [C, K] matrices are cut
into panels of 64 columns, of V up to Y and of K after it. Panels exchange data only by the tiles
that they fill together. Two warpgroups, one for each panel, run the same loop, because an SM's
instruction cache holds 32 KB for all roles together. For the same reason one piece of code makes
the three 64x64 tiles with decay. The three products with a state are separate code: each runs while
the result of the one before is added up. q and k of a pair, and dS of its value heads, alternate
between two slots: the next pair's q and k are loaded to the slot of the last dS, which is released
long before q and k are, so they have arrived when the next pair begins. States come in tiles of 64
rows, because dstate_chain may leave the tiles of a dS in two places, one of them the memory of dV
of the same chunk and value head. Chunks come from a table that chunk_table or segment_plan made, so
they lie inside the tensors: see tables.py. `owner`, which wrong bounds may leave unwritten, is an
index for TMA alone, which reads zeros outside a tensor.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import BETA, GAMMA, GATE_ROWS
from qla_kernels.gdn.kernels.chunk_grads import layout as grads
from qla_kernels.gdn.kernels.chunk_grads import panel as grads_panel
from qla_kernels.gdn.kernels.chunk_grads import store as grads_out
from qla_kernels.gdn.kernels.chunk_grads import tiles
from qla_kernels.gdn.kernels.chunk_grads.layout import (
    KEY,
    PANEL,
    SUM_ROWS,
    VN,
    ChunkWalk,
    GradTiles,
    P,
    Rings,
    free,
    full,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of everything but gates, beta and their gradients
    K: int  # q and k have so many numbers or fewer: `size`
    V: int

    @property
    def panels(self) -> int:
        """Number of panel warpgroups. If V and K differ, one has a panel of the larger only."""
        return max(self.K, self.V) // PANEL

    @property
    def tok(self) -> int:
        """Number of tiles: dO, V', Y and, if V < K, two for dQ and dK of the panel without V'."""
        return 5 if self.V < self.K else 3


VARIANTS = tuple(
    Variant(dtype, K, V) for dtype in ("bfloat16", "float16") for K in (128, 64) for V in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warpgroups
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the table of chunks
}

# slots of loaded tiles and of gates; dv lies in v's
GRAD_RINGS = {"qk": 1, "rows": 1, "h": 2, "ds": 1, "gate": 2, "dv": 1}


def schedule(variant: Variant) -> Schedule:
    panel_regs, score_regs = (160, 152) if variant.panels == 2 else (216, 216)
    of_values = (
        WARPGROUP_THREADS * variant.V // PANEL
    )  # threads of the warpgroups that have a panel of V
    return Schedule(
        roles=(
            Role(
                "panel",
                warps=4 * variant.panels,
                regs=panel_regs,
                waits=(
                    *full("qk", "rows", "h", "ds", "gate", "scores", "vn", "y"),
                    *free("vn", "y", "sums"),
                ),
                signals=(
                    *free("qk", "rows", "h", "ds", "gate", "scores", "vn", "y"),
                    "sums_full",
                    *((name, of_values) for name in full("vn", "y", "dv")),
                ),
                computes="W, V', dV', Y, dV; dQ, dK",
                uses=("wgmma", "tma_store"),
            ),
            Role(
                "score",
                warps=4,
                regs=score_regs,
                waits=(*full("qk", "rows", "gate", "vn", "y"), *free("scores", "sums")),
                signals=(*free("qk", "rows", "gate", "vn", "y"), *full("scores", "sums")),
                computes="P, dP0, F",
                uses=("wgmma",),
            ),
            *grads.serving_roles(regs=40),
        ),
        rings=GRAD_RINGS,
        named={"own": Named(WARPGROUP_THREADS, copies=variant.panels)},
        # q, k and dS; v; dO, V', Y; A; S0 twice; P and F; gates, sums; barriers, alignment
        smem_bytes=4 * CHUNK * variant.K * 2
        + (1 + variant.tok) * CHUNK * variant.V * 2
        + CHUNK * CHUNK * 2
        + 2 * variant.V * variant.K * 2
        + 2 * CHUNK * CHUNK * 2
        + (GRAD_RINGS["gate"] * GATE_ROWS + SUM_ROWS) * CHUNK * 4
        + 1024,
    )


@T.macro
def score(s, ring, walk, scale):
    r_x = T.alloc_fragment((CHUNK, CHUNK), "float32")
    r_other = T.alloc_fragment((CHUNK, CHUNK), "float32")  # Q K^T, then K K^T
    r_dp0 = T.alloc_local((32,), "float32")  # in accumulator registers, as F
    r_f = T.alloc_local((32,), "float32")
    step, p_step = T.alloc_var("int32"), T.alloc_var("int32")
    for i in T.serial(walk.num_pairs):
        ring.qk.wait(i)
        for e in T.unroll(32):
            r_dp0[e] = 0
            r_f[e] = 0
        for r in T.serial(walk.group):
            step = i * walk.group + r
            p_step = i * (walk.group + 1) + r
            gate = ring.gate.slot(step)
            for j in rolled(3):  # 8
                if j != 1:
                    T.wgmma_gemm(
                        s.turns[2 * (i % 2) + j // 2, :, :],  # QUERY, then KEY
                        s.turns[2 * (i % 2) + KEY, :, :],
                        r_other,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.wait_wgmma(0)
                if j == 0:
                    ring.gate.wait(step)
                    for row, column in T.Parallel(CHUNK, CHUNK):
                        r_x[row, column] = scale * r_other[row, column]
                else:
                    if j == 1:
                        ring.rows.wait(step)
                        ring.vn.wait(step)
                    else:
                        ring.y.wait(step)
                    T.wgmma_gemm(
                        s.tok[2 * j - 2, :, :],  # DO, then Y
                        s.tok[VN, :, :],
                        r_x,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.wait_wgmma(0)
                    if j == 1:
                        ring.rows.release(step)
                    else:
                        ring.vn.release(step)
                        ring.y.release(step)
                tiles.decay_scores(r_x, s.gate[gate, GAMMA, 0], T.if_then_else(j == 2, 0, 1))
                if j == 0:
                    ring.scores.acquire(p_step)
                    tiles.put_tile(r_x, s.scores[P, 0, 0])
                    T.fence_proxy_async()  # P: written by threads, read by wgmma
                    ring.scores.commit(p_step)
                else:
                    if j == 1:
                        ring.sums.acquire(step)
                    tiles.add_scores(r_dp0, r_f, r_x, j - 1, scale, s.gate[gate, BETA, 0])
                    if (j == 2) & (r == walk.group - 1):  # first the tiles that panels wait for
                        ring.qk.release(i)
                        ring.scores.acquire(p_step + 1)
                        tiles.put_tiles(r_dp0, r_f, s.scores[P, 0, 0])
                        T.fence_proxy_async()  # dP0 and F: written by threads, read by wgmma
                        ring.scores.commit(p_step + 1)
                    tiles.sum_scores(
                        r_x, r_other, j - 1, scale, s.gate[gate, BETA, 0],
                        s.sums[grads.X_ROWS - 1 + j, 0], s.sums[grads.E_KK, 0],
                        s.sums[grads.X_COLUMNS - 4 + 4 * j, 0],
                    )  # fmt: skip
            ring.gate.release(step)
            ring.sums.commit(step)


def build(variant: Variant):
    plan = schedule(variant)
    K, V = variant.K, variant.V
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    capacity, num_rows, num_tails = T.dynamic("capacity, num_rows, num_tails")
    num_owners, size = T.dynamic("num_owners, size")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    v_token, v_head, v_r = T.dynamic("v_token, v_head, v_r")
    do_token, do_head, do_r = T.dynamic("do_token, do_head, do_r")

    def tile(*shape: int):
        return T.alloc_shared(shape, variant.dtype)

    def barrier(name: str):
        return T.alloc_barrier([plan.arrivals(name)] * plan.slots(name))

    @T.prim_func
    def chunk_grads(
        q: T.StridedTensor((num_tokens, num_heads, size), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_heads, group, V), (v_token, v_head, v_r, 1), variant.dtype
        ),
        do: T.StridedTensor(
            (num_tokens, num_heads, group, V), (do_token, do_head, do_r, 1), variant.dtype
        ),
        g_cum: T.Tensor((num_tokens, num_heads, group), "float32"),
        beta: T.Tensor((num_tokens, num_heads, group), "float32"),
        A: T.Tensor((num_tokens, num_heads, group, CHUNK), variant.dtype),
        h: T.Tensor((capacity, num_heads, group, V, size), variant.dtype),
        ds: T.Tensor((capacity, num_heads, group, num_rows, size), variant.dtype),
        tails: T.Tensor((num_tails, num_heads, group, PANEL, size), variant.dtype),
        owner: T.Tensor((num_owners,), "int32"),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        dq: T.Tensor((num_tokens, num_heads, size), variant.dtype),
        dk: T.Tensor((num_tokens, num_heads, size), variant.dtype),
        dv: T.Tensor((num_tokens, num_heads, group, V), variant.dtype),
        dg: T.Tensor((num_tokens, num_heads, group), "float32"),
        dbeta: T.Tensor((num_tokens, num_heads, group), "float32"),
        scale: T.float32,
        walkers: T.int32,
        held: T.int32,  # dstate_chain's `held`: 0 or 1
    ):
        with T.Kernel(walkers, threads=plan.block) as first:
            # TileLang initialises the barriers by one thread of each row of the block. All of these
            # write the same values, before the first synchronisation of the block.
            T.import_source(tiles.SOURCE)
            s_turns, s_v, s_tok = tile(4, CHUNK, K), tile(1, CHUNK, V), tile(variant.tok, CHUNK, V)
            s_a, s_scores = tile(1, CHUNK, CHUNK), tile(2, CHUNK, CHUNK)
            s_state = tile(2 * (V // PANEL), PANEL, K)
            s_gate = T.alloc_shared((GRAD_RINGS["gate"], GATE_ROWS, CHUNK), "float32")
            s_sums = T.alloc_shared((SUM_ROWS, CHUNK), "float32")
            swizzled = (s_turns, s_v, s_tok, s_a, s_state, s_scores)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            qk_full, qk_free = barrier("qk_full"), barrier("qk_free")
            rows_full, rows_free = barrier("rows_full"), barrier("rows_free")
            h_full, h_free = barrier("h_full"), barrier("h_free")
            ds_full, ds_free = barrier("ds_full"), barrier("ds_free")
            vn_full, vn_free = barrier("vn_full"), barrier("vn_free")
            y_full, y_free = barrier("y_full"), barrier("y_free")
            dv_full, tail_full = barrier("dv_full"), barrier("tail_full")
            scores_full, scores_free = barrier("scores_full"), barrier("scores_free")
            gate_full, gate_free = barrier("gate_full"), barrier("gate_free")
            sums_full, sums_free = barrier("sums_full"), barrier("sums_free")
            s = GradTiles(s_turns, s_v, s_tok, s_a, s_state, s_scores, s_gate, s_sums)
            ring = Rings(
                qk=Ring(qk_full, qk_free, GRAD_RINGS["qk"]),
                rows=Ring(rows_full, rows_free, GRAD_RINGS["rows"]),
                h=Ring(h_full, h_free, GRAD_RINGS["h"]),
                ds=Ring(ds_full, ds_free, GRAD_RINGS["ds"]),
                vn=Ring(vn_full, vn_free, 1),
                y=Ring(y_full, y_free, 1),
                dv=Ring(dv_full, rows_free, GRAD_RINGS["dv"]),
                scores=Ring(scores_full, scores_free, 1),
                gate=Ring(gate_full, gate_free, GRAD_RINGS["gate"]),
                sums=Ring(sums_full, sums_free, 1),
                own=NamedBarrier(plan, "own"),
            )
            walk = ChunkWalk(chunks, first, walkers, num_chunks, num_heads, group)

            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < variant.panels:
                T.set_max_nreg(plan.role("panel").regs, 1)
                grads_panel.panel(dq, dk, s, ring, walk, K, V)
            elif warpgroup == variant.panels:
                T.set_max_nreg(plan.role("score").regs, 1)
                score(s, ring, walk, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    gradients = grads.StateGradients(ds, dv, tails, owner, held)
                    grads.load(q, k, v, do, A, h, gradients, s, ring, tail_full, walk, K, V)
                elif tx < 64:
                    grads.gates(g_cum, beta, s_gate, ring.gate, walk, scale)
                    grads_out.clear_padding(
                        dq, dk, dv, dg, dbeta, walk, num_chunks[0], num_tokens, V
                    )
                elif tx < 96:
                    grads_out.store(dv, s_v, ring.dv, walk, V)
                else:
                    grads_out.sums(dg, dbeta, s_sums, ring.sums, walk, K, V)

    return chunk_grads
