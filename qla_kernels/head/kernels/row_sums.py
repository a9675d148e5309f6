"""row_sums -- the softmax of each row, over one block of the vocabulary after the other.

Per row, over the columns of all blocks so far, in base 2:
    m = max x        s = sum 2^(x - m)        d = sum (x - m) 2^(x - m)
and after the last block
    lse = m + log2 s        entropy = ln 2 (log2 s - d / s)        log p_t = ln 2 (x_t - lse)

Steps (numbers appear again in the role), for a warp, which owns a row:
    1 rows   8 pieces of 4 logits into every lane; bias, cap and temperature make x of them
    2 rows   their maximum, then s and d in the old and the new columns
    3 rows   over the lanes, in five exchanges
    4 rows   with the blocks before, from `state`
    5 rows   x of the row's targets in this block; after the last block, the results

Bounded by memory: each logit is read once, 16 bytes a lane at a time.
Why this shape: a row's sums stay in a warp, so threads hand each other nothing through shared
memory. d counts from the maximum: the entropy of a row that is nearly certain is a small number,
which a difference of two large ones would not keep.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.head.kernels.columns import LEAST, NOTHING, SPAN, load_columns, one_column
from qla_kernels.head.shapes import COLUMNS, FIRST, LAST, PIECE
from qla_kernels.tile.constants import LN2
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

ROW_WARPS = 8  # rows of a CTA
ROW_AHEAD = 8  # pieces of a lane on their way
STATE = 4  # numbers of a row between blocks: m, s, d, nothing


class Variant(NamedTuple):
    logits: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows, columns and targets are guarded
}


def schedule(variant: Variant) -> Schedule:
    role = Role("rows", warps=ROW_WARPS, regs=64, computes="m, s, d; lse, entropy, log p")
    return Schedule(roles=(role,), ctas_per_sm=4)


@T.macro
def merge(r_sum, m, s, d):
    """Adds (m, s, d), sums of other columns, to those in r_sum."""
    r_top = T.alloc_local((3,), "float32")
    r_top[0] = T.max(r_sum[0], m)
    r_top[1] = T.exp2(r_sum[0] - r_top[0])
    r_top[2] = T.exp2(m - r_top[0])
    r_sum[2] = r_top[1] * (r_sum[2] + (r_sum[0] - r_top[0]) * r_sum[1]) + r_top[2] * (
        d + (m - r_top[0]) * s
    )
    r_sum[1] = r_top[1] * r_sum[1] + r_top[2] * s
    r_sum[0] = r_top[0]


@T.macro
def add_columns(r_x, r_sum):
    """Adds a lane's columns to its sums."""
    r_new = T.alloc_local((4,), "float32")  # maximum, s, d, distance
    r_e = T.alloc_local((1,), "float32")
    r_new[0] = r_sum[0]
    for i in T.unroll(r_x.shape[0]):
        for e in T.unroll(PIECE):
            r_new[0] = T.max(r_new[0], r_x[i, e])
    r_new[1] = 0.0
    r_new[2] = 0.0
    for i in T.unroll(r_x.shape[0]):
        for e in T.unroll(PIECE):
            r_new[3] = r_x[i, e] - r_new[0]
            r_e[0] = T.exp2(r_new[3])
            r_new[1] += r_e[0]
            r_new[2] += r_e[0] * T.max(r_new[3], LEAST)
    merge(r_sum, r_new[0], r_new[1], r_new[2])


@T.macro
def rows(
    logits, bias, targets, first, state, log_p, lse2, entropy, row, num_columns, column0, flags,
    top2, curve,
):  # fmt: skip
    lane = T.get_thread_binding() % 32
    r_x = T.alloc_local((ROW_AHEAD, PIECE), "float32")
    r_sum = T.alloc_local((3,), "float32")
    r_of = T.alloc_local((3,), "float32")  # another lane's, or the blocks before
    r_z = T.alloc_local((1,), "float32")
    target, column, end = (T.alloc_var("int32") for _ in range(3))
    r_sum[0] = NOTHING
    r_sum[1] = 0.0
    r_sum[2] = 0.0
    for step in rolled(T.ceildiv(num_columns, SPAN * ROW_AHEAD)):
        load_columns(
            logits, bias, r_x, row, step * SPAN * ROW_AHEAD, num_columns, flags, top2, curve
        )  # 1
        add_columns(r_x, r_sum)  # 2
    for i in T.unroll(5):  # 3
        for e in T.unroll(3):
            r_of[e] = T.shfl_xor(r_sum[e], 1 << i)
        merge(r_sum, r_of[0], r_of[1], r_of[2])
    if (flags & FIRST) == 0:  # 4
        for e in T.unroll(3):
            r_of[e] = state[row, e]
        merge(r_sum, r_of[0], r_of[1], r_of[2])
    T.sync_warp()  # all lanes have read the state
    r_of[0] = r_sum[0] + T.log2(r_sum[1])  # lse
    if lane == 0:
        for e in T.unroll(3):
            state[row, e] = r_sum[e]
        if (flags & LAST) != 0:
            lse2[row] = r_of[0]
            entropy[row] = LN2 * (T.log2(r_sum[1]) - r_sum[2] / r_sum[1])
    end = first[row + 1]  # 5
    for i in rolled(T.ceildiv(end - first[row], 32)):
        target = first[row] + i * 32 + lane
        if target < end:
            column = targets[target] - column0
            if (column >= 0) & (column < num_columns):
                one_column(logits, bias, r_z, row, column, flags, top2, curve)
                log_p[target] = r_z[0]
            if (flags & LAST) != 0:
                log_p[target] = LN2 * (log_p[target] - r_of[0])


def build(variant: Variant):
    plan = schedule(variant)
    num_rows, num_firsts, num_targets, width = T.dynamic("num_rows, num_firsts, num_targets, width")

    @T.prim_func
    def row_sums(
        logits: T.Tensor((num_rows, COLUMNS // PIECE, PIECE), variant.logits),
        bias: T.Tensor((width,), "float32"),  # of the block's columns
        targets: T.Tensor((num_targets,), "int32"),  # of all rows, ascending by row
        first: T.Tensor((num_firsts,), "int32"),  # of each row, then of the row after the last
        state: T.Tensor((num_rows, STATE), "float32"),
        log_p: T.Tensor((num_targets,), "float32"),  # x of targets until the last block
        lse2: T.Tensor((num_rows,), "float32"),
        entropy: T.Tensor((num_rows,), "float32"),
        num_columns: T.int32,
        column0: T.int32,  # the block's first column
        flags: T.int32,
        top2: T.float32,
        curve: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROW_WARPS), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            row = block * ROW_WARPS + T.get_thread_binding() // 32
            if row < num_rows:
                rows(
                    logits, bias, targets, first, state, log_p, lse2, entropy, row, num_columns,
                    column0, flags, top2, curve,
                )  # fmt: skip

    return row_sums
