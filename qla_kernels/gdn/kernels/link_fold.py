"""link_fold -- the state that enters each of a rank's stretches, from the links of other ranks.

For stretch s and each value head, with the links [b | M | signature] of its line, in that order:
    S = given[s] or 0;   S = S M + b for each link                                       [V, K]
    found[s] = S;   states[p] = S, p the segment that the sequence of s comes to
A link without the signature that its line expects makes S NaN. A stretch without a sequence from
elsewhere has an empty line; its state is `given` or 0, and goes to no segment. In reverse, S is the
gradient of the state that leaves, and p the segment that its sequence leaves from.

Steps (numbers appear again in the role); a thread has a column of S, of 16 rows of V:
    1  S to shared memory; no product where S is 0
    2  S M: rows of M from L2, eight at a time, S from shared memory
    3  add b, and compare signatures

Bounded by latency. Why this shape: links are fp32, and so are products and sums, which have one
order; no term is rounded to 16 bits. Folds are few: one for each stretch that a sequence passed.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

MOST_STRETCHES = 2  # of a rank
LINK_COLUMNS = 128  # the most that K may be
LINK_ROWS = 16  # rows of V that a CTA computes
LINK_AHEAD = 8  # rows of M that are loaded before they are used
LINE_FIELDS = 3  # of each link of a line: its rank, its stretch there, and its signature


class Variant(NamedTuple):
    dtype: str


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # written out: around the rows of S
    "tl.disable_safe_memory_legalize": True,  # segments and columns are guarded
}


def schedule(variant: Variant) -> Schedule:
    warps = LINK_COLUMNS // 32
    return Schedule(
        roles=(Role("fold", warps=warps, regs=128, computes="a column of S M + b"),),
        tiles={"x": Tile((LINK_COLUMNS, LINK_ROWS), "float32")},
    )


@T.macro
def multiply(links, s_x, r_x, rank, place, hv, column):
    r_m = T.alloc_local((LINK_AHEAD,), "float32")
    r_s = T.alloc_local((LINK_ROWS,), "float32")
    K = links.shape[4]
    V = links.shape[3] - 1 - K
    for i in rolled(K // LINK_AHEAD):
        for j in T.unroll(LINK_AHEAD):
            r_m[j] = links[rank, hv, place, V + i * LINK_AHEAD + j, column]
        for j in T.unroll(LINK_AHEAD):
            for v in T.vectorized(LINK_ROWS):
                r_s[v] = s_x[i * LINK_AHEAD + j, v]
            for v in T.unroll(LINK_ROWS):
                r_x[v] += r_s[v] * r_m[j]


@T.macro
def fold(links, lines, s_x, r_x, wrong, s, hv, v0, column):
    K = links.shape[4]
    rank, place = T.alloc_var("int32"), T.alloc_var("int32")
    for i in rolled(lines[s, 0]):
        rank = lines[s, 1 + LINE_FIELDS * i]
        place = lines[s, 2 + LINE_FIELDS * i]
        if i > 0:
            T.sync_threads()  # all have read the state before
            for v in T.unroll(LINK_ROWS):  # 1
                s_x[column, v] = r_x[v]
                r_x[v] = 0.0
            T.sync_threads()
            if column < K:  # 2
                multiply(links, s_x, r_x, rank, place, hv, column)
        if column < K:  # 3
            for v in T.unroll(LINK_ROWS):
                r_x[v] += links[rank, hv, place, v0 + v, column]
            if links[rank, hv, place, links.shape[3] - 1, column] != T.cast(
                lines[s, 3 + LINE_FIELDS * i], "float32"
            ):
                wrong[0] = 1


@T.macro
def place_state(first_segment, states, r_x, n, reverse, hv, v0, column):
    p, x = T.alloc_var("int32"), T.alloc_var("int32")
    capacity = states.shape[0]
    p = T.if_then_else(reverse != 0, first_segment[n + 1] - 2, first_segment[n] + 1)
    p = T.max(0, T.min(p, capacity - 1))
    if column < states.shape[3]:
        for v in T.unroll(LINK_ROWS):
            states[T.cast(p, "int64"), hv, v0 + v, column] = r_x[v]


def build(variant: Variant):
    plan = schedule(variant)
    num_value_heads, V, K = T.dynamic("num_value_heads, V, K")
    world, each, rows, stretches = T.dynamic("world, each, rows, stretches")
    num_given, num_found, fields = T.dynamic("num_given, num_found, fields")
    num_bounds, capacity, room = T.dynamic("num_bounds, capacity, room")

    @T.prim_func
    def link_fold(
        links: T.Tensor((world, num_value_heads, each, rows, K), variant.dtype),
        lines: T.Tensor((stretches, fields), "int32"),
        given: T.Tensor((num_given, num_value_heads, V, K), variant.dtype),
        first_segment: T.Tensor((num_bounds,), "int32"),
        found: T.Tensor((num_found, num_value_heads, V, K), variant.dtype),
        states: T.Tensor((capacity, num_value_heads, V, room), variant.dtype),
        front: T.int32,
        back: T.int32,
        reverse: T.int32,
    ):
        grid = (V // LINK_ROWS, num_value_heads, stretches)
        with T.Kernel(*grid, threads=plan.threads) as (tile, hv, stretch):
            s = tiles(plan)
            r_x = T.alloc_local((LINK_ROWS,), "float32")
            wrong = T.alloc_local((1,), "int32")
            n = T.alloc_var("int32")
            await_previous()
            column = T.get_thread_binding()
            v0 = tile * LINK_ROWS
            wrong[0] = 0
            for v in T.unroll(LINK_ROWS):
                r_x[v] = 0.0
            if (stretch < num_given) & (column < K):
                for v in T.unroll(LINK_ROWS):
                    r_x[v] = given[stretch, hv, v0 + v, column]
            fold(links, lines, s.x, r_x, wrong, stretch, hv, v0, column)
            if wrong[0] != 0:
                for v in T.unroll(LINK_ROWS):
                    r_x[v] = T.reinterpret(T.int32(0x7FC00000), "float32")
            if (stretch < num_found) & (column < K):
                for v in T.unroll(LINK_ROWS):
                    found[stretch, hv, v0 + v, column] = r_x[v]
            n = T.if_then_else(stretch == 0, front, back)
            if n >= 0:
                place_state(first_segment, states, r_x, n, reverse, hv, v0, column)

    return link_fold
