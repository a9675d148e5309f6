"""bwd_dkv_columns -- dK and dV of the verticals' keys, from all later queries of a rank.

A CTA has one query head, a tile of 128 columns, and one slice of the rank's blocks of 64 queries
behind the tile's first column: every n-th block if there are n slices. Per half, with keys as rows,
S^T and dP^T are [64, 64]:
    P^T  = exp2(scale log2(e) K Q^T - lse2), 0 where a slash covers the column, and in its own block
    dS^T = P^T (V dO^T - delta)
    dV  += P^T dO        dK += scale dS^T Q          [64, D], fp32

Steps (numbers appear again in the roles):
    1 load   K and V of the tile, from the rows that `gather_columns` gathered
    2 load   Q, dO, lse2 and delta, block by block
    3 keep   a mask of the columns that the block sees: d = block - column's block > 0, d not in D
    4 grads  S^T and dP^T; P^T; dS^T; dV, dK
    5 grads  dK and dV of this slice

Bounded by the tensor cores, as bwd_dkv; see dkv_parts.py. Columns are few, and each meets all later
queries, so the queries are cut into slices to make enough CTAs. Slices are interleaved: they have
equal work, and CTAs that run at the same time read neighbouring queries. Each slice writes sums of
its own, and `scatter` adds them in order.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels import dkv_parts
from qla_kernels.sparse_ring.kernels.walk import COLUMNS, END, HALVES, SEEN, UNSEEN, WHOLE, Queries
from qla_kernels.sparse_ring.shapes import BLOCK, TILE, WORD
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, WARPGROUP_THREADS, Role, Schedule
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

Variant, VARIANTS, PASS_CONFIGS = dkv_parts.Variant, dkv_parts.VARIANTS, dkv_parts.PASS_CONFIGS

WORDS = TILE // WORD  # words of a mask with one bit for each column of a tile
LOG2_BLOCK, LOG2_WORD = 6, 5
BEHIND_ALL_BLOCKS = 1 << 24  # a block number behind all blocks


def schedule(variant: Variant) -> Schedule:
    return dkv_parts.schedule(
        variant,
        SEEN,
        Role(
            "load",
            warps=1,
            regs=24,
            waits=("q_free",),
            signals=(("keys_full", ONE), ("q_full", ONE)),
            computes="k, v; q, dO, lse2, delta",
            uses=("tma_load",),
        ),
        Role(
            "keep",
            warps=1,
            regs=24,
            waits=("q_free",),
            signals=("q_full",),
            computes="which columns a block sees",
        ),
        Role("spare", warps=2, regs=24, computes="fills the warpgroup"),
    )


class ColumnWalk(NamedTuple):
    """The `count` local blocks start, start + step, ... of a slice."""

    start: Any
    step: Any
    count: Any


@T.macro
def load(x, k, v, s, ring, b, head, col0, walk):
    dkv_parts.load_keys(k, v, s, ring, b * x.q.shape[2] + head, col0, 0)  # 1
    for i in rolled(walk.count):
        row = (walk.start + i * walk.step) * BLOCK
        dkv_parts.put_queries(x, s, ring, i, b, row, head)  # 2
        if T.shuffle_elect(32):
            ring.q.commit(i)
    ring.q.acquire(walk.count)
    if T.shuffle_elect(32):
        ring.q.commit(walk.count)


@T.macro
def keep(first_block, v_idx, d_bits, s, ring, of_head, col0, gap, walk):
    lane = T.get_thread_binding() % 32
    local, ahead, d, what = (T.alloc_var("int32") for _ in range(4))
    at = T.alloc_local((WORDS,), "int32")  # the blocks of this lane's columns
    seen = T.alloc_local((WORDS,), "int32")
    for n in T.unroll(WORDS):
        at[n] = BEHIND_ALL_BLOCKS
        if col0 + n * WORD + lane < v_idx.shape[1]:
            at[n] = T.max(v_idx[of_head, col0 + n * WORD + lane], 0) >> LOG2_BLOCK
    for i in rolled(walk.count):
        if i % 32 == 0:
            local = walk.start + T.min(i + lane, walk.count - 1) * walk.step
            ahead = first_block[local >> 1] + (local & 1) * gap
            ahead = clamped(ahead, 0, d_bits.shape[1] * WORD - 1)
        for n in T.unroll(WORDS):  # 3
            d = T.shfl_sync(ahead, i % 32) - at[n]
            seen[n] = 0
            if d > 0:
                seen[n] = ~(d_bits[of_head, d >> LOG2_WORD] >> (d & (WORD - 1))) & 1
            seen[n] = T.cast(T.ballot(seen[n]), "int32")
        low = T.if_then_else(lane % 2 == 0, seen[0], seen[2])
        high = T.if_then_else(lane % 2 == 0, seen[1], seen[3])
        what = COLUMNS
        if (low | high) == 0:
            what = UNSEEN
        if (low & high) == -1:
            what = WHOLE
        ring.q.acquire(i)
        dkv_parts.put_seen(s, ring, i, what, low, high)
    ring.q.acquire(walk.count)
    dkv_parts.put_seen(s, ring, walk.count, END)


class ColumnTile(NamedTuple):
    """The tile of columns of a CTA."""

    part: Any  # the slice of queries that it meets
    of_head: Any
    col0: Any


@T.macro
def gradients(dk, dv, s, ring, w, columns, live, scale, scale2, variant):
    part, of_head, col0 = columns
    r_dk = T.alloc_fragment((BLOCK, variant.D), "float32")
    r_dv = T.alloc_fragment((BLOCK, variant.D), "float32")
    dkv_parts.gradients(s, ring, w, r_dk, r_dv, scale, scale2, variant)  # 4
    column = col0 + w * BLOCK
    if live:  # 5
        for key, e in T.Parallel(BLOCK, variant.D):
            dk[part, of_head, column + key, e] = r_dk[key, e]
            dv[part, of_head, column + key, e] = r_dv[key, e]


def build(variant: Variant):
    plan = schedule(variant)
    D = variant.D
    B, L, H, num_tiles = T.dynamic("B, L, H, num_tiles")
    heads, num_columns, words = T.dynamic("heads, num_columns, words")
    slices, room = T.dynamic("slices, room")  # room for columns: whole tiles
    row_b, row_h = T.dynamic("row_b, row_h")

    @T.prim_func
    def bwd_dkv_columns(
        q: strided("q", "b l h", (B, L, H, D), variant.dtype),
        do: strided("do", "b l h", (B, L, H, D), variant.dtype),
        lse2: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        delta: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        k: T.Tensor((heads, num_columns, 1, D), variant.dtype),
        # V; `v` would sort before v_idx, and swap two parameters of the generated function
        values: T.Tensor((heads, num_columns, 1, D), variant.dtype),
        d_bits: T.Tensor((heads, words), "int32"),
        v_idx: T.Tensor((heads, num_columns), "int32"),
        first_block: T.Tensor((num_tiles,), "int32"),
        dk: T.Tensor((slices, heads, room, D), "float32"),
        dv: T.Tensor((slices, heads, room, D), "float32"),
        gap: T.int32,
        tokens: T.int32,
        scale: T.float32,
        scale2: T.float32,  # scale log2(e)
    ):
        threads = (WARPGROUP_THREADS, plan.threads // WARPGROUP_THREADS)
        # the long tiles of all heads come first
        with T.Kernel(slices, heads, room // TILE, threads=threads) as (part, of_head, tile):
            s, ring = tiles(plan), rings(plan)
            col0 = tile * TILE
            tx, w = T.get_thread_binding(0), T.get_thread_binding(1)
            if w < HALVES:
                T.set_max_nreg(plan.role("grads").regs, 1)
                live = v_idx[of_head, col0] < tokens
                columns = ColumnTile(part, of_head, col0)
                gradients(dk, dv, s, ring, w, columns, live, scale, scale2, variant)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                low, high, middle = (T.alloc_var("int32") for _ in range(3))
                column = v_idx[of_head, col0] // BLOCK
                low = 0
                high = HALVES * num_tiles
                while low < high:  # the first local block behind the first column
                    middle = (low + high) // 2
                    if first_block[middle // HALVES] + middle % HALVES * gap > column:
                        high = middle
                    else:
                        low = middle + 1
                low += (part - low % slices + slices) % slices
                high = T.max(0, T.ceildiv(HALVES * num_tiles - low, slices))
                walk = ColumnWalk(low, slices, high)
                if tx < 32:
                    x = Queries(q, do, lse2, delta)
                    load(x, k, values, s, ring, of_head // H, of_head % H, col0, walk)
                elif tx < 64:
                    keep(first_block, v_idx, d_bits, s, ring, of_head, col0, gap, walk)

    return bwd_dkv_columns
