"""Roles of the kernels whose CTAs take query tiles, the tables' items, and walk their key tiles.

In fwd a warp draws items ahead of time, loads their Q and passes the items on; the other roles
follow. All roles walk an item's tiles in one order: its causal own tiles, the last one first, the
spans' partial tiles, the other own tiles, and the spans' full tiles. Only the last own tile is
causal if a key tile is a whole number of the largest query tiles.

All roles take the number of tiles from the item's `tiles` alone, so that they agree whatever the
tables hold: the last stretch of the walk takes the tiles that are left.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.dualkv.shapes import (
    FULL_TILES,
    ITEM_COLUMNS,
    NODE,
    ORDERED,
    OWN_KEYS,
    OWN_TILES,
    PARTIALS,
    QUERY_ROWS,
    SPAN0,
    SPAN_K0,
    SPANS,
    TAIL,
    TILES,
    TOK0,
    TOKENS,
)
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled

BOX, PANEL = 16, 64  # rows and columns that one copy of Q or O moves; a full tile has >= 16 tokens

# The drawing warp passes on an item's row of the table, its head slot, or -1 at the end, and where
# there may be several, the number of its causal tiles.
HEAD_SLOT, CAUSAL = ITEM_COLUMNS, ITEM_COLUMNS + 1


def crosses(tile):
    """Returns whether the rows of an item may lie in several own key tiles of `tile` keys."""
    return tile % QUERY_ROWS != 0


def work_columns(tile):
    """Returns how many numbers the drawing warp passes on with an item."""
    return CAUSAL + crosses(tile)


def causal_tiles(x, tile):
    """Returns the number of own tiles that need a causal mask; x is a row of `read_item`."""
    if not crosses(tile):
        return 1
    before = T.truncdiv(x[TOK0] - x[NODE], tile)
    return clamped(x[OWN_TILES] - before, 1, x[TILES] - x[PARTIALS])


def held(number):
    """Returns a variable that holds the number."""
    return T.alloc_var("int32", init=number)[0]


def keys_of(s_k):
    """Returns the number of keys of a tile, from its slots in shared memory."""
    return int(s_k.shape[1])


def uniform(x):
    """Returns x, which has to be equal in all lanes, in a form the compiler knows to be uniform.

    The compiler then computes wgmma descriptors once per warp. Otherwise it computes them in every
    thread and moves them to uniform registers for each wgmma.
    """
    return T.shfl_sync(x, 0)


@T.macro
def read_item(x, item, row, span, q_shift, num_queries, num_keys, tile):
    """Reads row `row` of the item table into x; clamps each column to the sizes of the tensors.

    Clamping also keeps differences of two columns from overflowing: nvcc assumes that signed
    arithmetic does not overflow, and could derive different trip counts in different roles.
    """
    for column in T.unroll(ITEM_COLUMNS):
        x[column] = item[row, column]
    x[TOK0] = clamped(x[TOK0], q_shift, q_shift + num_queries - 1)
    x[TOKENS] = T.min(x[TOKENS], q_shift + num_queries - x[TOK0])
    x[NODE] = clamped(x[NODE], 0, num_keys)
    x[OWN_TILES] = clamped(x[OWN_TILES], 1, num_keys // tile + 1)
    x[OWN_KEYS] = clamped(x[OWN_KEYS], 0, tile)
    x[SPAN0] = clamped(x[SPAN0], 0, span.shape[0] - 1)
    x[SPANS] = clamped(x[SPANS], 0, span.shape[0] - x[SPAN0])
    x[TILES] = clamped(x[TILES], 1, num_keys // tile + span.shape[0] + 1)  # each ends in part
    x[PARTIALS] = clamped(x[PARTIALS], 0, T.min(x[SPANS], x[TILES] - 1))


class Tables(NamedTuple):
    """The tables of tables.py from which items are drawn."""

    header: Any
    item: Any
    span: Any
    order: Any
    next_order: Any


@T.macro
def draw(q, num_keys, tables, s, ring, tile_log2, q_shift, by_halves):
    """Draws items until `order` is used up; passes each on through `work` and loads its Q.

    This role and not `load` issues Q, up to 32 copies, one item ahead: there they would delay the
    next K. At the end it passes on head slot -1. `by_halves`: Q has one slot, whose halves, one of
    each warpgroup, are filled as each becomes free.
    """
    tile, work = keys_of(s.k), ring.work
    item, span, order = tables.item, tables.span, tables.order
    lane = T.get_thread_binding() % 32
    slots = (q.shape[1] << tile_log2) // QUERY_ROWS
    x = T.alloc_local((ITEM_COLUMNS,), "int32")
    drawn, ordered, entry, j = (T.alloc_var("int32") for _ in range(4))
    drawn = T.get_block_binding()
    ordered = T.min(tables.header[ORDERED], order.shape[0])
    j = 0
    while drawn < ordered:
        entry = clamped(order[drawn], 0, item.shape[0] * slots - 1)
        read_item(x, item, T.truncdiv(entry, slots), span, q_shift, q.shape[0], num_keys, tile)
        work.acquire(j)
        if lane == 0:
            for column in T.unroll(ITEM_COLUMNS):
                s.work[work.slot(j), column] = x[column]
            s.work[work.slot(j), HEAD_SLOT] = T.truncmod(entry, slots)
            if crosses(tile):
                s.work[work.slot(j), CAUSAL] = causal_tiles(x, tile)
        work.commit(j)
        to = (q, s.halves, ring.q, x[TOK0] - q_shift, T.truncmod(entry, slots))
        if by_halves:
            for w in (0, 1):
                ring.q.acquire(2 * j + w)
                fetch_q(*to, 2 * j + w, tile_log2, w)
                ring.q.commit(2 * j + w)
        else:
            ring.q.acquire(j)
            fetch_q(*to, j, tile_log2, None)
            ring.q.commit(j)
        if lane == 0:
            drawn = T.atomic_add(tables.next_order[0], 1, return_prev=True)
        drawn = T.shfl_sync(drawn, 0)
        j += 1
    work.acquire(j)
    s.work[work.slot(j), HEAD_SLOT] = -1
    work.commit(j)


@T.macro
def fetch_q(q, s_halves, q_ring, tok0, slot, j, tile_log2, half):
    """Issues the loads of an item's Q, or of the rows of one half, for use j of Q's ring."""
    row0, rows = (0, QUERY_ROWS) if half is None else (half * 64, 64)
    for b in rolled(rows // BOX):
        tok = tok0 + (b * BOX + row0 & (1 << tile_log2) - 1)
        for c in T.unroll(q.shape[2] // PANEL):
            T.tma_copy(
                q[
                    tok : tok + BOX,
                    head_of(slot, b * BOX + row0, tile_log2),
                    c * PANEL : c * PANEL + PANEL,
                ],
                s_halves[
                    q_ring.slot(j) * 2 + b // 4 if half is None else q_ring.slot(j),
                    b % 4 * BOX : b % 4 * BOX + BOX,
                    c * PANEL : c * PANEL + PANEL,
                ],
                barrier=q_ring.barrier(j),
            )


@T.macro
def load(k, v, span, s, ring, tile_log2, group):
    tile, work = keys_of(s.k), ring.work
    i, j, slot, head, node, own_tiles = (T.alloc_var("int32") for _ in range(6))
    stop, full, span0, spans, partials = (T.alloc_var("int32") for _ in range(5))
    i = 0  # tiles and items so far
    j = 0
    work.wait(0)
    slot = s.work[0, HEAD_SLOT]
    while slot >= 0:
        node = s.work[work.slot(j), NODE]
        own_tiles = s.work[work.slot(j), OWN_TILES]
        span0 = s.work[work.slot(j), SPAN0]
        spans = s.work[work.slot(j), SPANS]
        partials = s.work[work.slot(j), PARTIALS]
        stop = i + s.work[work.slot(j), TILES]
        causal = held(s.work[work.slot(j), CAUSAL]) if crosses(tile) else 1
        work.release(j)
        head = head_of(slot, 0, tile_log2) // group
        to = (k, v, s, ring, head)
        fetch(*to, i, node + (own_tiles - 1) * tile)
        i += 1
        if crosses(tile):
            for t in rolled(1, causal):
                fetch(*to, i, node + (own_tiles - 1 - t) * tile)
                i += 1
        for x in rolled(span0, span0 + partials):
            fetch(*to, i, span[x, SPAN_K0] + span[x, FULL_TILES] * tile)
            i += 1
        full = stop - i
        if spans > 0:
            full = T.min(full, own_tiles - causal)
        for t in rolled(full):
            fetch(*to, i, node + t * tile)
            i += 1
        for x in rolled(span0, span0 + spans):
            full = stop - i
            if x + 1 < span0 + spans:
                full = T.min(full, span[x, FULL_TILES])
            for t in rolled(full):
                fetch(*to, i, span[x, SPAN_K0] + t * tile)
                i += 1
        j += 1
        work.wait(j)
        slot = s.work[work.slot(j), HEAD_SLOT]


def head_of(slot, row, tile_log2):
    """Returns the query head of a row of a head slot's tile."""
    return (slot * QUERY_ROWS + row) >> tile_log2


@T.macro
def fetch(k, v, s, ring, head, i, key0):
    """Issues TMA loads of the K and V tiles that begin at token key0, the i-th of the CTA's walk.

    Tokens outside the tensors read as zeros. key0 is clamped to minus a tile .. the number of
    tokens, so that a tile far outside reads zeros as well.
    """
    tile = keys_of(s.k)
    at = clamped(key0, -tile, k.shape[0])
    ring.k.acquire(i)
    T.tma_copy(k[at : at + tile, head, :], s.k[ring.k.slot(i), :, :], barrier=ring.k.barrier(i))
    ring.k.commit(i)
    ring.v.acquire(i)
    T.tma_copy(v[at : at + tile, head, :], s.v[ring.v.slot(i), :, :], barrier=ring.v.barrier(i))
    ring.v.commit(i)


@T.macro
def scrub(span, s, ring, clean):
    tile, work = keys_of(s.v), ring.work
    i, j, c, keys, span0, masked, tiles = (T.alloc_var("int32") for _ in range(7))
    i = 0
    j = 0
    c = 0
    work.wait(0)
    while s.work[work.slot(j), HEAD_SLOT] >= 0:
        keys = s.work[work.slot(j), OWN_KEYS]
        span0 = s.work[work.slot(j), SPAN0]
        causal = held(s.work[work.slot(j), CAUSAL]) if crosses(tile) else 1
        masked = s.work[work.slot(j), PARTIALS] + causal
        tiles = s.work[work.slot(j), TILES]
        work.release(j)
        for t in rolled(tiles):  # every tile: a role that skips a phase may mistake the next one
            ring.v.wait(i)
            if t < masked:
                if crosses(tile):
                    if t > 0:
                        keys = tile
                    if t >= causal:
                        keys = clamped(span[span0 + t - causal, TAIL], 0, tile)
                elif t > 0:
                    keys = clamped(span[span0 + t - 1, TAIL], 0, tile)
                clear_rows(s.v, ring.v.slot(i), keys)  # 2
                clean.commit(c)
                c += 1
            ring.v.release(i)
            i += 1
        j += 1
        work.wait(j)


@T.macro
def clear_rows(s_v, slot, first):
    lane = T.get_thread_binding() % 32
    pieces = s_v.shape[2] // 8  # of 16 bytes, in a row
    tile = keys_of(s_v)
    for b in T.unroll(T.ceildiv((tile - first) * pieces, 32), unroll_factor=4):
        if first * pieces + b * 32 + lane < tile * pieces:
            for e in T.vectorized(8):
                s_v[slot, first + (b * 32 + lane) // pieces, lane % pieces * 8 + e] = 0
    T.fence_proxy_async()  # written by threads, read by wgmma
