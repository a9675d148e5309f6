"""Roles of kernels whose CTAs own 128 keys of a key head and walk the queries that see them.

A run is walked once for each `pack` heads, pack <= 4 of the key head's, in tiles of 64 rows. Row r
of a tile is token r % tile_tokens of head r // tile_tokens, tile_tokens = 64 / pack. A walk begins
at the run's end, which the keys of a node have in common: CTAs that begin together read, and add
to, the same rows at about the same time, while these are in the L2 cache. Only the tile walked last
may begin before the run: there Q, dO and their statistics are zeros. No tile lies before the run as
a whole, nor behind the last token, whatever an item says. Numbers of rows come by
threads: they begin at any token, and TMA takes fp32 from whole 16 bytes on only.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from qla_kernels.dualkv.kernels.items import BOX, PANEL
from qla_kernels.dualkv.shapes import (
    KEY_TILE,
    KV_DENSE,
    KV_K0,
    KV_KEYS,
    KV_LAST,
    KV_PART,
    KV_QUERY_ROWS,
    KV_TILES,
)
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled


class Walk(NamedTuple):
    """An item, as a role walks over it."""

    k0: Any
    keys: Any
    last: Any  # first token of the run's last tile, with which the walk begins
    tiles: Any
    dense: Any  # tiles without a query in front of a key: the first of the walk
    part: Any  # where sums go, or -1: the item is whole
    kv_head: Any
    turns: Any  # how often the run is walked
    tile_log2: Any  # log2(tile_tokens)


def walk_of(kv_item, entry, num_heads, kv_heads, tile_log2, q_shift, num_tokens, num_parts):
    """The item of an entry of kv_order; each role calls it, to hold what it needs and no more."""

    def held(number):
        return T.alloc_var("int32", init=number)[0]

    entry = held(clamped(entry, 0, kv_item.shape[0] * kv_heads - 1))
    item = T.truncdiv(entry, kv_heads)
    tile_tokens = 1 << tile_log2
    k0 = held(clamped(kv_item[item, KV_K0], 0, num_tokens - 1))
    keys = held(clamped(kv_item[item, KV_KEYS], 0, T.min(num_tokens - k0, KEY_TILE)))
    last = held(clamped(kv_item[item, KV_LAST], -tile_tokens, num_tokens - tile_tokens))
    most = (last - T.max(k0, q_shift) + 2 * tile_tokens - 1) >> tile_log2  # that reach the run
    tiles = held(clamped(kv_item[item, KV_TILES], 0, most))
    dense = held(kv_item[item, KV_DENSE])
    part = held(T.min(kv_item[item, KV_PART], num_parts - 1))
    kv_head = held(entry - item * kv_heads)
    turns = held(T.truncdiv(num_heads, kv_heads) << tile_log2 >> 6)
    return Walk(k0, keys, last, tiles, dense, part, kv_head, turns, tile_log2)


@T.macro
def fetch(q, do, s, i, token, head, tile_log2, full, j):
    """A tile to slot i; the bytes are reported to full[j]."""
    for b in rolled(KV_QUERY_ROWS // BOX):
        tok = token + (b * BOX & (1 << tile_log2) - 1)
        of_box = head + (b * BOX >> tile_log2)
        for c in T.unroll(q.shape[2] // PANEL):
            for rows, tile in ((q, s.q), (do, s.do)):
                T.tma_copy(
                    rows[tok : tok + BOX, of_box, c * PANEL : c * PANEL + PANEL],
                    tile[i, b * BOX : b * BOX + BOX, c * PANEL : c * PANEL + PANEL],
                    barrier=full[j],
                )


@T.macro
def load_rows(q, do, s, ring, front_full, walk, q_shift):
    """One warp: Q and dO of every tile."""
    lane = T.get_thread_binding() % 32
    width = q.shape[2] // 32
    step, head, token, before = (T.alloc_var("int32") for _ in range(4))
    step = 0
    head = walk.kv_head * walk.turns << 6 - walk.tile_log2
    for turn in rolled(walk.turns):
        for tile in rolled(walk.tiles):
            token = walk.last - (tile << walk.tile_log2)  # may lie before k0, or before all tokens
            before = walk.k0 - token
            token -= q_shift
            ring.acquire(step)
            if before <= 0:
                fetch(
                    q, do, s, ring.slot(step), token, head, walk.tile_log2, ring.full,
                    ring.slot(step),
                )  # fmt: skip
            else:
                fetch(q, do, s, ring.slot(step), token, head, walk.tile_log2, front_full, 0)
                if T.shuffle_elect(32):
                    T.barrier_arrive(front_full)
                T.barrier_wait(front_full, turn % 2)
                for row in rolled(KV_QUERY_ROWS):
                    if row & (1 << walk.tile_log2) - 1 < before:
                        for e in T.vectorized(width):
                            s.q[ring.slot(step), row, lane * width + e] = 0
                        for e in T.vectorized(width):
                            s.do[ring.slot(step), row, lane * width + e] = 0
                T.fence_proxy_async()  # zeros: written by threads, read by wgmma
            ring.commit(step)
            step += 1
        head += KV_QUERY_ROWS >> walk.tile_log2


@T.macro
def row_stats(stats, s, ring, walk, row, q_shift):
    """Two warps, a row a thread: lse2 and delta of every tile."""
    step, token0, token, begin, head = (T.alloc_var("int32") for _ in range(5))
    r_stats = T.alloc_local((2,), "float32")
    token0 = walk.last - q_shift + (row & (1 << walk.tile_log2) - 1)
    begin = T.max(walk.k0 - q_shift, 0)
    step = 0
    head = walk.kv_head * walk.turns * KV_QUERY_ROWS + row >> walk.tile_log2
    for _ in rolled(walk.turns):
        for tile in rolled(walk.tiles):
            token = token0 - (tile << walk.tile_log2)
            for which in T.unroll(2):
                r_stats[which] = 0
                if token >= begin:
                    r_stats[which] = stats[head, which, token]
            ring.acquire(step)
            for which in T.unroll(2):
                s.stats[ring.slot(step), which, row] = r_stats[which]
            ring.commit(step)
            step += 1
        head += KV_QUERY_ROWS >> walk.tile_log2
