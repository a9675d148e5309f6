"""Roles of the kernels whose CTAs own keys of a key head and walk the queries that see them.

There are 128 keys, 64 of each warpgroup; in bwd_dkv_wide 64, of which both warpgroups take all.

A run is the contiguous range of queries that see a key tile. A CTA walks it once per `pack` of the
key head's query heads, pack <= 4, in tiles of 64 rows. Row r of a tile is token r % tile_tokens of
head r // tile_tokens, tile_tokens = 64 / pack. The walk goes backwards from the run's end, which
all keys of a node have in common: CTAs that begin together then read, and add to, the same rows at
about the same time, while these are in the L2 cache.

Only the tile walked last may begin before the run; rows before the run get zeros as Q, dO and
statistics. `walk_of` clamps every item so that no tile lies entirely before the run or behind the
last token. Threads and not TMA load the statistics of rows: a tile may begin at any token, and TMA
needs fp32 rows that begin at multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
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

WARPGROUP_KEYS = KEY_TILE // 2  # keys of a warpgroup


class KeyWalk(NamedTuple):
    """The numbers of a kv_item that roles need: its keys, the tiles of its run, where sums go."""

    k0: Any
    keys: Any
    last: Any  # first token of the run's last tile, with which the walk begins
    tiles: Any
    dense: Any  # number of tiles without a query before a key; they come first in the walk
    part: Any  # index of the partial sum to write; -1: the item is whole and writes dk and dv
    kv_head: Any
    turns: Any  # number of times the run is walked
    tile_log2: Any  # log2(tile_tokens)


def walk_of(
    kv_item, entry, num_heads, kv_heads, tile_log2, q_shift, num_tokens, num_parts, tile=KEY_TILE
):
    """Returns the Walk of entry `entry` of kv_order; clamps each number that leads to an address.

    `tile` is the largest number of keys of an item. The roles that multiply and the other roles
    call it separately, so that the registers of each hold only the numbers that it uses.
    """

    def held(number):
        return T.alloc_var("int32", init=number)[0]

    entry = held(clamped(entry, 0, kv_item.shape[0] * kv_heads - 1))
    item = T.truncdiv(entry, kv_heads)
    tile_tokens = 1 << tile_log2
    k0 = held(clamped(kv_item[item, KV_K0], 0, num_tokens - 1))
    keys = held(clamped(kv_item[item, KV_KEYS], 0, T.min(num_tokens - k0, tile)))
    last = held(clamped(kv_item[item, KV_LAST], -tile_tokens, num_tokens - tile_tokens))
    # tiles that reach into the run
    most = (last - T.max(k0, q_shift) + 2 * tile_tokens - 1) >> tile_log2
    tiles = held(clamped(kv_item[item, KV_TILES], 0, most))
    dense = held(kv_item[item, KV_DENSE])
    part = held(T.min(kv_item[item, KV_PART], num_parts - 1))
    kv_head = held(entry - item * kv_heads)
    turns = held(T.truncdiv(num_heads, kv_heads) << tile_log2 >> 6)
    return KeyWalk(k0, keys, last, tiles, dense, part, kv_head, turns, tile_log2)


def given(q, do, s):
    """Returns (rows in global memory, slots) of Q and dO, without the one that is None."""
    return tuple(pair for pair in ((q, s.q), (do, s.do)) if pair[0] is not None)


@T.macro
def fetch(q, do, s, i, token, head, tile_log2, full, j):
    """Issues TMA loads of a 64-row tile of Q and dO into slot i; their bytes count at full[j].

    One of q and do may be None.
    """
    for b in rolled(KV_QUERY_ROWS // BOX):
        tok = token + (b * BOX & (1 << tile_log2) - 1)
        of_box = head + (b * BOX >> tile_log2)
        for c in T.unroll(s.q.shape[2] // PANEL):
            for rows, tile in given(q, do, s):
                T.tma_copy(
                    rows[tok : tok + BOX, of_box, c * PANEL : c * PANEL + PANEL],
                    tile[i, b * BOX : b * BOX + BOX, c * PANEL : c * PANEL + PANEL],
                    barrier=full[j],
                )


@T.macro
def load_rows(q, do, s, ring, front_full, walk, q_shift):
    """Loads Q and dO of every tile of the walk into the ring; run by one warp.

    One of q and do may be None, if another warp loads it. In a tile that begins before the run,
    zeroes the rows before the run after the TMA has landed.
    """
    lane = T.get_thread_binding() % 32
    width = s.q.shape[2] // 32
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
                        if q is not None:
                            for e in T.vectorized(width):
                                s.q[ring.slot(step), row, lane * width + e] = 0
                        if do is not None:
                            for e in T.vectorized(width):
                                s.do[ring.slot(step), row, lane * width + e] = 0
                T.fence_proxy_async()  # zeros: written by threads, read by wgmma
            ring.commit(step)
            step += 1
        head += KV_QUERY_ROWS >> walk.tile_log2


@T.macro
def row_stats(stats, s, ring, walk, row, q_shift):
    """Writes lse2 and delta of every tile of the walk to the ring; two warps, one row per thread.

    Rows before the run get 0.
    """
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


@T.macro
def store(r_grad, s_grad, grad, walk, w, D, dtype):
    """Writes a warpgroup's rows of dK or dV to `grad`, staged through rows w of K or V in s_grad.

    Only this warpgroup may have read those rows. Each warp copies the 16 rows that it staged, so a
    warp sync suffices.
    """
    lane = T.get_thread_binding() % 32
    row0 = T.get_thread_binding() // 32 * 16
    lanes = D // 8  # a row in pieces of 16 bytes
    r_out = T.alloc_fragment((WARPGROUP_KEYS, D), dtype)
    T.copy(r_grad, r_out)
    T.copy(r_out, s_grad[w, :, :])
    T.sync_warp()
    for piece in T.unroll(16 * lanes // 32):
        row = row0 + piece * (32 // lanes) + lane // lanes
        if w * WARPGROUP_KEYS + row < walk.keys:
            for e in T.vectorized(8):
                grad[walk.k0 + w * WARPGROUP_KEYS + row, walk.kv_head, lane % lanes * 8 + e] = (
                    s_grad[w, row, lane % lanes * 8 + e]
                )
