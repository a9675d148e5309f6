"""round_sums -- rounds the sums of dK and dV of a rank's chunk to 16 bits.

Per number:
    dK = sums[0]        dV = sums[1]

Steps (numbers appear again in the role); a CTA of 256 threads owns 2048 numbers of dK or of dV:
    1 numbers   8 sums into every thread
    2 numbers   rounded, 16 bytes out

Bounded by memory: 6 bytes a number. Why this shape: loads and stores of 16 bytes a thread, and
enough threads to hide their latency. One launch writes both tensors: neither a cast by torch, of
which there would be two, nor a copy into one tensor. Places are numbered in 64 bits: a million
tokens of 16 heads of 128 have 2^31 numbers.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.schedule import Role, Schedule

ROUND_PIECE = 8  # numbers of a thread: 16 bytes of the result


class Variant(NamedTuple):
    dtype: str  # of dk and dv


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # pieces past the last are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("numbers", warps=8, regs=32, computes="dK, dV"),), ctas_per_sm=8)


@T.macro
def numbers(sums, grad, which, piece):
    r_sum = T.alloc_local((ROUND_PIECE,), "float32")
    r_out = T.alloc_local((ROUND_PIECE,), grad.dtype)
    for half in T.unroll(2):  # 1
        for e in T.vectorized(ROUND_PIECE // 2):
            r_sum[half * (ROUND_PIECE // 2) + e] = sums[which, piece, half * (ROUND_PIECE // 2) + e]
    for e in T.unroll(ROUND_PIECE):  # 2
        r_out[e] = r_sum[e]
    for e in T.vectorized(ROUND_PIECE):
        grad[piece, e] = r_out[e]


def build(variant: Variant):
    plan = schedule(variant)
    num_pieces = T.dynamic("num_pieces")

    @T.prim_func
    def round_sums(
        sums: T.Tensor((2, num_pieces, ROUND_PIECE), "float32"),
        dk: T.Tensor((num_pieces, ROUND_PIECE), variant.dtype),
        dv: T.Tensor((num_pieces, ROUND_PIECE), variant.dtype),
    ):
        with T.Kernel(T.ceildiv(num_pieces, plan.threads), 2, threads=plan.threads) as (block, of):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            piece = T.alloc_var("int64")
            piece = T.cast(block, "int64") * plan.threads + T.get_thread_binding()
            if piece < num_pieces:
                for which, grad in enumerate((dk, dv)):
                    if of == which:
                        numbers(sums, grad, which, piece)

    return round_sums
