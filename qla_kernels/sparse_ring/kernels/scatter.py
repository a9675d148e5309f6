"""scatter -- the gradients of the verticals in a chunk, added to those of the chunk.

Per row of the chunk, a token t, and KV head:
    dK[t] += sum over its query heads h, and slices s, of dKc[s, h, n] where v_idx[h, n] = t; so dV

Steps (numbers appear again in the role), for each query head in order:
    1 rows   lanes find the columns that their tokens are, by bisection
    2 rows   a warp adds what it found, row by row

Bounded by latency: few rows are columns, and what there is to read is found by chains of loads;
many small CTAs hide each other's. Why this shape: a row has one warp and its sum one order, so the
result is the same in every run. Where nothing is found, nothing is read or written.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.sparse_ring.walk import BLOCK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

TILE = 2 * BLOCK
WARPS = 8
WARP_ROWS = TILE // WARPS


class Variant(NamedTuple):
    D: int


VARIANTS = (Variant(128), Variant(64))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # bisection stays in the table


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(Role("rows", warps=WARPS, regs=40, computes="dK, dV"),),
        ctas_per_sm=6,
    )


@T.macro
def rows(dk, dv, v_idx, dkv, b, kv_head, row0, block, gap, group, D):
    thread = T.get_thread_binding()
    lane, first = thread % 32, thread // 32 * WARP_ROWS
    low, high, middle, token, of_head = (T.alloc_var("int32") for _ in range(5))
    r_sum = T.alloc_local((D // 32,), "float32")
    token = first + lane % WARP_ROWS
    token = (block + token // BLOCK * gap) * BLOCK + token % BLOCK
    for g in rolled(group):
        of_head = (b * dkv.shape[3] + kv_head) * group + g
        low = 0  # 1
        high = v_idx.shape[1]
        while low < high:
            middle = (low + high) // 2
            if v_idx[of_head, middle] < token:
                low = middle + 1
            else:
                high = middle
        if low < v_idx.shape[1]:
            if v_idx[of_head, low] != token:
                low = v_idx.shape[1]
        for y in rolled(WARP_ROWS):  # 2
            column = T.shfl_sync(low, y)
            if column < v_idx.shape[1]:
                for n, x in enumerate((dk, dv)):
                    for e in T.vectorized(D // 32):
                        r_sum[e] = dkv[n, b, row0 + first + y, kv_head, lane * (D // 32) + e]
                    for part in rolled(x.shape[0]):
                        for e in T.vectorized(D // 32):
                            r_sum[e] += x[part, of_head, column, lane * (D // 32) + e]
                    for e in T.vectorized(D // 32):
                        dkv[n, b, row0 + first + y, kv_head, lane * (D // 32) + e] = r_sum[e]


def build(v: Variant):
    plan = schedule(v)
    D = v.D
    slices, heads, room, num_columns = T.dynamic("slices, heads, room, num_columns")
    B, chunk, Hk, num_tiles = T.dynamic("B, chunk, Hk, num_tiles")

    @T.prim_func
    def scatter(
        dk: T.Tensor((slices, heads, room, D), "float32"),
        dv: T.Tensor((slices, heads, room, D), "float32"),
        v_idx: T.Tensor((heads, num_columns), "int32"),
        first_block: T.Tensor((num_tiles,), "int32"),
        dkv: T.Tensor((2, B, chunk, Hk, D), "float32"),
        gap: T.int32,
        group: T.int32,
    ):
        with T.Kernel(num_tiles, Hk, B, threads=plan.threads) as (tile, kv_head, b):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            row0, block = tile * TILE, first_block[tile]
            rows(dk, dv, v_idx, dkv, b, kv_head, row0, block, gap, group, D)

    return scatter.with_attr("global_symbol", f"sparse_ring_scatter_d{D}")
