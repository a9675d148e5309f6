"""Macros by which a query tile walks its keys: first the table of diagonals, then the columns.

A tile is two blocks of 64 rows, one for each of two warpgroups. A loading warp makes the steps: a
step loads 64 keys and values for both warpgroups, along with a code for each warpgroup that says
which of these keys it sees. Consumers therefore read no table, count no steps, and stop at END.

    UNSEEN     none of the keys: the warpgroup releases the slots without reading them
    WHOLE      all keys
    TRIANGLE   the block of the rows themselves: row i sees key j if j <= i
    COLUMNS    the keys in a mask of 64 bits
    END        no more steps

Two warpgroups that see different steps must not wait for each other in a circle. A warpgroup keeps
the values of one step until it has met the keys of the next step that it sees, so the loading warp
must always be able to load those keys. To avoid deadlock, a warpgroup may skip at most (value slots
- 2) consecutive steps. Then the loading warp marks a step as COLUMNS with an empty mask for it, so
that the warpgroup processes that step and releases the slot it holds.

The codes are in the tile `seen`, [slots of keys, 2, SEEN], and share the slots and barriers of
keys.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.shapes import BLOCK, TILE, WORD
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled

HALVES = TILE // BLOCK  # of a query tile, a warpgroup each
END, UNSEEN, WHOLE, TRIANGLE, COLUMNS = -1, 0, 1, 2, 3
SEEN = 3  # words for a warpgroup and step: the code, and two words of column mask
VISIT = 5  # batch row of slot 0 of the buffer, bucket, first block, end, local block of the first


class WalkTable(NamedTuple):
    """The fields of plan.Table, with one row of tensors for each batch row and head."""

    entries: Any
    bounds: Any
    gap: Any
    stripe_blocks: Any
    buckets: Any


class Mask(NamedTuple):
    """What the query tiles of all heads see: diagonals, in the visited chunks, and columns."""

    table: WalkTable
    visits: Any
    d_bits: Any
    v_idx: Any


class Queries(NamedTuple):
    """The queries of a rank, as a backward reads them."""

    q: Any  # [B, rows, heads, D]
    do: Any
    lse2: Any  # [B, heads, rows]
    delta: Any


class QueryTile(NamedTuple):
    """The query tile of a CTA: its first block and row, and its head, of queries and of keys."""

    i0: Any
    row0: Any
    b: Any
    h: Any
    of_head: Any  # the head's row of the tables
    kv_head: Any


@T.macro
def query_tile(bx, H, Hk, first_block, d_bits, gap):
    """Returns the fields of a CTA's QueryTile.

    Heads of a group are adjacent, so keys and values stay in L2; long tiles come first. The first
    block is clamped so that d_bits has a bit for every distance.
    """
    group, kv_head, tile, b, h, i0 = (T.alloc_var("int32") for _ in range(6))
    num_tiles = first_block.shape[0]
    group = H // Hk
    tile = num_tiles - 1 - bx // group % num_tiles
    kv_head = bx // group // num_tiles % Hk
    b = bx // group // num_tiles // Hk
    h = kv_head * group + bx % group
    i0 = clamped(first_block[tile], 0, d_bits.shape[1] * WORD - 1 - gap)
    return i0, tile * TILE, b, h, b * H + h, kv_head


@T.macro
def put(s, ring, walked, what, low, high, k, v, x, row, head):
    """Loads one more step: 64 rows of k and v [x, row, head, D], and the codes of both warpgroups.

    In lanes 0 and 1 `what`, `low` and `high` are the code and mask of warpgroups 0 and 1, which
    own the tile's two halves. walked[0] counts steps, and walked[1] the latest consecutive steps
    that the lane's warpgroup did not see.
    """
    half = T.get_thread_binding() % 32
    i = T.alloc_var("int32")
    i = walked[0]
    walked[1] += 1
    if what != UNSEEN:
        walked[1] = 0
    slot = ring.k.slot(i)
    ring.k.acquire(i)
    T.tma_copy(k[x, row : row + BLOCK, head, :], s.k[slot, :, :], barrier=ring.k.barrier(i))
    if half < 2:
        s.seen[slot, half, 0] = what
        s.seen[slot, half, 1] = low
        s.seen[slot, half, 2] = high
        if walked[1] > ring.v.stages - 2:
            s.seen[slot, half, 0] = COLUMNS
            walked[1] = 0
    ring.k.commit(i)
    ring.v.acquire(i)
    T.tma_copy(
        v[x, row : row + BLOCK, head, :],
        s.v[ring.v.slot(i), :, :],
        barrier=ring.v.barrier(i),
    )
    ring.v.commit(i)
    walked[0] = i + 1


@T.macro
def walk_slashes(s, ring, walked, mask, k, v, row_of_table, i0, b, head):
    """Makes a step of every block, in any visit, that the tile at block i0 sees by a diagonal."""
    table, visits = mask.table, mask.visits
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
                ahead = table.entries[row_of_table, x + 32 + lane]  # arrives during the steps below
            j = i0 - (word >> 2) + table.gap
            mine = T.cast(T.ballot((x + lane < end) & (first <= j) & (j < stop)), "int32")
            x0 = T.call_extern("int32", "__ffs", mine) - 1  # a visit's entries are consecutive
            for y in rolled(T.call_extern("int32", "__popc", mine)):
                entry = T.shfl_sync(word, x0 + y)
                e = (entry >> 2) - table.gap
                inside = i0 - e - first
                turn = table.stripe_blocks * table.buckets
                local = inside // turn * table.stripe_blocks + inside % table.stripe_blocks
                what = UNSEEN
                if ((entry >> half) & 1) == 1:
                    what = T.if_then_else(e + half * table.gap == 0, TRIANGLE, WHOLE)
                put(s, ring, walked, what, 0, 0, k, v, row_of_k, (block0 + local) * BLOCK, head)
            x += 32


@T.macro
def read_columns(v_idx, head, c, past, columns):
    """Sets columns[0] and [1] to columns number c + lane and c + 32 + lane of a head.

    A column beyond the end of v_idx becomes `past`, and a negative one becomes 0.
    """
    for n in T.unroll(2):
        at = c + n * 32 + T.get_thread_binding() % 32
        columns[n] = past
        if at < v_idx.shape[1]:
            columns[n] = T.max(v_idx[head, at], 0)


@T.macro
def walk_columns(s, ring, walked, mask, k, v, row_of_table, i0):
    """Makes steps of the columns in blocks before the tile's that no slash covers, 64 a step."""
    v_idx, d_bits, gap = mask.v_idx, mask.d_bits, mask.table.gap
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
        read_columns(v_idx, row_of_table, c + BLOCK, past, ahead)  # arrive during the step below
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
            put(s, ring, walked, what, low, high, k, v, row_of_table, c, 0)
        c += BLOCK


@T.macro
def walk_end(s, ring, walked):
    lane = T.get_thread_binding() % 32
    ring.k.acquire(walked[0])
    if lane < 2:
        s.seen[ring.k.slot(walked[0]), lane, 0] = END
    ring.k.commit(walked[0])


@T.macro
def advance(s, ring, at, w, seen):
    """Moves consumer w to the next step that it sees, or to END, and waits for the step's keys.

    at[0] becomes the step's number, and seen its code and mask. Steps in between are released.
    """
    at[0] += 1
    ring.k.wait(at[0])
    seen[0] = T.shfl_sync(s.seen[ring.k.slot(at[0]), w, 0], 0)
    while seen[0] == UNSEEN:
        ring.k.release(at[0])
        ring.v.wait(at[0])  # release only what has arrived, or phases would run ahead
        ring.v.release(at[0])
        at[0] += 1
        ring.k.wait(at[0])
        seen[0] = T.shfl_sync(s.seen[ring.k.slot(at[0]), w, 0], 0)
    seen[1] = s.seen[ring.k.slot(at[0]), w, 1]
    seen[2] = s.seen[ring.k.slot(at[0]), w, 2]
