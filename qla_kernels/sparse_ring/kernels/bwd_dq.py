"""bwd_dq -- dQ from vertical and slash lines: one CTA per 128 query rows and query head.

Per block of 64 rows and 64 keys in which a row sees a key (walk.py finds blocks and masks):
    P   = exp2(scale2 Q K^T - lse2), 0 where a key is not seen      [64, 64]
    dS  = P (dO V^T - delta)
    dQ += scale dS K                                                [64, D], fp32

Steps (numbers appear again in the roles):
    1 load   Q and dO; K and V of every block that either half of the tile sees, then of the columns
    2 rows   S and dP of a step; P, dS; dQ
    3 rows   dQ, added to the dQ of earlier launches; the last launch rounds the sum

Bounded by the tensor cores, with three products a step, and for masks of single diagonals by L2, as
fwd, whose tiles and walk this kernel shares. Why this shape: dS is a left operand in the registers
where it was computed, so it does not pass through shared memory. Q stays in shared memory: in
registers it is not faster, and with D = 64 ptxas 13.0 assigned the registers of dS to it as well
(docs/lessons.md). A tile has one writer and a fixed order of sums in each
launch, and launches run one after the other.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.walk import (
    COLUMNS,
    END,
    HALVES,
    SEEN,
    TRIANGLE,
    VISIT,
    Mask,
    Queries,
    QueryTile,
    WalkTable,
    advance,
    query_tile,
    walk_columns,
    walk_end,
    walk_slashes,
)
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, v and do
    D: int

    @property
    def slots(self) -> int:
        """Slots of keys, and as many of values."""
        return 512 // self.D


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in (128, 64))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # tiles are whole
}


def schedule(variant: Variant) -> Schedule:
    queries = Tile((HALVES, BLOCK, variant.D), variant.dtype)
    keys = Tile((variant.slots, BLOCK, variant.D), variant.dtype)
    return Schedule(
        roles=(
            Role(
                "rows",
                warps=4 * HALVES,
                regs=224,
                waits=("q_full", "k_full", "v_full"),
                signals=("k_free", "v_free"),
                computes="P, dS, dQ",
                uses=("wgmma", "tma_store"),
            ),
            Role(
                "load",
                warps=1,
                regs=56,
                waits=("k_free", "v_free"),
                signals=("q_full", "k_full", "v_full"),
                computes="q, dO; k, v; what is seen of them",
                uses=("tma_load",),
            ),
            Role("spare", warps=3, regs=56, computes="fills the warpgroup"),
        ),
        rings={"q": 1, "k": variant.slots, "v": variant.slots},
        named={"meet": Named(WARPGROUP_THREADS, copies=HALVES)},  # the warps of a warpgroup
        tiles={
            "q": queries,
            "do": queries,  # at the end dQ
            "k": keys,
            "v": keys,
            "seen": Tile((variant.slots, HALVES, SEEN), "int32"),  # codes and masks
        },
    )


@T.macro
def load(queries, keys, gathered, mask, s, ring, x, columns):
    """Loads Q and dO, then makes the steps. `keys` are K and V, `gathered` those of columns."""
    q, do = queries.q, queries.do
    i0, row0, b, h, of_head, kv_head = x
    walked = T.alloc_local((2,), "int32")
    for w in T.unroll(HALVES):  # 1
        rows = slice(row0 + w * BLOCK, row0 + (w + 1) * BLOCK)
        T.tma_copy(q[b, rows, h, :], s.q[w, :, :], barrier=ring.q)
        T.tma_copy(do[b, rows, h, :], s.do[w, :, :], barrier=ring.q)
    T.barrier_arrive(ring.q)
    walked[0] = 0
    walked[1] = 0
    walk_slashes(s, ring, walked, mask, *keys, of_head, i0, b, kv_head)
    if columns != 0:
        walk_columns(s, ring, walked, mask, *gathered, of_head, i0)
    walk_end(s, ring, walked)


@T.macro
def hide(r_p, seen):
    if seen[0] == TRIANGLE:
        clear_hidden(r_p, lambda r, c: r < c)
    if seen[0] == COLUMNS:
        clear_hidden(
            r_p, lambda r, c: (T.if_then_else(c < 32, seen[1], seen[2]) >> c % 32) & 1 == 0
        )


@T.macro
def rows(queries, dq, out, s, ring, meet, x, scale, scale2, first, finish):
    lse2, delta, D, dtype = queries.lse2, queries.delta, dq.shape[2], out.dtype
    row0, b, h, q_rows = x.row0, x.b, x.h, lse2.shape[2]
    w = T.alloc_var("int32")
    w = T.shfl_sync(T.get_thread_binding(1), 0)
    row = row0 + w * BLOCK
    out0 = b * q_rows + row
    r_s = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_dp = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_ds = T.alloc_fragment((BLOCK, BLOCK), dtype)
    r_dq = T.alloc_fragment((BLOCK, D), "float32")
    r_dq16 = T.alloc_fragment((BLOCK, D), dtype)
    r_lse2 = T.alloc_fragment((BLOCK,), "float32")
    r_delta = T.alloc_fragment((BLOCK,), "float32")
    seen = T.alloc_local((SEEN,), "int32")
    at = T.alloc_local((1,), "int32")  # a step
    for r in T.Parallel(BLOCK):
        r_lse2[r] = lse2[b, h, row + r]
        r_delta[r] = delta[b, h, row + r]
    T.clear(r_dq)
    T.barrier_wait(ring.q, 0)
    at[0] = -1
    advance(s, ring, at, w, seen)
    while seen[0] != END:
        slot = ring.k.slot(at[0])
        # 2
        T.wgmma_gemm(s.q[w, :, :], s.k[slot, :, :], r_s, transpose_B=True, clear_accum=True)
        ring.v.wait(at[0])
        T.wgmma_gemm(s.do[w, :, :], s.v[slot, :, :], r_dp, transpose_B=True, clear_accum=True)
        T.wait_wgmma(1)
        probs_from_lse(r_s, lambda r, c: r_lse2[r], scale2)
        hide(r_s, seen)
        T.wait_wgmma(0)
        ring.v.release(at[0])
        ds_from_dp(r_dp, r_s, lambda r, c: r_delta[r])
        T.copy(r_dp, r_ds)
        T.wgmma_gemm(r_ds, s.k[slot, :, :], r_dq)
        T.wait_wgmma(0)
        ring.k.release(at[0])
        advance(s, ring, at, w, seen)
    for r, c in T.Parallel(BLOCK, D):
        r_dq[r, c] *= scale
    if first == 0:  # 3
        for r, c in T.Parallel(BLOCK, D):
            r_dq[r, c] += dq[out0 + r, h, c]
    if finish != 0:
        T.copy(r_dq, r_dq16)
        T.copy(r_dq16, s.do[w, :, :])
        T.fence_proxy_async()  # s_do: written by threads, read by the TMA store
        meet.sync(w)
        T.tma_copy(s.do[w, :, :], out[out0 : out0 + BLOCK, h, :])
        T.tma_store_wait(0)
    else:
        for r, c in T.Parallel(BLOCK, D):
            dq[out0 + r, h, c] = r_dq[r, c]


def build(variant: Variant):
    plan = schedule(variant)
    D = variant.D
    B, L, H, Hk, num_tiles = T.dynamic("B, L, H, Hk, num_tiles")
    buffers, chunk, num_visits = T.dynamic("buffers, chunk, num_visits")
    gathered, num_columns = T.dynamic("gathered, num_columns")
    heads, room, num_bounds, words = T.dynamic("heads, room, num_bounds, words")
    row_b, row_h = T.dynamic("row_b, row_h")
    dq_rows, out_rows = T.dynamic("dq_rows, out_rows")

    @T.prim_func
    def bwd_dq(
        q: strided("q", "b l h", (B, L, H, D), variant.dtype),
        do: strided("do", "b l h", (B, L, H, D), variant.dtype),
        lse2: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        delta: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        k: strided("k", "b l h", (buffers, chunk, Hk, D), variant.dtype),
        # V; `v` would sort before v_idx, and swap two parameters of the generated function
        values: strided("v", "b l h", (buffers, chunk, Hk, D), variant.dtype),
        k_columns: T.Tensor((heads, gathered, 1, D), variant.dtype),
        v_columns: T.Tensor((heads, gathered, 1, D), variant.dtype),
        entries: T.Tensor((heads, room), "int32"),
        bounds: T.Tensor((heads, num_bounds), "int32"),
        d_bits: T.Tensor((heads, words), "int32"),
        v_idx: T.Tensor((heads, num_columns), "int32"),
        visits: T.Tensor((num_visits, VISIT), "int32"),
        first_block: T.Tensor((num_tiles,), "int32"),
        dq: T.Tensor((dq_rows, H, D), "float32"),
        out: T.Tensor((out_rows, H, D), variant.dtype),
        gap: T.int32,
        stripe_blocks: T.int32,
        scale: T.float32,
        scale2: T.float32,  # scale log2(e)
        first: T.int32,
        columns: T.int32,
        finish: T.int32,
    ):
        with T.Kernel(B * H * num_tiles, threads=plan.block) as block:
            s, ring = tiles(plan), rings(plan)
            table = WalkTable(entries, bounds, gap, stripe_blocks, num_bounds - 1)
            queries = Queries(q, do, lse2, delta)
            x = QueryTile(*query_tile(block, H, Hk, first_block, d_bits, gap))

            if T.get_thread_binding(1) < HALVES:
                T.set_max_nreg(plan.role("rows").regs, 1)
                meet = NamedBarrier(plan, "meet")
                rows(queries, dq, out, s, ring, meet, x, scale, scale2, first, finish)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding(0) < 32:
                    keys, gathered = (k, values), (k_columns, v_columns)
                    mask = Mask(table, visits, d_bits, v_idx)
                    load(queries, keys, gathered, mask, s, ring, x, columns)

    return bwd_dq
