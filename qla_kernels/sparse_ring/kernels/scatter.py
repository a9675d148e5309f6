"""scatter -- adds the gradients of verticals to dK and dV of the chunks that hold the verticals.

For each row of a chunk, with token t, and each KV head:
    dK[t] += sum over the query heads h of the KV head, and over slices s, of dKc[s, h, n], where
             v_idx[h, n] = t; the same for dV

Steps (numbers appear again in the role), for each query head in order:
    1 rows   a lane finds the first column of its head in the 16 rows of the warp, by bisection
    2 rows   the warp adds the gradients of the columns in these rows, head by head

Bounded by latency: few rows are columns, and finding them takes chains of dependent loads. The
chains of a warp's heads run in parallel, one in each lane, and many small CTAs hide each other's
latency. Why this shape: a row belongs to one warp, and its sum has one order, so the result is the
same in every run. A warp without columns in its rows reads and writes no gradients. A version with
a lane for each row, one head after the other, took 131 us instead of 73.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

SCATTER_WARPS = 8
WARP_ROWS = TILE // SCATTER_WARPS


class Variant(NamedTuple):
    D: int


VARIANTS = (Variant(128), Variant(64))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # bisection stays in the table


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("rows", warps=SCATTER_WARPS, regs=48, computes="dK, dV"),),
        ctas_per_sm=5,
    )


@T.macro
def rows(dk, dv, v_idx, dkv, chunk, b, kv_head, row0, block, gap, group):
    D = dkv.shape[5]
    thread = T.get_thread_binding()
    lane, first = thread % 32, thread // 32 * WARP_ROWS
    low, high, middle, token, end = (T.alloc_var("int32") for _ in range(5))
    of_head, column, first_column, at = (T.alloc_var("int32") for _ in range(4))
    r_sum = T.alloc_local((2, D // 32), "float32")
    token = (block + first // BLOCK * gap) * BLOCK + first % BLOCK
    end = token + WARP_ROWS
    for g in rolled(T.ceildiv(group, 32)):
        of_head = (b * dkv.shape[4] + kv_head) * group + T.min(g * 32 + lane, group - 1)
        low = 0  # 1
        high = v_idx.shape[1]
        while low < high:
            middle = (low + high) // 2
            if v_idx[of_head, middle] < token:
                low = middle + 1
            else:
                high = middle
        first_column = end
        if low < v_idx.shape[1]:
            first_column = v_idx[of_head, low]
        for y in rolled(T.min(group - g * 32, 32)):  # 2
            head = T.shfl_sync(of_head, y)
            column = T.shfl_sync(low, y)
            at = T.shfl_sync(first_column, y)
            while (token <= at) & (at < end):  # columns ascend
                row = row0 + first + at - token
                for n in T.unroll(2):
                    for e in T.vectorized(D // 32):
                        r_sum[n, e] = dkv[chunk, n, b, row, kv_head, lane * (D // 32) + e]
                for part in rolled(dk.shape[0]):
                    for n, x in enumerate((dk, dv)):
                        for e in T.vectorized(D // 32):
                            r_sum[n, e] += x[part, head, column, lane * (D // 32) + e]
                for n in T.unroll(2):
                    for e in T.vectorized(D // 32):
                        dkv[chunk, n, b, row, kv_head, lane * (D // 32) + e] = r_sum[n, e]
                column += 1
                at = end
                if column < v_idx.shape[1]:
                    at = v_idx[head, column]


def build(variant: Variant):
    plan = schedule(variant)
    D = variant.D
    slices, heads, room, num_columns = T.dynamic("slices, heads, room, num_columns")
    B, Hk, num_chunks, chunk_rows, num_tiles = T.dynamic("B, Hk, num_chunks, chunk_rows, num_tiles")

    @T.prim_func
    def scatter(
        dk: T.Tensor((slices, heads, room, D), "float32"),
        dv: T.Tensor((slices, heads, room, D), "float32"),
        v_idx: T.Tensor((heads, num_columns), "int32"),
        first_block: T.Tensor((num_chunks, num_tiles), "int32"),
        dkv: T.Tensor((num_chunks, 2, B, chunk_rows, Hk, D), "float32"),
        gap: T.int32,
        group: T.int32,
    ):
        with T.Kernel(num_chunks * num_tiles, Hk, B, threads=plan.threads) as (at, kv_head, b):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            chunk, tile = at // num_tiles, at % num_tiles
            row0, block = tile * TILE, first_block[chunk, tile]
            rows(dk, dv, v_idx, dkv, chunk, b, kv_head, row0, block, gap, group)

    return scatter
