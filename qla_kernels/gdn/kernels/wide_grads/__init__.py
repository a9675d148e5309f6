"""wide_grads -- chunk_grads given V', Y and dV, for V in any number of tiles and K in parts.

The maths is that of chunk_grads, per chunk, key head and each of its value heads:
    dP   = dO V'^T                 dP0 = scale G o dP, on and below the diagonal [C, C]
    E    = -Y V'^T                 F = beta G o E, below the diagonal            [C, C]
    dQi  = scale e (dO S0^T)   dKi = d (V' dS^T)   dKu = -beta e (Y S0^T)        [C, K]
    dQ   = dQi + dP0 K                                    summed over the value heads
    dK   = dKi + dKu + dP0^T Q + (F + F^T) K              summed over the value heads
    dbeta_i  = <Y_i, v_i> - <K_i, e (Y S0^T)_i> + sum_j (G o E o K K^T)_ij
    X        = dP0 o Q K^T + F o K K^T, below the diagonal
    dgamma_i = <Q_i, dQi_i> + <K_i, dKu_i> + sum_j (X_ij - X_ji)
    dg_i     = sum_{j >= i} dgamma_j + sum_{j < i} <K_j, dKi_j> + e^gamma_last <dS, S0>
Given V' and Y, each column of K stands alone: columns of dQ and dK need the same columns of Q, K,
S0 and dS, and dg and dbeta are sums over columns of K (Q K^T and K K^T are, too). So a pass does
all of this with 128 columns, and adds its part of dg and dbeta to those of the passes before. At
K = 128, or fewer, there is one pass.

Steps (numbers appear again in the roles); a CTA walks over pairs of chunk and key head, within each
over the parts of K, and within each part over value heads and tiles of 64 columns of V:
     1 load    each tile as soon as its slot is released; rows past a chunk's end become zero
     2 gates   gamma, beta and their exponentials
     3 panel   dQi, dKi, dKu of 64 columns of K; <dS, S0>
     4 panel   in the last part: <Y, v>
     5 panel   after the last value head: dP0 K, dP0^T Q, (F + F^T) K; dQ and dK
     6 score   dP, dP0; E, F; X
     7 sums    dg, dbeta

Bounded by memory: 120 KB for 64 columns of V and 256 of K, half of it the two states. Why this
shape: chunk_grads computes W, V', dV' and Y again, with products over all of K. At K = 256 its
panels would take four warpgroups, which have no registers for that, and a CTA with one half of K
would have to load both halves of the states. wide_states and wide_dstate have V' and Y in registers
anyway; to write and to read them twice is 48 KB, less than the 64 KB of states
(docs/lessons.md). Parts follow each other in one CTA, so the second one finds dO,
V' and Y in L2, and dg and dbeta are added up by the thread that wrote them, in a fixed order. A
value head may have any number of tiles of V: dP and E are summed over them before anything else is
done to them, by the tensor cores. dP0 and F are made again in each part, because X is a sum over
both parts for each value head. With K = 128 and V = 192 chunk_grads would take three value heads of
64 columns and make dP, E and all that follows from them three times. Chunks come from a table that
chunk_table made, so they lie inside the tensors: see tables.py.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import BETA, GAMMA
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role
from qla_kernels.gdn.kernels.chunk_grads.layout import DO, KEY, PANEL, VN, P, Y, gates
from qla_kernels.gdn.kernels.chunk_grads.tiles import (
    add_scores,
    decay_scores,
    put_tiles,
    sum_scores,
)
from qla_kernels.gdn.kernels.wide_grads import layout as grads
from qla_kernels.gdn.kernels.wide_grads import panel as grads_panel
from qla_kernels.gdn.kernels.wide_grads import store as grads_out
from qla_kernels.gdn.kernels.wide_grads.layout import PART, PART_PANELS, PartInputs, PartWalk
from qla_kernels.gdn.kernels.wide_grads.part_tiles import SOURCE, park, take_back
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, free, full
from qla_kernels.tile.strided import strided


class Variant(NamedTuple):
    dtype: str  # of everything but gates, beta and their gradients
    K: int  # q and k have so many numbers or, of 128, fewer: `size`


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (256, 128))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warpgroups
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the table of chunks
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "panel",
                warps=4 * PART_PANELS,
                regs=160,
                waits=(*full("qk", "rows", "gate", "scores"), "dots_free"),
                signals=(*free("qk", "rows", "gate", "scores"), "dots_full"),
                computes="dQ, dK",
                uses=("wgmma", "tma_store"),
            ),
            Role(
                "score",
                warps=4,
                regs=152,
                waits=(*full("qk", "rows", "gate"), *free("scores", "x")),
                signals=(*free("rows", "gate"), *full("scores", "x")),
                computes="dP0, F, X",
                uses=("wgmma",),
            ),
            load_role(40, "q, k, v, dO, V', Y, S0, dS", "qk", "rows"),
            gate_role(40, GATES, name="gates"),
            Role("sums", 1, 40, full("dots", "x"), free("dots", "x"), "dg, dbeta"),
            Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings=grads.PART_RINGS,
        named={"own": Named(WARPGROUP_THREADS, copies=PART_PANELS + 1)},
        tiles=grads.shared(variant.dtype),
    )


@T.macro
def score(s, ring, walk, scale):
    """Makes dP and E of a value head in registers, over all of V, and then what follows from them.

    Four 64 x 64 matrices are all that registers hold: dP, E, and the sums of dP0 and F. So E waits
    in the tiles that will hold dP0 and F while dP, and the products of Q and K, are in use. Numbers
    of slots come from shuffles, so that no descriptors are kept in registers over the loops.
    """
    r_x = T.alloc_fragment((CHUNK, CHUNK), "float32")  # dP, then E
    r_e = T.alloc_fragment((CHUNK, CHUNK), "float32")
    r_other = T.alloc_fragment((CHUNK, CHUNK), "float32")  # Q K^T, then K K^T, of a part of K
    r_dp0 = T.alloc_local((32,), "float32")  # in accumulator registers, as F
    r_f = T.alloc_local((32,), "float32")
    step, head_step, slot = (T.alloc_var("int32") for _ in range(3))
    step = 0
    head_step = 0
    for i in T.serial(walk.num_pairs):
        ring.qk.wait(i)
        for e in T.unroll(32):
            r_dp0[e] = 0
            r_f[e] = 0
        for _ in T.serial(walk.group):
            T.clear(r_x)
            T.clear(r_e)
            for _ in rolled(walk.num_tiles):
                ring.rows.wait(step)
                slot = 3 * ring.rows.slot(T.shfl_sync(step, 0))
                T.wgmma_gemm(  # 6
                    s.tok[slot + DO, :, :], s.tok[slot + VN, :, :], r_x, transpose_B=True
                )
                T.wgmma_gemm(s.tok[slot + Y, :, :], s.tok[slot + VN, :, :], r_e, transpose_B=True)
                T.wait_wgmma(0)
                ring.rows.release(step)
                step += 1
            ring.scores.acquire(i)
            park(r_e, s.scores[P, 0, 0])
            ring.gate.wait(head_step)
            ring.x.acquire(head_step)
            gate = ring.gate.slot(head_step)
            for j in rolled(2):
                T.clear(r_other)  # so that it needs no registers before
                slot = 2 * ring.qk.slot(T.shfl_sync(i, 0))
                T.wgmma_gemm(  # of QUERY, then of KEY
                    s.qk[slot + j, :, :], s.qk[slot + KEY, :, :], r_other, transpose_B=True
                )
                decay_scores(r_x, s.gate[gate, GAMMA, 0], 1 - j)
                add_scores(r_dp0, r_f, r_x, j, scale, s.gate[gate, BETA, 0])
                T.wait_wgmma(0)
                sum_scores(
                    r_x, r_other, j, scale, s.gate[gate, BETA, 0],
                    s.x[ring.x.slot(head_step), grads.PART_X_ROWS + j, 0],
                    s.x[ring.x.slot(head_step), grads.PART_E_KK, 0],
                    s.x[ring.x.slot(head_step), grads.PART_X_COLUMNS + 4 * j, 0],
                )  # fmt: skip
                if j == 0:
                    take_back(r_x, s.scores[P, 0, 0])
            ring.x.commit(head_step)
            ring.gate.release(head_step)
            head_step += 1
        ring.own.sync(PART_PANELS)  # all threads have taken E back
        put_tiles(r_dp0, r_f, s.scores[P, 0, 0])
        T.fence_proxy_async()  # dP0 and F: written by threads, read by wgmma
        ring.scores.commit(i)


def build(variant: Variant):
    plan, K, dtype = schedule(variant), variant.K, variant.dtype
    num_tokens, num_heads, group = T.dynamic("num_tokens, num_heads, group")
    num_value_heads, num_tiles, V = T.dynamic("num_value_heads, num_tiles, V")
    capacity = T.dynamic("capacity")
    size = K if K == 256 else T.dynamic("size")
    rows, values = (num_tokens, num_heads, size), (num_tokens, num_value_heads, num_tiles, PANEL)
    states = capacity, num_value_heads, V, size
    tiles_of_values = capacity, num_value_heads, num_tiles, CHUNK, PANEL

    @T.prim_func
    def wide_grads(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        v: strided("v", "token head tile", values, dtype),
        do: strided("do", "token head tile", values, dtype),
        g_cum: T.Tensor((num_tokens, num_heads, group), "float32"),
        beta: T.Tensor((num_tokens, num_heads, group), "float32"),
        h: T.Tensor(states, dtype),
        vn: T.Tensor(tiles_of_values, dtype),
        ds: T.Tensor(states, dtype),
        y: T.Tensor(tiles_of_values, dtype),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        dq: T.Tensor(rows, dtype),
        dk: T.Tensor(rows, dtype),
        dv: T.Tensor(values, dtype),
        dg: T.Tensor((num_tokens, num_value_heads), "float32"),
        dbeta: T.Tensor((num_tokens, num_value_heads), "float32"),
        scale: T.float32,
        walkers: T.int32,
    ):
        with T.Kernel(walkers, threads=plan.block) as first:
            # TileLang initialises the barriers by one thread of each row of the block. All of these
            # write the same values, before the first synchronisation of the block.
            T.import_source(SOURCE)
            s, ring = grads.allocate(plan)
            walk = PartWalk(
                chunks, first, walkers, num_chunks, num_heads, group, num_tiles, K // PART
            )

            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < PART_PANELS:
                T.set_max_nreg(plan.role("panel").regs, 1)
                grads_panel.panel(dq, dk, s, ring, walk)
            elif warpgroup == PART_PANELS:
                T.set_max_nreg(plan.role("score").regs, 1)
                score(s, ring, walk, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    grads.load(q, k, PartInputs(v, do, vn, y, h, ds), s, ring, walk)
                elif tx < 64:
                    gates(g_cum, beta, s.gate, ring.gate, walk, scale)
                    grads_out.clear_padding(dq, dk, dv, dg, dbeta, walk, num_chunks[0], num_tokens)
                elif tx < 96:
                    grads_out.sums(dg, dbeta, s, ring, walk)

    return wide_grads
