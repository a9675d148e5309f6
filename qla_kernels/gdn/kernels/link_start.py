"""link_start -- what segment_scan folds into the links of a rank's stretches.

For each segment p of sequence n, where n is the one that leaves a stretch, [V + K, K] a value head:
    states[p] = [0 | I]         for the segment that n comes to, if it comes from another stretch
    states[p] = [left[p] | 0]   for others
`left` has b of the maps, or the gradients of segment_map_bwd. I follows M alone through the folds,
so that V + K columns become those of the link: b, and the map of the state that comes.

Steps (numbers appear again in the role); a thread owns four numbers of a row:
    1  is p a segment of such a sequence?
    2  copy left, or write 0 or I

Bounded by memory. Why this shape: the rows of a sequence are known on the GPU alone. Segments are
an axis of the grid, and most leave at once where a batch has other sequences.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.link_fold import MOST_STRETCHES
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

START_WARPS = 8
START_PIECE = 4  # numbers that a thread moves at once: 16 bytes


class Variant(NamedTuple):
    dtype: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # segments and numbers are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("start", warps=START_WARPS, regs=40, computes="numbers of a row"),))


@T.macro
def start(left, states, p, hv, row, piece, enters):
    r_x = T.alloc_local((START_PIECE,), left.dtype)
    V = left.shape[2]
    if (row < V) & (enters == 0):  # 2
        for e in T.vectorized(START_PIECE):
            r_x[e] = left[p, hv, row, piece, e]
    else:
        for e in T.unroll(START_PIECE):
            on_diagonal = (row - V == piece * START_PIECE + e) & (enters != 0)
            r_x[e] = T.if_then_else(on_diagonal, 1.0, 0.0)
    for e in T.vectorized(START_PIECE):
        states[p, hv, row, piece, e] = r_x[e]


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, capacity, num_value_heads = T.dynamic("num_bounds, capacity, num_value_heads")
    V, rows, pieces = T.dynamic("V, rows, pieces")

    @T.prim_func
    def link_start(
        left: T.Tensor((capacity, num_value_heads, V, pieces, START_PIECE), variant.dtype),
        first_segment: T.Tensor((num_bounds,), "int32"),
        states: T.Tensor((capacity, num_value_heads, rows, pieces, START_PIECE), variant.dtype),
        front: T.int32,
        back: T.int32,
        through: T.int32,
        reverse: T.int32,
    ):
        with T.Kernel(
            capacity, num_value_heads, T.ceildiv(rows * pieces, plan.threads), threads=plan.threads
        ) as (segment, hv, part):
            n, first, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            its = T.alloc_var("int32")
            await_previous()
            number = part * plan.threads + T.get_thread_binding()
            for i in T.unroll(MOST_STRETCHES):
                n = T.if_then_else(i == 0, front, back)
                if n >= 0:  # 1
                    first = first_segment[n]
                    last = first_segment[n + 1] - 1
                    its = T.if_then_else(reverse != 0, last - 1, T.min(first + 1, capacity - 1))
                    enters = T.if_then_else(segment == its, through >> i & 1, 0)
                    if (first <= segment) & (segment <= last) & (number < rows * pieces):
                        start(
                            left, states, T.cast(segment, "int64"), hv, number // pieces,
                            number % pieces, enters,
                        )  # fmt: skip

    return link_start
