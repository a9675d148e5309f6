"""part_sums -- gradients of the gates and betas that a value head's parts share: sums over parts.

For row r, a value head of a token, of m parts:
    dg[r]    = ((dg'[r m] + dg'[r m + 1]) + ..) + dg'[r m + m - 1]                      []
    dbeta[r] = likewise

Steps (numbers appear again in the role); a thread owns one row:
    1 sum    one part after the other
    2 store  both

Bounded by the launch, and by memory where there are many rows: 8 m bytes are read of each. Why this
shape: a sum has one order, so that results repeat bit for bit. Rows are numbered in 64 bits.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

PART_WARPS = 8


class Variant(NamedTuple):
    dtype: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # rows past the last are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("sum", warps=PART_WARPS, regs=40, computes="dg, dbeta"),))


@T.macro
def add_up(dg, dbeta, dg_out, dbeta_out, row, parts):
    of_g, of_beta = T.alloc_var("float32"), T.alloc_var("float32")
    of_g = dg[row, 0]
    of_beta = dbeta[row, 0]
    for p in rolled(1, parts):  # 1
        of_g += dg[row, p]
        of_beta += dbeta[row, p]
    dg_out[row] = of_g  # 2
    dbeta_out[row] = of_beta


def build(variant: Variant):
    plan = schedule(variant)
    num_rows, parts = T.dynamic("num_rows, parts")

    @T.prim_func
    def part_sums(
        dg: T.Tensor((num_rows, parts), variant.dtype),
        dbeta: T.Tensor((num_rows, parts), variant.dtype),
        dg_out: T.Tensor((num_rows,), variant.dtype),
        dbeta_out: T.Tensor((num_rows,), variant.dtype),
    ):
        with T.Kernel(T.ceildiv(num_rows, plan.threads), threads=plan.threads) as block:
            await_previous()
            row = T.cast(block, "int64") * plan.threads + T.get_thread_binding()
            if row < num_rows:
                add_up(dg, dbeta, dg_out, dbeta_out, row, parts)

    return part_sums
