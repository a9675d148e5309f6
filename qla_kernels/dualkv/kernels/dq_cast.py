"""dq_cast -- the gradients of queries, from the sums that bwd has made of them.

Per query row (one head of one token):
    dQ = scale sum                                                                [D]

Steps (numbers appear again in the role):
    1 rows   16 numbers of a sum into every thread
    2 rows   scaled, rounded, in the order of dQ's columns, out

Bounded by memory: 6 bytes a number. Why this shape: bwd stores a row of sums in the order in which
its threads hold dQ. This kernel reads the sums anyway, so it restores the order of the columns. The
permutation stays within blocks of 16 columns, apart from the exchange of neighbouring blocks in
every other token.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.schedule import Role, Schedule

CAST_PIECE = 16  # columns of a thread
QUAD = 4  # threads of bwd that held a piece, each with two pairs of adjacent columns
CAST_PIECES = (8, QUAD, QUAD)  # a row of sums: pieces, threads, numbers


class Variant(NamedTuple):
    dtype: str  # of dq


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows past the last are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("rows", warps=8, regs=40, computes="dQ"),), ctas_per_sm=6)


@T.macro
def rows(sums, dq, dtype, at, scale):
    num_heads, num_tokens, pieces = sums.shape[0], sums.shape[1], CAST_PIECES[0]
    r_sum = T.alloc_local((QUAD, QUAD), "float32")
    r_out = T.alloc_local((CAST_PIECE,), dtype)
    row, piece, head, token = (T.alloc_var("int32") for _ in range(4))
    row = at // pieces
    piece = at % pieces
    head = T.truncdiv(row, num_tokens)
    token = row - head * num_tokens
    if head < num_heads:
        for q in T.unroll(QUAD):  # 1
            for e in T.vectorized(QUAD):
                r_sum[q, e] = sums[head, token, piece ^ token & 1, q, e]
        for e in T.unroll(CAST_PIECE):  # 2
            r_out[e] = r_sum[e % 8 // 2, e // 8 * 2 + e % 2] * scale
        for half in T.unroll(2):
            for e in T.vectorized(CAST_PIECE // 2):
                dq[token, head, piece, half * (CAST_PIECE // 2) + e] = r_out[
                    half * (CAST_PIECE // 2) + e
                ]


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, num_heads = T.dynamic("num_tokens, num_heads")

    @T.prim_func
    def dq_cast(
        sums: T.Tensor((num_heads, num_tokens, *CAST_PIECES), "float32"),
        dq: T.Tensor((num_tokens, num_heads, CAST_PIECES[0], CAST_PIECE), variant.dtype),
        scale: T.float32,
    ):
        blocks = T.ceildiv(num_heads * num_tokens * CAST_PIECES[0], plan.threads)
        with T.Kernel(blocks, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            rows(sums, dq, variant.dtype, block * plan.threads + T.get_thread_binding(), scale)

    return dq_cast
