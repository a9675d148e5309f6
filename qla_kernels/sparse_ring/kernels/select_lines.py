"""select_lines -- the lines of a head, chosen from the candidates of all ranks; one CTA per head.

    total  = the sum of all tiles; need(p) = p total, rounded up
    V      = the fewest candidates, best first, that hold need(recall_v)
    s[d]   = tile[last - d], with `residual` less the masses of V in that tile
    D      = the fewest distances d, best first, whose s[d] hold need(recall_s), with `residual`
             less the mass of V
Columns below `sink` and distances below `window` come first, then falling masses; ties by number.

Steps (numbers appear again in the code):
    1  the total; tables of zeros
    2  V by its least key; a bit and a mass in the tables for each of its columns
    3  V in order, from the bits
    4  D by its least key
    5  D as bits, with short holes filled; the share of the observed attention that the lines hold

Bounded by latency: a head has one SM. All numbers are integers, as in keep_best_columns, so bits
and masses may be added in any order.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.budget import (
    BUDGET_THREADS,
    BUDGET_WARPS,
    TILES,
    Verticals,
    block_scan,
    fewest,
    in_order,
    key_of,
)
from qla_kernels.sparse_ring.shapes import BLOCK, SHARE, WORD
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    pass


VARIANTS = (Variant(),)

PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # indices are guarded by the numbers of lines
    "tl.disable_thread_storage_sync": True,  # the macros have their own
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("lines", warps=BUDGET_WARPS, regs=64, computes="V, D"),),
        tiles=TILES,
    )


class Slashes(NamedTuple):
    """Makes sort keys of a head's diagonals, as the protocol budget.Lines asks.

    key(d) is budget.key_of with number d and the mass of the tile at block last - d, with
    `residual` less the masses of V in that tile; the mass is 0 for d > last. Distances d below
    `window` are forced: their keys are above all others.
    """

    tile: Any  # int32 [heads, blocks]
    of_columns: Any  # likewise, the masses of V
    head: Any
    last: Any
    window: Any
    residual: Any

    def key(self, d):
        b = T.max(self.last - d, 0)
        taken = T.if_then_else(self.residual != 0, self.of_columns[self.head, b], 0)
        left = T.if_then_else(d <= self.last, self.tile[self.head, b] - taken, 0)
        return key_of(left, d, d < self.window)


def need(total, share):
    return (T.cast(total, "int64") * share + (1 << SHARE) - 1) >> SHARE


def build(variant: Variant):
    plan = schedule(variant)
    heads, num, blocks, capacity = T.dynamic("heads, num, blocks, capacity")
    column_words, words = T.dynamic("column_words, words")

    @T.prim_func
    def select_lines(
        column: T.Tensor((heads, num), "int32"),
        mass: T.Tensor((heads, num), "int32"),
        tile: T.Tensor((heads, blocks), "int32"),
        v_idx: T.Tensor((heads, capacity), "int32"),
        v_cnt: T.Tensor((heads,), "int32"),
        d_bits: T.Tensor((heads, words), "int32"),
        recall: T.Tensor((heads,), "float32"),
        marks: T.Tensor((heads, column_words), "int32"),
        of_columns: T.Tensor((heads, blocks), "int32"),
        active: T.Tensor((heads, blocks), "int32"),
        last: T.int32,
        share_v: T.int32,
        share_s: T.int32,
        max_v: T.int32,
        max_s: T.int32,
        sink: T.int32,
        window: T.int32,
        residual: T.int32,
        gap: T.int32,
    ):
        with T.Kernel(heads, threads=plan.threads) as head:
            s = tiles(plan)
            sums = T.alloc_local((2,), "int32")  # of threads before, and of all
            level = T.alloc_local((1,), "int64")
            total, held, count, word = (T.alloc_var("int32") for _ in range(4))
            place = T.alloc_local((1,), "int32")
            before, after = T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            end = blocks * BLOCK

            columns = Verticals(column, mass, head, sink, end)
            slashes = Slashes(tile, of_columns, head, last, window, residual)
            await_previous()
            count = 0
            for i in rolled(T.ceildiv(blocks, BUDGET_THREADS)):  # 1
                b = i * BUDGET_THREADS + thread
                if b < blocks:
                    count += tile[head, b]
                    of_columns[head, b] = 0
                    marks[head, 2 * b] = 0
                    marks[head, 2 * b + 1] = 0
            block_scan(count, sums, s.part, lane, warp)
            total = sums[1]
            fewest(level, columns, num, need(total, share_v), max_v, s.sum, thread)  # 2
            held = 0
            for i in rolled(T.ceildiv(num, BUDGET_THREADS)):
                at = i * BUDGET_THREADS + thread
                if at < num:
                    if columns.key(at) >= level[0]:
                        c = T.max(column[head, at], 0)  # c < end, since its key is not -1
                        T.atomic_add(marks[head, c // WORD], T.int32(1) << c % WORD)
                        T.atomic_add(of_columns[head, c // BLOCK], mass[head, at])
                        held += mass[head, at]
            block_scan(held, sums, s.part, lane, warp)
            held = T.if_then_else(residual != 0, sums[1], 0)
            in_order(marks, head, column_words, v_idx, place, s.part, thread)  # 3
            if thread == 0:
                v_cnt[head] = place[0]
            for i in rolled(T.ceildiv(capacity, BUDGET_THREADS)):
                at = i * BUDGET_THREADS + thread
                if (at >= place[0]) & (at < capacity):
                    v_idx[head, at] = end
            fewest(  # 4
                level, slashes, blocks, need(total, share_s) - held, max_s, s.sum, thread
            )
            for i in rolled(T.ceildiv(blocks, BUDGET_THREADS)):
                d = i * BUDGET_THREADS + thread
                if d < blocks:
                    active[head, d] = T.cast((d == 0) | (slashes.key(d) >= level[0]), "int32")
            T.sync_threads()
            held = 0
            for i in rolled(T.ceildiv(blocks, BUDGET_THREADS)):  # 5
                d = i * BUDGET_THREADS + thread
                count = 0
                if d < blocks:
                    count = active[head, d]
                    if (count == 0) & (gap > 0):
                        before = gap + 1
                        after = gap + 1
                        for n in rolled(1, gap + 1):
                            if active[head, T.max(d - n, 0)] != 0:
                                before = T.min(before, n)
                            if d + n < blocks:
                                if active[head, d + n] != 0:
                                    after = T.min(after, n)
                        if before + after - 1 <= gap:
                            count = 1
                    if d <= last:
                        if count != 0:
                            held += tile[head, last - d]
                        else:
                            held += of_columns[head, last - d]
                word = T.cast(T.ballot(count), "int32")
                if (lane == 0) & (d // WORD < words):
                    d_bits[head, d // WORD] = word
            block_scan(held, sums, s.part, lane, warp)
            if thread == 0:
                recall[head] = T.cast(
                    T.cast(sums[1], "float64") / T.cast(T.max(total, 1), "float64"), "float32"
                )

    return select_lines
