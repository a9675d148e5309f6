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
    Steps,
    WalkTable,
    advance,
    first_block_of,
    walk_columns,
    walk_end,
    walk_slashes,
)
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse


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
        rings={"k": variant.slots, "v": variant.slots},
        named={"meet": Named(WARPGROUP_THREADS, copies=HALVES)},  # the warps of a warpgroup
        # q; dO, whose place dQ takes at the end; k and v; codes; barriers and alignment
        smem_bytes=(2 * HALVES + 2 * variant.slots) * BLOCK * variant.D * 2
        + variant.slots * HALVES * SEEN * 4
        + 1024,
    )


@T.macro
def load(
    q, do, k, v, k_columns, v_columns, table, d_bits, v_idx, visits, s_q, s_do, q_full, steps,
    i0, row0, b, h, of_head, kv_head, columns,
):  # fmt: skip
    walked = T.alloc_local((2,), "int32")
    for w in T.unroll(HALVES):  # 1
        rows = slice(row0 + w * BLOCK, row0 + (w + 1) * BLOCK)
        T.tma_copy(q[b, rows, h, :], s_q[w, :, :], barrier=q_full)
        T.tma_copy(do[b, rows, h, :], s_do[w, :, :], barrier=q_full)
    T.barrier_arrive(q_full)
    walked[0] = 0
    walked[1] = 0
    walk_slashes(steps, walked, table, visits, k, v, of_head, i0, b, kv_head)
    if columns != 0:
        walk_columns(steps, walked, v_idx, d_bits, k_columns, v_columns, of_head, i0, table.gap)
    walk_end(steps, walked)


@T.macro
def hide(r_p, seen):
    if seen[0] == TRIANGLE:
        clear_hidden(r_p, lambda r, c: r < c)
    if seen[0] == COLUMNS:
        clear_hidden(
            r_p, lambda r, c: (T.if_then_else(c < 32, seen[1], seen[2]) >> c % 32) & 1 == 0
        )


@T.macro
def rows(
    lse2, delta, dq, out, s_q, s_do, q_full, steps, row0, q_rows, b, h,
    scale, scale2, first, finish, meet, variant,
):  # fmt: skip
    w = T.alloc_var("int32")
    w = T.shfl_sync(T.get_thread_binding(1), 0)
    row = row0 + w * BLOCK
    out0 = b * q_rows + row
    r_s = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_dp = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_ds = T.alloc_fragment((BLOCK, BLOCK), variant.dtype)
    r_dq = T.alloc_fragment((BLOCK, variant.D), "float32")
    r_dq16 = T.alloc_fragment((BLOCK, variant.D), variant.dtype)
    r_lse2 = T.alloc_fragment((BLOCK,), "float32")
    r_delta = T.alloc_fragment((BLOCK,), "float32")
    seen = T.alloc_local((SEEN,), "int32")
    at = T.alloc_local((1,), "int32")  # a step
    for r in T.Parallel(BLOCK):
        r_lse2[r] = lse2[b, h, row + r]
        r_delta[r] = delta[b, h, row + r]
    T.clear(r_dq)
    T.barrier_wait(q_full, 0)
    at[0] = -1
    advance(steps, at, w, seen)
    while seen[0] != END:
        slot = steps.k.slot(at[0])
        # 2
        T.wgmma_gemm(s_q[w, :, :], steps.s_k[slot, :, :], r_s, transpose_B=True, clear_accum=True)
        steps.v.wait(at[0])
        T.wgmma_gemm(s_do[w, :, :], steps.s_v[slot, :, :], r_dp, transpose_B=True, clear_accum=True)
        T.wait_wgmma(1)
        probs_from_lse(r_s, lambda r, c: r_lse2[r], scale2)
        hide(r_s, seen)
        T.wait_wgmma(0)
        steps.v.release(at[0])
        ds_from_dp(r_dp, r_s, lambda r, c: r_delta[r])
        T.copy(r_dp, r_ds)
        T.wgmma_gemm(r_ds, steps.s_k[slot, :, :], r_dq)
        T.wait_wgmma(0)
        steps.k.release(at[0])
        advance(steps, at, w, seen)
    for r, c in T.Parallel(BLOCK, variant.D):
        r_dq[r, c] *= scale
    if first == 0:  # 3
        for r, c in T.Parallel(BLOCK, variant.D):
            r_dq[r, c] += dq[out0 + r, h, c]
    if finish != 0:
        T.copy(r_dq, r_dq16)
        T.copy(r_dq16, s_do[w, :, :])
        T.fence_proxy_async()  # s_do: written by threads, read by the TMA store
        meet.sync(w)
        T.tma_copy(s_do[w, :, :], out[out0 : out0 + BLOCK, h, :])
        T.tma_store_wait(0)
    else:
        for r, c in T.Parallel(BLOCK, variant.D):
            dq[out0 + r, h, c] = r_dq[r, c]


def build(variant: Variant):
    plan = schedule(variant)
    D, slots = variant.D, variant.slots
    B, L, H, Hk, num_tiles = T.dynamic("B, L, H, Hk, num_tiles")
    buffers, chunk, num_visits = T.dynamic("buffers, chunk, num_visits")
    gathered, num_columns = T.dynamic("gathered, num_columns")
    heads, room, num_bounds, words = T.dynamic("heads, room, num_bounds, words")
    q_b, q_l, q_h = T.dynamic("q_b, q_l, q_h")
    do_b, do_l, do_h = T.dynamic("do_b, do_l, do_h")
    k_b, k_l, k_h = T.dynamic("k_b, k_l, k_h")
    v_b, v_l, v_h = T.dynamic("v_b, v_l, v_h")
    row_b, row_h = T.dynamic("row_b, row_h")
    dq_rows, out_rows = T.dynamic("dq_rows, out_rows")

    @T.prim_func
    def bwd_dq(
        q: T.StridedTensor((B, L, H, D), (q_b, q_l, q_h, 1), variant.dtype),
        do: T.StridedTensor((B, L, H, D), (do_b, do_l, do_h, 1), variant.dtype),
        lse2: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        delta: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        k: T.StridedTensor((buffers, chunk, Hk, D), (k_b, k_l, k_h, 1), variant.dtype),
        # V; `v` would sort before v_idx, and swap two parameters of the generated function
        values: T.StridedTensor((buffers, chunk, Hk, D), (v_b, v_l, v_h, 1), variant.dtype),
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
            s_q = T.alloc_shared((HALVES, BLOCK, D), variant.dtype)
            s_do = T.alloc_shared((HALVES, BLOCK, D), variant.dtype)
            s_k = T.alloc_shared((slots, BLOCK, D), variant.dtype)
            s_v = T.alloc_shared((slots, BLOCK, D), variant.dtype)
            s_seen = T.alloc_shared((slots, HALVES, SEEN), "int32")
            q_full = T.alloc_barrier(plan.arrivals("q_full"))
            k_full = T.alloc_barrier([plan.arrivals("k_full")] * slots)
            k_free = T.alloc_barrier([plan.arrivals("k_free")] * slots)
            v_full = T.alloc_barrier([plan.arrivals("v_full")] * slots)
            v_free = T.alloc_barrier([plan.arrivals("v_free")] * slots)
            steps = Steps(
                s_k, s_v, s_seen, Ring(k_full, k_free, slots), Ring(v_full, v_free, slots)
            )
            table = WalkTable(entries, bounds, gap, stripe_blocks, num_bounds - 1)

            # Heads of a group are adjacent, so keys and values stay in L2; long tiles come first.
            group, kv_head, tile = (T.alloc_var("int32") for _ in range(3))
            b, h, i0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            group = H // Hk
            tile = num_tiles - 1 - block // group % num_tiles
            kv_head = block // group // num_tiles % Hk
            b = block // group // num_tiles // Hk
            h = kv_head * group + block % group
            i0 = first_block_of(first_block, tile, d_bits, gap)

            if T.get_thread_binding(1) < HALVES:
                T.set_max_nreg(plan.role("rows").regs, 1)
                rows(
                    lse2, delta, dq, out, s_q, s_do, q_full, steps, tile * TILE, L, b, h,
                    scale, scale2, first, finish, NamedBarrier(plan, "meet"), variant,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding(0) < 32:
                    load(
                        q, do, k, values, k_columns, v_columns, table, d_bits, v_idx, visits,
                        s_q, s_do, q_full, steps, i0, tile * TILE, b, h, b * H + h, kv_head,
                        columns,
                    )  # fmt: skip

    return bwd_dq
