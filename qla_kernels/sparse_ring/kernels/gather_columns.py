"""gather_columns -- the keys and values of a head's columns, from chunks, in the order of v_idx.

    columns[h, n] = k[row of v_idx[h, n]], if that row is in one of the chunks

Block j of the sequence is in a chunk if a visit's range holds it and, with stripes, if the chunk
has its stripe: the owner of stripe x is at distance (rank - x) mod buckets, which is the visit's
bucket. The block's row in the chunk is computed as in walk.py. Places of columns in other chunks
keep their contents; places behind the last column become 0.

Bounded by memory: every read is one row of 256 B (D = 128). A warp copies a row, 8 B a lane at a
time, so one kernel serves every 16-bit type and every head size.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.walk import VISIT
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.strided import strided

COPY_WARPS = 8
CTA_COLUMNS = 64  # columns of a CTA
IN_OTHER_CHUNK = -2  # instead of a row: the column is in another chunk
NONE = -1  # there is no column


class Variant(NamedTuple):
    dtype: str = "int64"  # four elements


VARIANTS = (Variant(),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by num_columns


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("copy", warps=COPY_WARPS, regs=64, computes="rows of k and v"),))


def build(variant: Variant):
    plan = schedule(variant)
    slots, chunk, Hk, words, num_visits = T.dynamic("slots, chunk, Hk, words, num_visits")
    B, H, num_columns = T.dynamic("B, H, num_columns")

    @T.prim_func
    def gather_columns(
        k: strided("k", "b l h", (slots, chunk, Hk, words), variant.dtype),
        v: strided("v", "b l h", (slots, chunk, Hk, words), variant.dtype),
        v_idx: T.Tensor((B, H, num_columns), "int32"),
        visits: T.Tensor((num_visits, VISIT), "int32"),
        k_columns: T.Tensor((B, H, num_columns, words), variant.dtype),
        v_columns: T.Tensor((B, H, num_columns, words), variant.dtype),
        num_blocks: T.int32,
        stripe_blocks: T.int32,
        buckets: T.int32,
        rank: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_columns, CTA_COLUMNS), H, B, threads=plan.threads) as (
            tile,
            h,
            b,
        ):
            lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
            column, block, row, slot = (T.alloc_var("int32") for _ in range(4))
            for n in rolled(CTA_COLUMNS // COPY_WARPS):
                column = tile * CTA_COLUMNS + n * COPY_WARPS + warp
                row = IN_OTHER_CHUNK
                if column < num_columns:
                    block = v_idx[b, h, column] // BLOCK
                    if block >= num_blocks:
                        row = NONE
                    else:
                        for i in rolled(num_visits):
                            inside = block - visits[i, 2]
                            away = rank - block // stripe_blocks - visits[i, 1]  # of its owner
                            if (0 <= inside) & (block < visits[i, 3]) & (away % buckets == 0):
                                turn = inside // (stripe_blocks * buckets)
                                row = turn * stripe_blocks + inside % stripe_blocks + visits[i, 4]
                                row = row * BLOCK + v_idx[b, h, column] % BLOCK
                                row = clamped(row, 0, chunk - 1)
                                slot = clamped(visits[i, 0] + b, 0, slots - 1)
                if row != IN_OTHER_CHUNK:
                    for e in rolled(T.ceildiv(words, 32)):
                        if e * 32 + lane < words:
                            for to, x in ((k_columns, k), (v_columns, v)):
                                to[b, h, column, e * 32 + lane] = T.if_then_else(
                                    row == NONE,
                                    T.int64(0),
                                    x[slot, row, h // (H // Hk), e * 32 + lane],
                                )

    return gather_columns
