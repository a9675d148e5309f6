"""wide_scan -- segment_scan at K = 256: the state that enters each segment, from b and M.

One CTA per sequence, value head and 16 columns of V. The first segment starts from h0 or 0. If the
segment before another one is warm or first, `states` already has the state that enters. If the
segment before it, p, is cold, `states` has b_p, and this kernel computes
    S_{p+1} = M_p S_p + b_p                                                        [K, 16]

`states` are transposed, [V, K], and so are `maps`, [columns of M, rows]; all are fp32, and so are
products and sums.

Steps (numbers appear again in the code); a thread has four rows of S, and a quarter of K:
    1  S_p to shared memory, where threads do not have it from the fold before
    2  a quarter of M S: rows of M^T from L2, eight at a time, S from shared memory
    3  add up the quarters, and b

Bounded by reading M, 256 KB in each CTA, and by the threads' products, which take about as long.
Why this shape: a fold in two terms of 16 bits, as segment_scan has it, would read as many bytes,
keep them in shared memory in panels, and need barriers and a ring; folds are few, because only
segments of cold heads have one, and their walk takes longer. Threads with four rows read S once
for 64 products, and a thread's quarter of K leaves no warp without work. The sums have one order.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

SCAN_COLUMNS = 16  # columns of S that a CTA computes
SCAN_QUARTERS = 4  # parts of K in the sum of a row
FOLD_ROWS = 4  # rows of S that a thread computes a part of
FOLD_AHEAD = 8  # rows of M^T that are loaded before they are used


class Variant(NamedTuple):
    K: int


VARIANTS = (Variant(256),)

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # threads synchronise where they exchange numbers
    "tl.disable_safe_memory_legalize": True,  # every index is one of a segment that there is
}


def schedule(variant: Variant) -> Schedule:
    K = variant.K
    return Schedule(
        roles=(Role("fold", warps=K // 32, regs=224, computes="M S + b"),),  # a thread a row of S
        tiles={
            "s": Tile((K, SCAN_COLUMNS), "float32"),
            "parts": Tile((SCAN_QUARTERS, SCAN_COLUMNS, K // FOLD_ROWS, FOLD_ROWS), "float32"),
        },
    )


@T.macro
def read_map(maps, p, hv, column, row, r_m):
    """Reads FOLD_AHEAD columns of M, the same FOLD_ROWS rows of each; `row` counts these."""
    for j in T.unroll(FOLD_AHEAD):
        for e in T.vectorized(FOLD_ROWS):
            r_m[j, e] = maps[p, hv, column + j, row, e]


@T.macro
def multiply(r_m, s_s, column, r_sum):
    r_s = T.alloc_local((SCAN_COLUMNS,), "float32")
    for j in T.unroll(FOLD_AHEAD):
        for c in T.vectorized(SCAN_COLUMNS):
            r_s[c] = s_s[column + j, c]
        for c in T.unroll(SCAN_COLUMNS):
            for e in T.unroll(FOLD_ROWS):
                r_sum[c, e] += r_m[j, e] * r_s[c]


@T.macro
def fold(K, states, maps, s, p, hv, v0, known):
    """Computes the state that enters segment p + 1; `known` says whether s.s has that of p."""
    thread = T.get_thread_binding()
    r_m = T.alloc_local((FOLD_AHEAD, FOLD_ROWS), "float32")
    r_next = T.alloc_local((FOLD_AHEAD, FOLD_ROWS), "float32")
    r_sum = T.alloc_local((SCAN_COLUMNS, FOLD_ROWS), "float32")
    r_b = T.alloc_local((SCAN_COLUMNS,), "float32")
    first, row = T.alloc_var("int32"), T.alloc_var("int32")
    first = thread // (K // FOLD_ROWS) * (K // SCAN_QUARTERS)
    row = thread % (K // FOLD_ROWS)
    read_map(maps, p, hv, first, row, r_m)
    for c in T.unroll(SCAN_COLUMNS):
        r_b[c] = states[p + 1, hv, v0 + c, thread]
    if known == 0:
        for c in T.unroll(SCAN_COLUMNS):  # 1
            s.s[thread, c] = states[p, hv, v0 + c, thread]
    for c in T.unroll(SCAN_COLUMNS):
        for e in T.unroll(FOLD_ROWS):
            r_sum[c, e] = 0.0
    T.sync_threads()
    for i in rolled(K // SCAN_QUARTERS // FOLD_AHEAD):  # 2
        after = T.min(i + 1, K // SCAN_QUARTERS // FOLD_AHEAD - 1)  # the last is read twice, unused
        read_map(maps, p, hv, first + after * FOLD_AHEAD, row, r_next)
        multiply(r_m, s.s, first + i * FOLD_AHEAD, r_sum)
        for j in T.unroll(FOLD_AHEAD):
            for e in T.unroll(FOLD_ROWS):
                r_m[j, e] = r_next[j, e]
    for c in T.unroll(SCAN_COLUMNS):
        for e in T.vectorized(FOLD_ROWS):
            s.parts[first // (K // SCAN_QUARTERS), c, row, e] = r_sum[c, e]
    T.sync_threads()
    for c in T.unroll(SCAN_COLUMNS):  # 3
        for part in T.unroll(SCAN_QUARTERS):
            r_b[c] += s.parts[part, c, thread // FOLD_ROWS, thread % FOLD_ROWS]
        states[p + 1, hv, v0 + c, thread] = r_b[c]
        s.s[thread, c] = r_b[c]


def build(variant: Variant):
    plan = schedule(variant)
    K = variant.K
    num_value_heads, V = T.dynamic("num_value_heads, V")
    num_bounds, capacity, num_h0 = T.dynamic("num_bounds, capacity, num_h0")

    @T.prim_func
    def wide_scan(
        first_segment: T.Tensor((num_bounds,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        states: T.Tensor((capacity, num_value_heads, V, K), "float32"),
        maps: T.Tensor((capacity, num_value_heads, K, K // FOLD_ROWS, FOLD_ROWS), "float32"),
        windows: T.Tensor((capacity, num_value_heads), "int32"),
        has_h0: T.int32,
    ):
        with T.Kernel(
            (num_bounds - 1) * num_value_heads * (V // SCAN_COLUMNS), threads=plan.threads
        ) as block:
            s = tiles(plan)
            n, hv, v0 = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            p, known = T.alloc_var("int32"), T.alloc_var("int32")
            await_previous()
            thread = T.get_thread_binding()
            v0 = block % (V // SCAN_COLUMNS) * SCAN_COLUMNS
            hv = block // (V // SCAN_COLUMNS) % num_value_heads
            n = block // (V // SCAN_COLUMNS) // num_value_heads
            first = first_segment[n]
            last = first_segment[n + 1] - 1
            for c in T.unroll(SCAN_COLUMNS):
                states[first, hv, v0 + c, thread] = 0.0
                if has_h0 != 0:
                    states[first, hv, v0 + c, thread] = h0[n, hv, thread, v0 + c]
            known = 0
            for i in rolled(T.max(last - first - 1, 0)):  # neither the first nor the last is folded
                p = first + 1 + i
                if windows[p, hv] == 0:
                    fold(K, states, maps, s, p, hv, v0, known)
                    known = 1
                else:
                    known = 0

    return wide_scan
