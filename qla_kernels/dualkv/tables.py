"""Builds the int32 tables that tell the attention kernels which tiles to compute.

They are built on the host from the nodes of a layout, and copied to the GPU together. A tile is a
block of queries or of keys. A tile of the forward has 128 rows: those of 128 / pack tokens, where
`pack` query heads of one key head share the tile. A query tile of the backward has 64 rows, of up
to 4 heads. The number of keys of a key tile follows from the head size (`KEY_TILES` of shapes.py).
All layers, recomputation and the backward use the same tables. A tile never holds tokens of two
nodes, so no value of one response, not even a NaN, reaches another.

The columns follow; shapes.py defines their indices. There are H / pack head slots; head slot j has
the query heads j pack .. (j + 1) pack - 1. Tokens are numbered in packed order.

header [8]      entries of order, items, spans; entries of kv_order, kv_items, splits; parts; 0

item [n, 9]     a query tile and the key tiles it sees: first its causal own tiles, the last one
                first, then each span's partial tile, then full own tiles, then the spans' full
                tiles. Own tile t is causal from t = (tok0 - node) // keys of a tile on; where
                128 / pack divides a tile's keys, that is the last one alone, and every row sees its
                own key in it
    tok0        first query token
    rows        query tokens: 128 / pack, or fewer at a node's end
    node        first token of its node, where its own key tiles begin
    own_tiles   own key tiles; the last one holds the last row's own key
    own_keys    keys of the node in the last own tile, fewer than the tile's where the node ends
    span0       its first span
    spans       its number of spans
    partials    number of spans that end in a partial tile; these spans come first
    tiles       own tiles, partial tiles and the spans' full tiles
span [m, 3]     keys that all rows see: first key, full tiles, keys of the partial tile or 0
order [n slots] item * slots + head slot, in the order in which CTAs begin them
dq_item,        item and span for the key tiles of bwd_dq: the same tensors where its tiles are the
dq_span         forward's. They have as many rows, and bwd_dq takes the entries of `order`

kv_item [n, 6]  a key tile and the run of queries that see it, or a part of the run
    k0, keys    first key, and the number of keys, up to the tile's, all of one node
    last        first token of the last query tile; the other tiles are walked backwards from it.
                The tiles are aligned to the run's end, so the run's first tile may begin before the
                run: before k0, before token q_shift, or before token 0
    q_tiles     query tiles of 64 / min(pack, 4) tokens; 0 if no query sees the keys
    dense       number of tiles, the first of the walk, without a query before a key
    part        index of the partial sum to write; -1: the item is a whole run, writes dk and dv
split [s, 4]    k0, keys, first part, parts: key tiles whose gradients are sums of parts, in order
kv_order [n Hk] kv_item * Hk + key head, in the order in which CTAs begin them

A kernel reads as many rows of a table as the header says. Without spans, `span` is one row of
zeros: a tensor without elements has no address.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.shapes import DQ, FWD, KEY_TILES, KV, KV_QUERY_ROWS, QUERY_ROWS

KV_PACK = 4  # heads that share a query tile of the backward, at most
SM_COUNT = 132  # of an H100 or H200: decides how finely the backward's work is split
SHARES = 6 * SM_COUNT  # of the backward's work; a part of a split run is about one share
SHORTEST_PART = 16  # query tiles: summing parts in global memory takes time as well
SHORTEST_CUT = 384  # query tiles on both sides of a node's end, for a run to be split there

Lines = np.ndarray[Any, np.dtype[np.int64]]


class Tables(NamedTuple):
    """The tables on the device of the tensors they describe; all are views of one buffer."""

    header: Tensor
    item: Tensor
    span: Tensor
    order: Tensor
    kv_item: Tensor
    split: Tensor
    kv_order: Tensor
    dq_item: Tensor
    dq_span: Tensor


def build(
    nodes: Tensor,
    num_heads: int,
    kv_heads: int,
    q_shift: int = 0,
    tiles: tuple[int, int, int] = KEY_TILES[128],
) -> Tables:
    """Returns the tables on the host, for queries from token q_shift on.

    Args:
        nodes: int32 [n, 3] on the CPU, as a layout has checked them.
        num_heads, kv_heads: H and Hk.
        q_shift: the first token of a node, or 0; earlier tokens have no queries.
        tiles: numbers of keys, an entry of `KEY_TILES`.
    """
    pack = head_pack(num_heads, kv_heads)
    lines = nodes.numpy().astype(np.int64)
    rank = _by_cost_of_tree(lines)
    of_queries = (lines, rank, QUERY_ROWS // pack, num_heads // pack, q_shift)
    item, span, order = _forward(*of_queries, tiles[FWD])
    kv_tokens = KV_QUERY_ROWS // min(pack, KV_PACK)
    kv_item, split, kv_order = _backward(lines, kv_tokens, kv_heads, q_shift, tiles[KV])
    counts = [*map(len, (order, item, span, kv_order, kv_item, split)), int(split[:, 3].sum()), 0]
    tables = [_table(x) for x in (np.array(counts), item, span, order, kv_item, split, kv_order)]
    if tiles[DQ] == tiles[FWD]:
        return Tables(*tables, *tables[1:3])
    return Tables(*tables, *map(_table, _forward(*of_queries, tiles[DQ])[:2]))


def _table(lines: Lines) -> Tensor:
    return torch.from_numpy(lines.astype(np.int32))


def one_buffer(tables: Tables) -> Tensor:
    """Returns the tables concatenated in one flat tensor, so that one copy moves them all."""
    return torch.cat([table.flatten() for table in _distinct(tables).values()])


def views(buffer: Tensor, tables: Tables) -> Tables:
    """Returns the record `tables` with each tensor as a view of its own of `buffer`.

    `buffer` is `one_buffer(tables)`, or a copy of it on another device.
    """
    distinct = _distinct(tables)
    parts = torch.split(buffer, [table.numel() for table in distinct.values()])
    of_table = dict(zip(distinct, parts, strict=True))
    return Tables(*(of_table[id(table)].view(table.shape) for table in tables))


def _distinct(tables: Tables) -> dict[int, Tensor]:
    """Returns the tables by id, each tensor once."""
    return {id(table): table for table in tables}


def _by_cost_of_tree(nodes: Lines) -> Lines:
    """Returns for each node the rank of its tree by visible pairs; 0 is the tree with the most."""
    first, end, tout = nodes.T
    roots = np.maximum.accumulate(np.r_[0, tout][: len(tout)]) <= first
    tree = roots.cumsum() - 1
    pairs = (end - first) * (2 * tout - first - end + 1)
    by_cost = np.argsort(-np.bincount(tree, pairs), kind="stable")
    rank: Lines = np.argsort(by_cost)[tree]
    return rank


def _forward(
    nodes: Lines, rank: Lines, tokens: int, slots: int, q_shift: int, tile: int
) -> tuple[Lines, Lines, Lines]:
    """Returns item, span and order for query tiles of `tokens` tokens and `slots` head slots.

    A key tile has `tile` keys.
    """
    span, by_node = _spans(nodes, tile)
    node, i = _tiles(nodes, tokens)
    first, end, _ = nodes[node].T
    tok0 = first + i * tokens
    rows = np.minimum(tokens, end - tok0)
    own_tiles = -(-(tok0 + rows - first) // tile)
    own_keys = np.minimum(tile, end - first - (own_tiles - 1) * tile)
    span0, spans, partials, full_tiles = by_node[node].T
    tiles = own_tiles + partials + full_tiles
    item = np.stack(
        [tok0, rows, first, own_tiles, own_keys, span0, spans, partials, tiles], 1
    )[tok0 >= q_shift]  # fmt: skip
    order = _order(rank[node][tok0 >= q_shift], item[:, -1], slots)
    return item, span, order


def _spans(nodes: Lines, tile: int) -> tuple[Lines, Lines]:
    """Returns the span table, and per node: its first span, spans, partial tiles and full tiles.

    Siblings share their spans; ancestors with adjacent tokens form one span.
    """
    table: list[tuple[int, int, int]] = []
    by_node: list[tuple[int, int, int, int]] = []
    path: list[tuple[int, list[tuple[int, int]], tuple[int, int, int, int]]] = []
    for first, end, tout in nodes.tolist():
        while path and path[-1][0] <= first:
            path.pop()
        _, seen, below = path[-1] if path else (0, [], (0, 0, 0, 0))
        by_node.append(below)
        if tout > end:  # it has children, and they see this
            if seen and seen[-1][1] == first:
                seen = [*seen[:-1], (seen[-1][0], end)]
            else:
                seen = [*seen, (first, end)]
            cut = [(k0, *divmod(stop - k0, tile)) for k0, stop in seen]
            cut.sort(key=lambda span: span[2] == 0)
            partials = sum(tail > 0 for _, _, tail in cut)
            below = (len(table), len(cut), partials, sum(full for _, full, _ in cut))
            table += cut
        path.append((tout, seen, below))
    return _lines(table or [(0, 0, 0)], 3), _lines(by_node, 4)


def _backward(
    nodes: Lines, tokens: int, kv_heads: int, q_shift: int, tile: int
) -> tuple[Lines, Lines, Lines]:
    """Returns kv_item, split and kv_order for query tiles of `tokens` tokens, `tile` keys an item.

    The runs of a node's key tiles all end at the same token. Long runs are split at the same
    distances from that end, so that CTAs that begin at the same time walk the same queries. In a
    long node the runs of the first keys are much longer than those of the last keys: they are also
    split at the node's end, so that their front parts begin at one token too.
    """
    node, i = _tiles(nodes, tile)
    first, end, tout = nodes[node].T
    k0 = first + i * tile
    keys = np.minimum(tile, end - k0)
    q_tiles, behind = (
        -(-np.maximum(tout - np.maximum(begin, q_shift), 0) // tokens) for begin in (k0, end)
    )
    is_cut = np.minimum(q_tiles - behind, behind) >= SHORTEST_CUT
    rear = np.where(is_cut, behind, q_tiles)
    lengths = np.stack([rear, q_tiles - rear], 1)
    limit = max(SHORTEST_PART, -(-int(q_tiles.sum()) * kv_heads // SHARES))
    fewest = np.stack([np.ones_like(rear), is_cut], 1)
    parts = np.maximum((lengths + limit // 2) // limit, fewest)
    stretch, p = _counted(parts.ravel())  # each part's stretch (rear or front), and number in it
    whole, is_front = np.divmod(stretch, 2)
    is_last = p + 1 == parts.ravel()[stretch]  # the foremost part takes the remainder
    part_tiles = np.where(is_last, lengths.ravel()[stretch] - p * limit, limit)
    last = tout[whole] - (rear[whole] * is_front + p * limit + 1) * tokens
    dense = np.clip((last - (k0 + keys)[whole] + 1) // tokens + 1, 0, part_tiles)
    num_parts = parts.sum(1)
    cut = num_parts > 1
    part = np.where(cut[whole], cut[whole].cumsum() - 1, -1)
    kv_item = np.stack([k0[whole], keys[whole], last, part_tiles, dense, part], 1)
    first_part = np.r_[0, num_parts[cut].cumsum()][:-1]
    split = np.stack([k0[cut], keys[cut], first_part, num_parts[cut]], 1)
    together = (node[whole] * 2 + is_front) * (1 + p.max(initial=0)) + p
    return kv_item, split, _order(_rank_by_costliest(together, part_tiles), part_tiles, kv_heads)


def _rank_by_costliest(group: Lines, cost: Lines) -> Lines:
    """Returns each item's group rank: groups in descending order of their costliest item."""
    groups, group = np.unique(group, return_inverse=True)
    highest = np.zeros(len(groups), np.int64)
    np.maximum.at(highest, group, cost)
    rank: Lines = np.argsort(np.argsort(-highest, kind="stable"))[group]
    return rank


def _tiles(nodes: Lines, tokens: int) -> tuple[Lines, Lines]:
    """Returns (node, index in the node) of every tile of `tokens` tokens, as two arrays."""
    return _counted(-(-(nodes[:, 1] - nodes[:, 0]) // tokens))


def _counted(counts: Lines) -> tuple[Lines, Lines]:
    """Returns two arrays: each i repeated counts[i] times, and 0 .. counts[i] - 1 for each i."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)


def _order(rank: Lines, cost: Lines, heads: int) -> Lines:
    """Returns item * heads + head by rank; within a rank by head; within a head costly items first.

    CTAs that run at the same time then read the keys of one head, which stay in the L2 cache.
    Cheap items come last, so that no CTA begins a costly item when the others are finishing.
    """
    by_tree = np.lexsort((-cost, rank))
    ends = np.flatnonzero(np.diff(rank[by_tree], append=-1)) + 1
    head = np.arange(heads)[:, None]
    trees = np.split(by_tree, ends[:-1])
    return np.concatenate([(tree * heads + head).ravel() for tree in trees])


def _lines(rows: Sequence[tuple[int, ...]], columns: int) -> Lines:
    return np.array(rows, np.int64).reshape(-1, columns)
