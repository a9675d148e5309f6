"""row_grads -- the gradients of logits, from one block of logits.

Per row, with x in base 2 and lse, entropy of row_sums, and the sums g, h over the row's targets:
    p = 2^(x - lse)        a = g + h entropy
    dz_j = ([j is a target] g_j - p_j (a + h ln 2 (x_j - lse))) slope (1 - (x_j / top2)^2)
where g_j is the sum over the targets j, and the last factor is 1 without a cap.

Steps (numbers appear again in the role), for a warp, which owns a row:
    1 rows   g and h: a target a lane, over the lanes in five exchanges
    2 rows   4 pieces of 4 logits into every lane; bias, cap and temperature make x of them
    3 rows   dz without targets, rounded once, out
    4 rows   dz of the columns that are targets, a target a lane, rounded once, over those of step 3

Bounded by memory: 4 bytes of each logit in, 2 or 4 of its gradient out.
Why this shape: that of row_sums. Most rows have one target and the first token after a prompt as
many as there are responses, so step 3 has no comparison with targets. Lanes whose targets are equal
write the same bits.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.head.kernels.columns import LEAST, SPAN, load_columns, one_column
from qla_kernels.head.shapes import COLUMNS, PIECE
from qla_kernels.tile.constants import LN2
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

GRAD_WARPS = 8  # rows of a CTA
GRAD_AHEAD = 4  # pieces of a lane on their way


class Variant(NamedTuple):
    dtype: str  # of dz


VARIANTS = (Variant("bfloat16"), Variant("float16"), Variant("float32"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # rows, columns and targets are guarded
}


def schedule(variant: Variant) -> Schedule:
    role = Role("rows", warps=GRAD_WARPS, regs=64, computes="dz")
    return Schedule(roles=(role,), ctas_per_sm=4)


@T.macro
def turn(r_x, r_dz, lse, a, b, slope, bend):
    """Sets r_dz[0] to the gradient of the column with x = r_x[0], to which r_dz[0] is added."""
    r_x[1] = r_x[0] - lse
    r_dz[0] = r_dz[0] - T.exp2(r_x[1]) * (a + b * T.max(r_x[1], LEAST))
    r_dz[0] = r_dz[0] * slope
    if bend != 0:
        r_dz[0] = r_dz[0] * (1.0 - r_x[0] * r_x[0] * bend)


@T.macro
def rows(
    logits, bias, targets, first, lse2, entropy, dlog_p, dentropy, dz, row, num_columns, column0,
    flags, top2, curve, slope, bend,
):  # fmt: skip
    lane = T.get_thread_binding() % 32
    r_x = T.alloc_local((GRAD_AHEAD, PIECE), "float32")
    r_out = T.alloc_local((PIECE,), dz.dtype)
    r_z = T.alloc_local((2,), "float32")
    r_dz = T.alloc_local((1,), "float32")
    r_sum = T.alloc_local((2,), "float32")
    target, column, begin, end = (T.alloc_var("int32") for _ in range(4))
    lse, a, b = (T.alloc_var("float32") for _ in range(3))
    begin = first[row]  # 1
    end = first[row + 1]
    r_sum[0] = 0.0
    r_sum[1] = 0.0
    for i in rolled(T.ceildiv(end - begin, 32)):
        target = begin + i * 32 + lane
        if target < end:
            r_sum[0] += dlog_p[target]
            r_sum[1] += dentropy[target]
    for i in T.unroll(5):
        for e in T.unroll(2):
            r_sum[e] += T.shfl_xor(r_sum[e], 1 << i)
    lse = lse2[row]
    a = r_sum[0] + r_sum[1] * entropy[row]
    b = r_sum[1] * LN2
    for step in rolled(T.ceildiv(num_columns, SPAN * GRAD_AHEAD)):
        load_columns(
            logits, bias, r_x, row, step * SPAN * GRAD_AHEAD, num_columns, flags, top2, curve
        )  # 2
        for i in T.unroll(GRAD_AHEAD):  # 3
            column = (step * GRAD_AHEAD + i) * SPAN + lane * PIECE
            for e in T.unroll(PIECE):
                r_z[0] = r_x[i, e]
                r_dz[0] = 0.0
                turn(r_z, r_dz, lse, a, b, slope, bend)
                r_out[e] = r_dz[0]
            if column < num_columns:  # columns past the last are those of a piece: nobody reads
                for e in T.vectorized(PIECE):
                    dz[row, T.truncdiv(column, PIECE), e] = r_out[e]
    T.sync_warp()  # the columns of targets are there, and may be written again
    for i in rolled(T.ceildiv(end - begin, 32)):  # 4
        target = begin + i * 32 + lane
        if target < end:
            column = targets[target] - column0
            if (column >= 0) & (column < num_columns):
                r_dz[0] = 0.0
                for other in rolled(end - begin):
                    if targets[begin + other] == targets[target]:
                        r_dz[0] += dlog_p[begin + other]
                one_column(logits, bias, r_z, row, column, flags, top2, curve)
                turn(r_z, r_dz, lse, a, b, slope, bend)
                dz[row, T.truncdiv(column, PIECE), column % PIECE] = r_dz[0]


def build(variant: Variant):
    plan = schedule(variant)
    num_rows, num_firsts, num_targets, width = T.dynamic("num_rows, num_firsts, num_targets, width")

    @T.prim_func
    def row_grads(
        logits: T.Tensor((num_rows, COLUMNS // PIECE, PIECE), "float32"),
        bias: T.Tensor((width,), "float32"),  # of the block's columns
        targets: T.Tensor((num_targets,), "int32"),  # of all rows, ascending by row
        first: T.Tensor((num_firsts,), "int32"),  # of each row, then of the row after the last
        lse2: T.Tensor((num_rows,), "float32"),
        entropy: T.Tensor((num_rows,), "float32"),
        dlog_p: T.Tensor((num_targets,), "float32"),
        dentropy: T.Tensor((num_targets,), "float32"),  # of a row: the sum over its targets
        dz: T.Tensor((num_rows, COLUMNS // PIECE, PIECE), variant.dtype),
        num_columns: T.int32,
        column0: T.int32,  # the block's first column
        flags: T.int32,
        top2: T.float32,
        curve: T.float32,
        slope: T.float32,
        bend: T.float32,  # 1 / top2^2, or 0 without a cap
    ):
        with T.Kernel(T.ceildiv(num_rows, GRAD_WARPS), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            row = block * GRAD_WARPS + T.get_thread_binding() // 32
            if row < num_rows:
                rows(
                    logits, bias, targets, first, lse2, entropy, dlog_p, dentropy, dz, row,
                    num_columns, column0, flags, top2, curve, slope, bend,
                )  # fmt: skip

    return row_grads
