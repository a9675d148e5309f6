"""keep_best_columns -- a head's best columns among the local keys, as candidates; a CTA per head.

    found = the keys that mark_candidates has marked
    kept  = the `room` best of them: columns below `sink`, then falling masses, ties by column

Steps (numbers appear again in the code):
    1  list the marked keys in ascending order, then replace them by columns and masses
    2  if there are more than `room`, find the least sort key that is kept
    3  write the kept columns and masses in order; unused places get (end, 0)

Bounded by latency: a head has one SM.
Why this shape: integers alone, and sums whose order does not matter, so the kernel and the CPU code
keep the same columns, given the same masses. Most heads have room for all marked keys, and skip
step 2.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.budget import (
    BUDGET_THREADS,
    BUDGET_WARPS,
    TILES,
    Verticals,
    block_scan,
    fewest,
    in_order,
)
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule
from qla_kernels.tile.tiles import tiles

BEYOND_ALL_MASS = (1 << 31) - 1  # a target that is never reached: more than the sum of all masses


class Variant(NamedTuple):
    pass


VARIANTS = (Variant(),)

PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # indices are guarded by the numbers of lines
    "tl.disable_thread_storage_sync": True,  # the macros have their own
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("columns", warps=BUDGET_WARPS, regs=64, computes="which columns are kept"),),
        tiles=TILES,
    )


def build(variant: Variant):
    plan = schedule(variant)
    heads, L, blocks, words, room = T.dynamic("heads, L, blocks, words, room")

    @T.prim_func
    def keep_best_columns(
        mass: T.Tensor((heads, L), "int32"),
        block: T.Tensor((blocks,), "int32"),
        marks: T.Tensor((heads, words), "int32"),
        found_column: T.Tensor((heads, L), "int32"),
        found_mass: T.Tensor((heads, L), "int32"),
        column: T.Tensor((heads, room), "int32"),
        kept: T.Tensor((heads, room), "int32"),
        sink: T.int32,
        end: T.int32,
    ):
        with T.Kernel(heads, threads=plan.threads) as head:
            s = tiles(plan)
            sums = T.alloc_local((2,), "int32")  # of threads before, and of all
            num_found = T.alloc_local((1,), "int32")
            level = T.alloc_local((1,), "int64")
            num_kept, count, x = (T.alloc_var("int32") for _ in range(3))
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            found = Verticals(found_column, found_mass, head, sink, end)
            await_previous()
            in_order(marks, head, words, found_column, num_found, s.part, thread)  # 1
            T.sync_threads()  # what other threads found is read from here on
            for i in rolled(T.ceildiv(num_found[0], BUDGET_THREADS)):
                at = i * BUDGET_THREADS + thread
                if at < num_found[0]:
                    x = found_column[head, at]
                    found_mass[head, at] = mass[head, x]
                    found_column[head, at] = block[x // BLOCK] * BLOCK + x % BLOCK
            level[0] = 0
            if num_found[0] > room:  # 2: a thread reads what it wrote itself, so no barrier
                fewest(level, found, num_found[0], BEYOND_ALL_MASS, room, s.sum, thread)
            num_kept = 0
            for i in rolled(T.ceildiv(num_found[0], BUDGET_THREADS)):  # 3
                at = i * BUDGET_THREADS + thread
                count = 0
                if at < num_found[0]:
                    count = T.cast(found.key(at) >= level[0], "int32")
                block_scan(count, sums, s.part, lane, warp)
                if (count == 1) & (num_kept + sums[0] < room):  # false only if a key occurs twice
                    column[head, num_kept + sums[0]] = found_column[head, at]
                    kept[head, num_kept + sums[0]] = found_mass[head, at]
                num_kept += sums[1]
            for i in rolled(T.ceildiv(room, BUDGET_THREADS)):
                at = i * BUDGET_THREADS + thread
                if (at >= num_kept) & (at < room):
                    column[head, at] = end
                    kept[head, at] = 0

    return keep_best_columns
