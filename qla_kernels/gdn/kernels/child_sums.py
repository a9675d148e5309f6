"""child_sums -- adds the gradients of the states that siblings start from to their parent's.

A run has the children r = first .. first + count - 1 of one parent, whose row is `row`:
    into[row] = ((into[row] + x[first]) + x[first + 1]) + ..                        [HV K V] fp32

Steps (numbers appear again in the role); a CTA owns 1024 numbers of one run, a thread four:
    1 load   the next 8 children
    2 sum    one after the other

Bounded by bandwidth. Why this shape: a sum has one order, that of the children, so that results
repeat bit for bit. 8 loads in flight hide their latency where a parent has few numbers or many
children. Rows are numbered in 64 bits: a thousand states of 32 heads have 2^29 numbers.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

CHILD_WARPS = 8
CHILD_PIECE = 4  # numbers that a thread reads in one access
CHILDREN_AHEAD = 8  # children that are loaded before they are added


class Variant(NamedTuple):
    dtype: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # children and numbers are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("sum", warps=CHILD_WARPS, regs=80, computes="sums of a run"),))


@T.macro
def add_up(x, into, first, row, count, piece):
    r_sum = T.alloc_local((CHILD_PIECE,), into.dtype)
    r_ahead = T.alloc_local((CHILDREN_AHEAD, CHILD_PIECE), x.dtype)
    for e in T.vectorized(CHILD_PIECE):
        r_sum[e] = into[row, piece, e]
    for step in rolled(T.ceildiv(count, CHILDREN_AHEAD)):
        for i in T.unroll(CHILDREN_AHEAD):  # 1
            child = step * CHILDREN_AHEAD + i
            if child < count:
                for e in T.vectorized(CHILD_PIECE):
                    r_ahead[i, e] = x[T.cast(first + child, "int64"), piece, e]
        for i in T.unroll(CHILDREN_AHEAD):  # 2
            if step * CHILDREN_AHEAD + i < count:
                for e in T.unroll(CHILD_PIECE):
                    r_sum[e] += r_ahead[i, e]
    for e in T.vectorized(CHILD_PIECE):
        into[row, piece, e] = r_sum[e]


def build(variant: Variant):
    plan = schedule(variant)
    num_children, num_rows, num_runs = T.dynamic("num_children, num_rows, num_runs")
    num_pieces = T.dynamic("num_pieces")

    @T.prim_func
    def child_sums(
        x: T.Tensor((num_children, num_pieces, CHILD_PIECE), variant.dtype),
        runs: T.Tensor((num_runs, 3), "int32"),
        into: T.Tensor((num_rows, num_pieces, CHILD_PIECE), variant.dtype),
    ):
        grid = (T.ceildiv(num_pieces, plan.threads), num_runs)
        with T.Kernel(*grid, threads=plan.threads) as (span, run):
            first, count = T.alloc_var("int32"), T.alloc_var("int32")
            row = T.alloc_var("int64")
            await_previous()
            first = runs[run, 0]
            row = T.cast(runs[run, 1], "int64")
            count = runs[run, 2]
            piece = span * plan.threads + T.get_thread_binding()
            if piece < num_pieces:
                add_up(x, into, first, row, count, piece)

    return child_sums
