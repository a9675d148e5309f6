"""How the 1024 threads of a CTA choose the fewest lines that a budget asks for: macros.

A line's key is its mass and, for ties, its number: keys are unique, and forced lines have keys
above all others. So a choice is one number, the least key that is kept, found bit by bit. Every sum
is one of integers: nothing depends on the order of summation. A thread keeps its first keys in
registers: read from memory bit by bit, 4096 of them took 40 us.
"""

from typing import Any, NamedTuple, Protocol

import tilelang.language as T

from qla_kernels.tile.loops import rolled

THREADS = 1024
WARPS = THREADS // 32
HELD = 8  # keys of a thread
BITS = 31  # of a mass, and of a number: a key is FORCED or not, the mass, and a number from the end
FORCED = 1 << (2 * BITS)
ONE_LINE = 1 << 32  # as counted, beside masses that together are below 2^31


def key_of(mass: Any, number: Any, forced: Any) -> Any:
    """int64: falling keys are falling masses, and where they tie rising numbers."""
    rest = T.cast(mass, "int64") << BITS | T.cast((1 << BITS) - 1 - number, "int64")
    return T.if_then_else(forced, T.int64(FORCED), T.int64(0)) | rest


def mass_of(key: Any) -> Any:
    return key >> BITS & T.int64((1 << BITS) - 1)


class Lines(Protocol):
    """What a choice is made of, by their places; -1 where there is none."""

    def key(self, at: Any) -> Any: ...


class Found(NamedTuple):
    """Columns of a head: the first `sink` are forced, and those from `end` on are none."""

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
    """x[0] becomes its sum over this and all lower lanes."""
    for d in T.unroll(5):
        below = T.shfl_up(x[0], 1 << d)
        if lane >= 1 << d:
            x[0] += below


@T.macro
def block_scan(count: Any, sums: Any, s_part: Any, lane: Any, warp: Any) -> None:
    """sums: of `count` over all threads before this one, and over all."""
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
def fewest(
    level: Any,
    lines: Lines,
    num: Any,
    need: Any,
    cap: Any,
    s_sum: Any,
    thread: Any,
) -> None:
    """level[0]: lines with keys from it on are at least one, and hold `need` or are `cap` lines.

    `num` lines by their place; s_sum is int64 [2, WARPS].
    """
    lane, warp = thread % 32, thread // 32
    held = T.alloc_local((HELD,), "int64")
    mine = T.alloc_local((1,), "int64")  # lines, and in the low 32 bits their mass
    kept, missed = T.alloc_var("int32"), T.alloc_var("int32")  # lines at two levels
    for u in T.unroll(HELD):
        held[u] = -1
        if u * THREADS + thread < num:
            held[u] = lines.key(u * THREADS + thread)
    level[0] = 0
    kept = num
    for i in rolled(2 * BITS + 1):
        least = level[0] | T.int64(1) << T.cast(2 * BITS - i, "int64")
        mine[0] = 0
        for u in T.unroll(HELD):
            if held[u] >= least:
                mine[0] += ONE_LINE + mass_of(held[u])
        for n in rolled(HELD, T.ceildiv(num, THREADS)):
            key = lines.key(T.min(n * THREADS + thread, num - 1))
            if (n * THREADS + thread < num) & (key >= least):
                mine[0] += ONE_LINE + mass_of(key)
        mine[0] = T.warp_reduce_sum(mine[0])
        if lane == 0:
            s_sum[i % 2, warp] = mine[0]
        T.sync_threads()
        mine[0] = T.warp_reduce_sum(s_sum[i % 2, lane])
        count = T.cast(mine[0] >> 32, "int32")
        mass = mine[0] & (ONE_LINE - 1)
        if ((count >= 1) & (mass >= need)) | (count >= cap):
            level[0] = least
            kept = count
        else:
            missed = count
        if (level[0] >= T.int64(FORCED)) | ((i > 0) & (kept - missed == 1)):
            T.loop_break()
    T.sync_threads()
