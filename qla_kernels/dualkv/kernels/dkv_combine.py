"""dkv_combine -- dK and dV of keys whose run of queries was cut into parts.

Per split (the keys of an item of bwd_dkv, up to 128 or 64) and key head, in the order of the parts:
    dK = sum over its parts of dK      dV likewise                                    [keys, D]

Steps (numbers appear again in the role):
    1 sum   8 numbers of each part into every thread, added in fp32
    2 sum   rounded once, out

Bounded by memory: 4 bytes read for each number of each part. Why this shape: each thread adds its
numbers in a fixed order, so results repeat bitwise; with atomics they would not. The code depends
on D only by the number of keys of a split.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.dualkv.shapes import (
    KEY_TILES,
    KV,
    SPLIT_COLUMNS,
    SPLIT_K0,
    SPLIT_KEYS,
    SPLIT_PART0,
    SPLIT_PARTS,
    SPLIT_ROWS,
)
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

SUM_PIECE = 8  # numbers of a thread: 16 bytes of the result


class Variant(NamedTuple):
    dtype: str  # of dk and dv
    wide: bool = False  # D is 256; else 64 or 128


VARIANTS = tuple(
    Variant(dtype, wide) for wide in (False, True) for dtype in ("bfloat16", "float16")
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows past the last key are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("sum", warps=8, regs=64, computes="dK, dV"),), ctas_per_sm=4)


@T.macro
def sum_parts(parts, grad, split, i, kv_head, which, at):
    r_sum = T.alloc_local((SUM_PIECE,), "float32")
    r_part = T.alloc_local((SUM_PIECE,), "float32")
    r_out = T.alloc_local((SUM_PIECE,), grad.dtype)
    pieces = grad.shape[2]
    key, piece, first, end, row = (T.alloc_var("int32") for _ in range(5))
    key = T.truncdiv(at, pieces)
    piece = at - key * pieces
    if key < split[i, SPLIT_KEYS]:
        for e in T.unroll(SUM_PIECE):
            r_sum[e] = 0
        first = clamped(split[i, SPLIT_PART0], 0, parts.shape[0])
        end = first + T.min(split[i, SPLIT_PARTS], parts.shape[0] - first)
        for part in rolled(first, end):
            for half in T.unroll(2):  # 1
                for e in T.vectorized(SUM_PIECE // 2):
                    r_part[half * (SUM_PIECE // 2) + e] = parts[
                        part, kv_head, which, key, piece, half * (SUM_PIECE // 2) + e
                    ]
            for e in T.unroll(SUM_PIECE):
                r_sum[e] += r_part[e]
        for e in T.unroll(SUM_PIECE):  # 2
            r_out[e] = r_sum[e]
        row = clamped(split[i, SPLIT_K0], 0, grad.shape[0]) + key
        if row < grad.shape[0]:
            for e in T.vectorized(SUM_PIECE):
                grad[row, kv_head, piece, e] = r_out[e]


def build(variant: Variant):
    plan, tile = schedule(variant), KEY_TILES[256 if variant.wide else 128][KV]
    num_tokens, kv_heads, num_parts = T.dynamic("num_tokens, kv_heads, num_parts")
    pieces, num_splits = T.dynamic("pieces, num_splits")

    @T.prim_func
    def dkv_combine(
        parts: T.Tensor((num_parts, kv_heads, 2, tile, pieces, SUM_PIECE), "float32"),
        header: T.Tensor((8,), "int32"),
        split: T.Tensor((num_splits, SPLIT_COLUMNS), "int32"),
        dk: T.Tensor((num_tokens, kv_heads, pieces, SUM_PIECE), variant.dtype),
        dv: T.Tensor((num_tokens, kv_heads, pieces, SUM_PIECE), variant.dtype),
    ):
        blocks = T.ceildiv(tile * pieces, plan.threads)
        with T.Kernel(blocks, kv_heads, num_splits, threads=plan.threads) as (block, kv_head, i):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            at = block * plan.threads + T.get_thread_binding()
            if i < header[SPLIT_ROWS]:
                for which, grad in enumerate((dk, dv)):
                    sum_parts(parts, grad, split, i, kv_head, which, at)

    return dkv_combine
