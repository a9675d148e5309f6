"""repeat_gates -- gates, betas and A of each value head, once for each part of its columns of V.

For row r, a value head of a token, and each part p of m:
    gates'[r m + p], betas'[r m + p], A'[r m + p] = gates[r], betas[r], A[r]      [], [], [C]

Steps (numbers appear again in the role); a thread owns 8 numbers of a row of A:
    1 load   its piece of A; the first thread of a row loads the gate and the beta
    2 store  each part's

Bounded by memory: 136 bytes are read, and 136 m written, for a value head of a token. Why this
shape: one launch for the three tensors, which are small beside what chunk_grads reads. Rows are
numbered in 64 bits: a million tokens of 64 heads have 2^32 numbers of A.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

REPEAT_WARPS = 8
REPEAT_PIECE = 8  # numbers of A that a thread moves at once: 16 bytes
ROW_PIECES = CHUNK // REPEAT_PIECE


class Variant(NamedTuple):
    dtype: str  # of A


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # rows past the last are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("copy", warps=REPEAT_WARPS, regs=40, computes="each part's row"),))


@T.macro
def copy(g, beta, A, g_out, beta_out, A_out, row, piece, parts):
    r_a = T.alloc_local((REPEAT_PIECE,), A.dtype)
    level, strength = T.alloc_var("float32"), T.alloc_var("float32")
    for e in T.vectorized(REPEAT_PIECE):  # 1
        r_a[e] = A[row, piece, e]
    level = 0.0
    strength = 0.0
    if piece == 0:
        level = g[row]
        strength = beta[row]
    for p in rolled(parts):  # 2
        for e in T.vectorized(REPEAT_PIECE):
            A_out[row, p, piece, e] = r_a[e]
        if piece == 0:
            g_out[row, p] = level
            beta_out[row, p] = strength


def build(variant: Variant):
    plan = schedule(variant)
    num_rows, parts = T.dynamic("num_rows, parts")

    @T.prim_func
    def repeat_gates(
        g: T.Tensor((num_rows,), "float32"),
        beta: T.Tensor((num_rows,), "float32"),
        A: T.Tensor((num_rows, ROW_PIECES, REPEAT_PIECE), variant.dtype),
        g_out: T.Tensor((num_rows, parts), "float32"),
        beta_out: T.Tensor((num_rows, parts), "float32"),
        A_out: T.Tensor((num_rows, parts, ROW_PIECES, REPEAT_PIECE), variant.dtype),
    ):
        with T.Kernel(
            T.ceildiv(num_rows, plan.threads // ROW_PIECES), threads=plan.threads
        ) as block:
            await_previous()
            thread = T.get_thread_binding()
            row = T.cast(block, "int64") * (plan.threads // ROW_PIECES) + thread // ROW_PIECES
            if row < num_rows:
                copy(g, beta, A, g_out, beta_out, A_out, row, thread % ROW_PIECES, parts)

    return repeat_gates
