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
from qla_kernels.gdn.kernels.chain.layout import BETA, GAMMA
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role
from qla_kernels.gdn.kernels.chunk_grads import layout as grads
from qla_kernels.gdn.kernels.chunk_grads import panel as grads_panel
from qla_kernels.gdn.kernels.chunk_grads import store as grads_out
from qla_kernels.gdn.kernels.chunk_grads import tiles
from qla_kernels.gdn.kernels.chunk_grads.layout import KEY, PANEL, VN, ChunkWalk, P
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, each, free, full
from qla_kernels.tile.strided import strided


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


def schedule(variant: Variant) -> Schedule:
    panel_regs, score_regs = (160, 152) if variant.panels == 2 else (216, 216)
    with_values = WARPGROUP_THREADS * variant.V // PANEL  # threads that have a panel of V
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
                    *each(full("vn", "y", "dv"), with_values),
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
            load_role(40, "q, k, v, dO, A, S0, dS", "qk", "rows", "h", "ds"),
            gate_role(40, GATES, name="gates"),
            Role("store", 1, 40, ("dv_full",), ("rows_free",), "dV out", ("tma_store",)),
            Role("sums", 1, 40, ("sums_full",), ("sums_free",), "dg, dbeta"),
        ),
        rings=grads.GRAD_RINGS,
        named={"own": Named(WARPGROUP_THREADS, copies=variant.panels)},
        tiles=grads.shared(variant),
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
    V, dtype = variant.V, variant.dtype
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    capacity, num_rows, num_tails = T.dynamic("capacity, num_rows, num_tails")
    num_owners, size = T.dynamic("num_owners, size")
    rows, value_rows = (num_tokens, num_heads, size), (num_tokens, num_heads, group)

    @T.prim_func
    def chunk_grads(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        v: strided("v", "token head r", (*value_rows, V), dtype),
        do: strided("do", "token head r", (*value_rows, V), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        h: T.Tensor((capacity, num_heads, group, V, size), dtype),
        ds: T.Tensor((capacity, num_heads, group, num_rows, size), dtype),
        tails: T.Tensor((num_tails, num_heads, group, PANEL, size), dtype),
        owner: T.Tensor((num_owners,), "int32"),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        dq: T.Tensor(rows, dtype),
        dk: T.Tensor(rows, dtype),
        dv: T.Tensor((*value_rows, V), dtype),
        dg: T.Tensor(value_rows, "float32"),
        dbeta: T.Tensor(value_rows, "float32"),
        scale: T.float32,
        walkers: T.int32,
        held: T.int32,  # dstate_chain's `held`: 0 or 1
    ):
        with T.Kernel(walkers, threads=plan.block) as first:
            # TileLang initialises the barriers by one thread of each row of the block. All of these
            # write the same values, before the first synchronisation of the block.
            T.import_source(tiles.SOURCE)
            s, ring = grads.allocate(plan)
            walk = ChunkWalk(chunks, first, walkers, num_chunks, num_heads, group)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < variant.panels:
                T.set_max_nreg(plan.role("panel").regs, 1)
                grads_panel.panel(dq, dk, s, ring, walk, variant.K, V)
            elif warpgroup == variant.panels:
                T.set_max_nreg(plan.role("score").regs, 1)
                score(s, ring, walk, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    gradients = grads.StateGradients(ds, dv, tails, owner, held)
                    grads.load(grads.GradInputs(q, k, v, do, A, h, gradients), s, ring, walk)
                elif tx < 64:
                    grads.gates(g_cum, beta, s.gate, ring.gate, walk, scale)
                    grads_out.clear_padding(
                        dq, dk, dv, dg, dbeta, walk, num_chunks[0], num_tokens, V
                    )
                elif tx < 96:
                    grads_out.store(dv, s.v, ring.dv, walk, V)
                else:
                    grads_out.sums(dg, dbeta, s.sums, ring.sums, walk, variant.K, V)

    return chunk_grads
