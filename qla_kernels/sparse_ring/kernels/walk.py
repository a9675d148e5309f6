"""How a query tile meets keys: its loading warp walks the table of diagonals, then the columns.

A tile is two blocks of 64 rows, a warpgroup each, and a step loads 64 keys and values for both. The
warp says with every step what each warpgroup sees of it, so consumers read no table, count nothing
and stop where the warp stops. What a warpgroup does not see it hands back unread.

    UNSEEN     none of the keys
    WHOLE      all
    TRIANGLE   the block of the rows themselves: key j <= row i
    COLUMNS    those of a mask of 64 bits
    END        no more steps

Two warpgroups that see different steps must not wait for each other in a circle. One keeps the
values of a step until it has met the keys of the next that it sees; so that those can always be
loaded, the warp lets no warpgroup pass more steps than there are slots for: it then gives it a step
of which it sees no column.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from qla_kernels.sparse_ring.shapes import BLOCK, WORD
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.ring import Ring

END, UNSEEN, WHOLE, TRIANGLE, COLUMNS = -1, 0, 1, 2, 3
SEEN = 3  # what a warpgroup sees, and the mask of columns, two words
VISIT = 5  # batch row of slot 0 of the buffer, bucket, first block, end, local block of the first


class Steps(NamedTuple):
    """Slots of keys, of values, and of what is seen of them, which lies with the keys."""

    s_k: Any  # [slots, 64, D]
    s_v: Any
    s_seen: Any  # int32 [slots of keys, 2, SEEN]
    k: Ring
    v: Ring


class Table(NamedTuple):
    """See plan.Table, a row for each batch row and head; and the tile in it."""

    entries: Any
    bounds: Any
    gap: Any
    stripe_blocks: Any
    buckets: Any


def first_block_of(first_block, tile, d_bits, gap):
    """Of a tile whose blocks are at no greater distance from any block than there are bits for."""
    return clamped(first_block[tile], 0, d_bits.shape[1] * WORD - 1 - gap)


@T.macro
def put(steps, walked, what, low, high, k, v, x, row, head):
    """One more step: rows of k and v [x, rows, head, D]; lanes 0 and 1 say what each half sees.

    walked is what the lanes count: steps, and those in a row that its half of the tile let pass.
    """
    half = T.get_thread_binding() % 32
    i = T.alloc_var("int32")
    i = walked[0]
    walked[1] += 1
    if what != UNSEEN:
        walked[1] = 0
    slot = steps.k.slot(i)
    steps.k.acquire(i)
    T.tma_copy(k[x, row : row + BLOCK, head, :], steps.s_k[slot, :, :], barrier=steps.k.barrier(i))
    if half < 2:
        steps.s_seen[slot, half, 0] = what
        steps.s_seen[slot, half, 1] = low
        steps.s_seen[slot, half, 2] = high
        if walked[1] > steps.v.stages - 2:
            steps.s_seen[slot, half, 0] = COLUMNS
            walked[1] = 0
    steps.k.commit(i)
    steps.v.acquire(i)
    T.tma_copy(
        v[x, row : row + BLOCK, head, :],
        steps.s_v[steps.v.slot(i), :, :],
        barrier=steps.v.barrier(i),
    )
    steps.v.commit(i)
    walked[0] = i + 1


@T.macro
def walk_slashes(steps, walked, table, visits, k, v, row_of_table, i0, b, head):
    """Every visit's blocks that the tile at block i0 sees."""
    lane = T.get_thread_binding() % 32
    half = lane % 2
    x, end, word, ahead, what, mine = (T.alloc_var("int32") for _ in range(6))
    first, stop, block0, row_of_k = (T.alloc_var("int32") for _ in range(4))
    for n in rolled(visits.shape[0]):
        row_of_k = visits[n, 0] + b
        bucket = clamped(visits[n, 1], 0, table.buckets - 1)
        x = table.bounds[row_of_table, bucket]
        end = table.bounds[row_of_table, bucket + 1]
        first = visits[n, 2]
        stop = visits[n, 3]
        block0 = visits[n, 4]
        ahead = 0
        if x + lane < end:
            ahead = table.entries[row_of_table, x + lane]
        while x < end:
            word = ahead
            if x + 32 + lane < end:
                ahead = table.entries[row_of_table, x + 32 + lane]  # while these are walked
            j = i0 - (word >> 2) + table.gap
            mine = T.cast(T.ballot((x + lane < end) & (first <= j) & (j < stop)), "int32")
            x0 = T.call_extern("int32", "__ffs", mine) - 1  # entries ascend: a visit's lie together
            for y in rolled(T.call_extern("int32", "__popc", mine)):
                entry = T.shfl_sync(word, x0 + y)
                e = (entry >> 2) - table.gap
                inside = i0 - e - first
                turn = table.stripe_blocks * table.buckets
                local = inside // turn * table.stripe_blocks + inside % table.stripe_blocks
                what = UNSEEN
                if ((entry >> half) & 1) == 1:
                    what = T.if_then_else(e + half * table.gap == 0, TRIANGLE, WHOLE)
                put(steps, walked, what, 0, 0, k, v, row_of_k, (block0 + local) * BLOCK, head)
            x += 32


@T.macro
def read_columns(v_idx, head, c, past, columns):
    """Columns c + lane and c + 32 + lane, or `past` where there is none; no block is below 0."""
    for n in T.unroll(2):
        at = c + n * 32 + T.get_thread_binding() % 32
        columns[n] = past
        if at < v_idx.shape[1]:
            columns[n] = T.max(v_idx[head, at], 0)


@T.macro
def walk_columns(steps, walked, v_idx, d_bits, k, v, row_of_table, i0, gap):
    """The columns above the tile's blocks that no slash covers, 64 at a time."""
    lane = T.get_thread_binding() % 32
    c, low, high = (T.alloc_var("int32") for _ in range(3))
    column = T.alloc_local((2,), "int32")
    ahead = T.alloc_local((2,), "int32")
    keep = T.alloc_local((4,), "int32")
    past = (i0 + gap) * BLOCK
    c = 0
    read_columns(v_idx, row_of_table, 0, past, ahead)
    while T.shfl_sync(ahead[0], 0) < past:  # columns ascend
        for n in T.unroll(2):
            column[n] = ahead[n]
        read_columns(v_idx, row_of_table, c + BLOCK, past, ahead)  # while these are walked
        for half in T.unroll(2):
            for n in T.unroll(2):
                d = i0 + half * gap - column[n] // BLOCK
                keep[half * 2 + n] = 0
                if d > 0:
                    keep[half * 2 + n] = ~(d_bits[row_of_table, d // WORD] >> (d % WORD)) & 1
                keep[half * 2 + n] = T.cast(T.ballot(keep[half * 2 + n]), "int32")
        if (keep[0] | keep[1] | keep[2] | keep[3]) != 0:
            low = T.if_then_else(lane % 2 == 0, keep[0], keep[2])
            high = T.if_then_else(lane % 2 == 0, keep[1], keep[3])
            what = T.if_then_else((low | high) != 0, COLUMNS, UNSEEN)
            put(steps, walked, what, low, high, k, v, row_of_table, c, 0)
        c += BLOCK


@T.macro
def walk_end(steps, walked):
    lane = T.get_thread_binding() % 32
    steps.k.acquire(walked[0])
    if lane < 2:
        steps.s_seen[steps.k.slot(walked[0]), lane, 0] = END
    steps.k.commit(walked[0])


@T.macro
def advance(steps, at, w, seen):
    """Consumer w: to the next step that it sees, or the end; its keys are there."""
    at[0] += 1
    steps.k.wait(at[0])
    seen[0] = T.shfl_sync(steps.s_seen[steps.k.slot(at[0]), w, 0], 0)
    while seen[0] == UNSEEN:
        steps.k.release(at[0])
        steps.v.wait(at[0])  # handed back once they are there, or phases would run ahead
        steps.v.release(at[0])
        at[0] += 1
        steps.k.wait(at[0])
        seen[0] = T.shfl_sync(steps.s_seen[steps.k.slot(at[0]), w, 0], 0)
    seen[1] = steps.s_seen[steps.k.slot(at[0]), w, 1]
    seen[2] = steps.s_seen[steps.k.slot(at[0]), w, 2]
