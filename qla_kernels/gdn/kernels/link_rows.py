"""link_rows -- the links of a rank's stretches as they are sent to the other ranks.

For stretch s, whose link leaves with sequence n, and each value head, [V + K + 1, K]:
    links[s] = [states[p][: V + K, : K] | signature of s],   p the segment that n leaves from
    links[s] = [0 | signature of s], if none leaves

Steps (numbers appear again in the role); a thread owns a number of a link:
    1  find the segment
    2  its number, 0, or the signature

Bounded by the launch. Why this shape: segments are known on the GPU alone, and one launch sets down
all that a rank sends. Of K columns of states, which may have more, all are those of the call.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

ROWS_WARPS = 8


class Variant(NamedTuple):
    dtype: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # segments and numbers are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(roles=(Role("send", warps=ROWS_WARPS, regs=40, computes="a number"),))


@T.macro
def send(first_segment, states, links, n, signature, reverse, hv, s, row, column):
    p, x = T.alloc_var("int32"), T.alloc_var("float32")
    capacity = states.shape[0]
    x = signature
    if row < links.shape[2] - 1:
        x = 0.0
        if n >= 0:
            p = T.if_then_else(reverse != 0, first_segment[n], first_segment[n + 1] - 1)  # 1
            p = T.max(0, T.min(p, capacity - 1))
            x = states[T.cast(p, "int64"), hv, row, column]
    links[hv, s, row, column] = x  # 2


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, capacity, num_value_heads = T.dynamic("num_bounds, capacity, num_value_heads")
    stretches, rows, columns = T.dynamic("stretches, rows, columns")
    room_rows, room = T.dynamic("room_rows, room")

    @T.prim_func
    def link_rows(
        first_segment: T.Tensor((num_bounds,), "int32"),
        states: T.Tensor((capacity, num_value_heads, room_rows, room), variant.dtype),
        links: T.Tensor((num_value_heads, stretches, rows, columns), variant.dtype),
        front: T.int32,
        back: T.int32,
        signature_front: T.float32,
        signature_back: T.float32,
        reverse: T.int32,
    ):
        grid = (T.ceildiv(rows * columns, plan.threads), num_value_heads, stretches)
        with T.Kernel(*grid, threads=plan.threads) as (part, hv, s):
            await_previous()
            number = part * plan.threads + T.get_thread_binding()
            if number < rows * columns:
                send(
                    first_segment, states, links, T.if_then_else(s == 0, front, back),
                    T.if_then_else(s == 0, signature_front, signature_back), reverse, hv, s,
                    number // columns, number % columns,
                )  # fmt: skip

    return link_rows
