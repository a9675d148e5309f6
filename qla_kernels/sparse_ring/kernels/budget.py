"""Macros by which the 1024 threads of a CTA choose the fewest lines that reach a target mass.

A line's key consists of its mass and, to break ties, its number. Keys are unique, and forced lines
have keys above all others. A choice is therefore a single number, the least key that is kept, which
is found bit by bit. All sums are sums of integers, so results do not depend on the order of
summation. A thread keeps its first keys in registers: reading 4096 keys from memory again for every
bit took 40 us.
"""

from typing import Any, NamedTuple, Protocol

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.shapes import WORD
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Tile

BUDGET_THREADS = 1024
BUDGET_WARPS = BUDGET_THREADS // 32
HELD = 8  # keys that a thread keeps in registers
BITS = 31  # bits of a mass, and of a number; a key is FORCED_KEY or 0, the mass, the negated number
FORCED_KEY = 1 << (2 * BITS)

TILES = {  # of a kernel that uses block_scan and fewest
    "part": Tile((BUDGET_WARPS,), "int32"),
    "sum": Tile((2, 2, BUDGET_WARPS), "int32"),
}


def key_of(mass: Any, number: Any, forced: Any) -> Any:
    """Returns a line's key, int64: it falls with the mass and, for equal masses, as numbers rise.

    Forced lines have keys of at least FORCED_KEY.
    """
    rest = T.cast(mass, "int64") << BITS | T.cast((1 << BITS) - 1 - number, "int64")
    return T.if_then_else(forced, T.int64(FORCED_KEY), T.int64(0)) | rest


def mass_of(key: Any) -> Any:
    return T.cast(key >> BITS & T.int64((1 << BITS) - 1), "int32")


def warp_sum(x: Any) -> Any:
    """Returns the sum of x over the warp, int32, by one instruction."""
    return T.call_extern("int32", "__reduce_add_sync", T.uint32(0xFFFFFFFF), x)


class Lines(Protocol):
    """The lines to choose from; key(at) is the key of the line at a place, -1 if there is none."""

    def key(self, at: Any) -> Any: ...


class Verticals(NamedTuple):
    """Columns of a head as Lines: columns below `sink` are forced, numbers from `end` on unused."""

    columns: Any  # int32 [heads, places]
    masses: Any
    head: Any
    sink: Any
    end: Any

    def key(self, at: Any) -> Any:
        number = self.columns[self.head, at]
        key = key_of(self.masses[self.head, at], number, number < self.sink)
        return T.if_then_else(number < self.end, key, T.int64(-1))


@T.macro
def warp_scan(x: Any, lane: Any) -> None:
    """Replaces x[0] by the sum of x[0] over this lane and all lower lanes."""
    for d in T.unroll(5):
        below = T.shfl_up(x[0], 1 << d)
        if lane >= 1 << d:
            x[0] += below


@T.macro
def block_scan(count: Any, sums: Any, s_part: Any, lane: Any, warp: Any) -> None:
    """Sets sums[0] to the sum of `count` over threads before this one, sums[1] to that over all."""
    inclusive, part = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    inclusive[0] = count
    warp_scan(inclusive, lane)
    if lane == 31:
        s_part[warp] = inclusive[0]
    T.sync_threads()
    part[0] = s_part[lane]
    warp_scan(part, lane)
    sums[1] = T.shfl_sync(part[0], 31)
    part[0] = T.shfl_sync(part[0], T.max(warp - 1, 0))
    sums[0] = inclusive[0] - count
    if warp > 0:
        sums[0] += part[0]
    T.sync_threads()


@T.macro
def in_order(
    words: Any, head: Any, num: Any, to: Any, place: Any, s_part: Any, thread: Any
) -> None:
    """Writes the numbers of the set bits in `num` words of a head to to[head], in ascending order.

    Numbers for which to[head] has no room are left out. place[0] becomes the number of set bits.
    """
    sums = T.alloc_local((2,), "int32")
    word, at = T.alloc_var("int32"), T.alloc_var("int32")
    place[0] = 0
    for i in rolled(T.ceildiv(num, BUDGET_THREADS)):
        w = i * BUDGET_THREADS + thread
        word = 0
        if w < num:
            word = words[head, w]
        block_scan(T.call_extern("int32", "__popc", word), sums, s_part, thread % 32, thread // 32)
        at = place[0] + sums[0]
        while (word != 0) & (at < to.shape[1]):
            to[head, at] = w * WORD + T.call_extern("int32", "__ffs", word) - 1
            word = word & (word - 1)
            at += 1
        place[0] += sums[1]


@T.macro
def fewest(
    level: Any,
    lines: Lines,
    num: Any,
    need: Any,
    cap: Any,
    s_sum: Any,
    thread: Any,
) -> None:
    """Sets level[0] such that the lines with keys >= level[0] are the fewest that reach a target.

    The target is a mass of `need`, or `cap` lines if that takes fewer. At least one line and all
    forced lines are kept. If all lines are too few, level[0] is 0, and all are kept. The lines are
    at places 0 to num - 1; s_sum is int32 [2, 2, BUDGET_WARPS].
    """
    lane, warp = thread % 32, thread // 32
    held = T.alloc_local((HELD,), "int64")
    mine = T.alloc_local((2,), "int32")  # lines, and their mass
    kept, missed = T.alloc_var("int32"), T.alloc_var("int32")  # lines kept at two levels
    least = T.alloc_var("int64")
    for u in T.unroll(HELD):
        held[u] = -1
        if u * BUDGET_THREADS + thread < num:
            held[u] = lines.key(u * BUDGET_THREADS + thread)
    level[0] = 0
    for i in rolled(2 * BITS + 2):
        least = 0  # the first pass tests whether all lines are too few
        if i > 0:
            least = level[0] | T.int64(1) << T.cast(2 * BITS + 1 - i, "int64")
        for n in T.unroll(2):
            mine[n] = 0
        for u in T.unroll(HELD):
            if u * BUDGET_THREADS < num:  # the same for all threads
                if held[u] >= least:
                    mine[0] += 1
                    mine[1] += mass_of(held[u])
        for n in rolled(HELD, T.ceildiv(num, BUDGET_THREADS)):
            key = lines.key(T.min(n * BUDGET_THREADS + thread, num - 1))
            if (n * BUDGET_THREADS + thread < num) & (key >= least):
                mine[0] += 1
                mine[1] += mass_of(key)
        for n in T.unroll(2):
            mine[n] = warp_sum(mine[n])
            if lane == 0:
                s_sum[i % 2, n, warp] = mine[n]
        T.sync_threads()
        for n in T.unroll(2):
            mine[n] = warp_sum(s_sum[i % 2, n, lane])
        enough = (mine[0] >= 1) & (mine[1] >= need)
        if (i == 0) | enough | (mine[0] >= cap):
            level[0] = least
            kept = mine[0]
        else:
            missed = mine[0]
        if i == 0:
            if (mine[0] == 0) | ((mine[1] < need) & (mine[0] <= cap)):
                T.loop_break()
        elif (level[0] >= T.int64(FORCED_KEY)) | (kept - missed == 1):
            T.loop_break()
    T.sync_threads()
