"""The kernels' work, as int32 tables: built on the host from a layout's nodes, copied once.

A table depends on the layout and on how heads are packed: `pack` query heads of one key head share
a tile of 128 rows, so a forward query tile has 128 / pack tokens. A query tile of the backward has
64 rows, of up to 4 heads. The tables of a layout serve all layers, recomputation and the backward.
No tile crosses a node, so nothing of one response reaches another, not even a NaN.

The columns, for whose names see columns.py. `slots` is H / pack, head slot j has the query heads
j pack .. (j + 1) pack, a token's number is its packed one, and a key tile has 128 keys:

header [8]      entries of order, items, spans; entries of kv_order, kv_items, splits; parts; 0

item [n, 9]     a query tile and the key tiles it sees: first its last own tile, which is causal,
                then each span's partial tile, then full own tiles, then the spans' full tiles
    tok0        first query token
    rows        query tokens, up to 128 / pack; less only at a node's end
    node        first token of its node, where its own key tiles begin
    own_tiles   own key tiles; the last shows every row its own key
    own_keys    keys of the node in the last own tile, 128 unless the node ends there
    span0       its first span
    spans       and how many
    partials    spans that end in a partial tile; they are the first ones
    tiles       own tiles, partial tiles and the spans' full tiles
span [m, 3]     keys that all rows see: first key, full tiles, keys of the partial tile or 0
order [n slots] item * slots + head slot, in the order in which they are to begin

kv_item [n, 6]  a key tile and the run of queries that see it, or a part of the run
    k0, keys    first key, and how many, up to 128; of one node
    last        first token of the last query tile, from which the others are walked backwards. It
                ends where the run does, so the run's first tile may begin before the run, in front
                of k0 or of token q_shift or of all
    q_tiles     query tiles of 64 / min(pack, 4) tokens; 0 where nobody sees the keys
    dense       how many of them, the first of the walk, have no query in front of a key
    part        where the part's sums go, or -1: the item is whole and writes dk and dv
split [s, 4]    k0, keys, first part, parts: items to be summed from parts, in that order
kv_order [n Hk] kv_item * Hk + key head, in the order in which they are to begin

A kernel reads a table as far as the header says. Without spans, `span` is a row of zeros: a tensor
of no elements has no address.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.shapes import KEY_TILE, KV_QUERY_ROWS, QUERY_ROWS
from qla_kernels.errors import need

KV_PACK = 4  # heads that share one, at most
SM_COUNT = 132  # of an H100 or H200: how finely the backward's work is cut
SHARES = 6 * SM_COUNT  # of the backward's work; a part is about one of them, if not a whole run
SHORTEST_PART = 16  # query tiles: parts are summed in global memory, which takes time too
SHORTEST_CUT = 384  # query tiles on both sides of a node's end, for a run to be cut there

Lines = np.ndarray[Any, np.dtype[np.int64]]


class Tables(NamedTuple):
    """On the device of the tensors they describe; views of one buffer."""

    header: Tensor
    item: Tensor
    span: Tensor
    order: Tensor
    kv_item: Tensor
    split: Tensor
    kv_order: Tensor


def build(nodes: Tensor, num_heads: int, kv_heads: int, q_shift: int = 0) -> tuple[Tensor, ...]:
    """The tables on the host, in the order of `Tables`; queries begin at token q_shift.

    Args:
        nodes: int32 [n, 3] on the CPU, as in a layout; q_shift is one's first token, or 0.
    """
    pack = head_pack(num_heads, kv_heads)
    lines = nodes.numpy().astype(np.int64)
    _check_nodes(lines)
    rank = _by_cost_of_tree(lines)
    item, span, order = _forward(lines, rank, QUERY_ROWS // pack, num_heads // pack, q_shift)
    kv_tokens = KV_QUERY_ROWS // min(pack, KV_PACK)
    kv_item, split, kv_order = _backward(lines, kv_tokens, kv_heads, q_shift)
    counts = [*map(len, (order, item, span, kv_order, kv_item, split)), int(split[:, 3].sum()), 0]
    found = (np.array(counts), item, span, order, kv_item, split, kv_order)
    return tuple(torch.from_numpy(table.astype(np.int32)) for table in found)


def _check_nodes(nodes: Lines) -> None:
    """Tokens in a row, each of one node: kernels would survive others, with numbers of nothing."""
    first, end, tout = nodes.T
    before = np.r_[0, end][: len(end)]
    wrong = np.flatnonzero((first != before) | (end <= first) | (tout < end))
    if len(wrong):
        got = f"node {tuple(nodes[wrong[0]].tolist())} after token {before[wrong[0]]}"
        fix = "make layouts by SharedLayout.from_forest"
        raise ValueError(need("SharedLayout", got, "nodes depth first, none of them empty", fix))


def one_buffer(tables: tuple[Tensor, ...]) -> Tensor:
    """The tables one behind the other, to be copied at once."""
    return torch.cat([table.flatten() for table in tables])


def views(buffer: Tensor, tables: tuple[Tensor, ...]) -> Tables:
    """The tables in a buffer that lies elsewhere."""
    parts = torch.split(buffer, [table.numel() for table in tables])
    return Tables(*(part.view(table.shape) for part, table in zip(parts, tables, strict=True)))


def _by_cost_of_tree(nodes: Lines) -> Lines:
    """For each node, how many trees have more visible pairs than its own."""
    first, end, tout = nodes.T
    roots = np.maximum.accumulate(np.r_[0, tout][: len(tout)]) <= first
    tree = roots.cumsum() - 1
    pairs = (end - first) * (2 * tout - first - end + 1)
    by_cost = np.argsort(-np.bincount(tree, pairs), kind="stable")
    rank: Lines = np.argsort(by_cost)[tree]
    return rank


def _forward(
    nodes: Lines, rank: Lines, tokens: int, slots: int, q_shift: int
) -> tuple[Lines, Lines, Lines]:
    """item, span and order for query tiles of so many tokens."""
    span, of_node = _spans(nodes)
    node, i = _tiles(nodes, tokens)
    first, end, _ = nodes[node].T
    tok0 = first + i * tokens
    rows = np.minimum(tokens, end - tok0)
    own_tiles = -(-(tok0 + rows - first) // KEY_TILE)
    own_keys = np.minimum(KEY_TILE, end - first - (own_tiles - 1) * KEY_TILE)
    span0, spans, partials, full_tiles = of_node[node].T
    tiles = own_tiles + partials + full_tiles
    item = np.stack(
        [tok0, rows, first, own_tiles, own_keys, span0, spans, partials, tiles], 1
    )[tok0 >= q_shift]  # fmt: skip
    order = _order(rank[node][tok0 >= q_shift], item[:, -1], slots)
    return item, span, order


def _spans(nodes: Lines) -> tuple[Lines, Lines]:
    """The span table, and for each node: its first span, spans, partial tiles and full tiles.

    Siblings see the same spans; ancestors that lie side by side are one.
    """
    table: list[tuple[int, int, int]] = []
    of_node: list[tuple[int, int, int, int]] = []
    path: list[tuple[int, list[tuple[int, int]], tuple[int, int, int, int]]] = []
    for first, end, tout in nodes.tolist():
        while path and path[-1][0] <= first:
            path.pop()
        _, seen, below = path[-1] if path else (0, [], (0, 0, 0, 0))
        of_node.append(below)
        if tout > end:  # it has children, and they see this
            if seen and seen[-1][1] == first:
                seen = [*seen[:-1], (seen[-1][0], end)]
            else:
                seen = [*seen, (first, end)]
            cut = [(k0, *divmod(stop - k0, KEY_TILE)) for k0, stop in seen]
            cut.sort(key=lambda span: span[2] == 0)
            partials = sum(tail > 0 for _, _, tail in cut)
            below = (len(table), len(cut), partials, sum(full for _, full, _ in cut))
            table += cut
        path.append((tout, seen, below))
    return _lines(table or [(0, 0, 0)], 3), _lines(of_node, 4)


def _backward(nodes: Lines, tokens: int, kv_heads: int, q_shift: int) -> tuple[Lines, Lines, Lines]:
    """kv_item, split and kv_order for query tiles of so many tokens.

    A node's runs end together and are cut at the same distances from there, so that CTAs that begin
    together walk the same queries. Where a node is long, its first keys have runs much longer than
    the last: those are cut where the node ends, and begin together once more.
    """
    node, i = _tiles(nodes, KEY_TILE)
    first, end, tout = nodes[node].T
    k0 = first + i * KEY_TILE
    keys = np.minimum(KEY_TILE, end - k0)
    q_tiles, behind = (
        -(-np.maximum(tout - np.maximum(begin, q_shift), 0) // tokens) for begin in (k0, end)
    )
    is_cut = np.minimum(q_tiles - behind, behind) >= SHORTEST_CUT
    rear = np.where(is_cut, behind, q_tiles)
    lengths = np.stack([rear, q_tiles - rear], 1)
    limit = max(SHORTEST_PART, -(-int(q_tiles.sum()) * kv_heads // SHARES))
    fewest = np.stack([np.ones_like(rear), is_cut], 1)
    parts = np.maximum((lengths + limit // 2) // limit, fewest)
    stretch, p = _counted(parts.ravel())  # each part: of which rear or front, and its number there
    whole, is_front = np.divmod(stretch, 2)
    is_last = p + 1 == parts.ravel()[stretch]  # the foremost: it takes what is left
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
    return kv_item, split, _order(_by_dearest(together, part_tiles), part_tiles, kv_heads)


def _by_dearest(group: Lines, cost: Lines) -> Lines:
    """For each item its group's rank: the group with the dearest item comes first."""
    groups, group = np.unique(group, return_inverse=True)
    dearest = np.zeros(len(groups), np.int64)
    np.maximum.at(dearest, group, cost)
    rank: Lines = np.argsort(np.argsort(-dearest, kind="stable"))[group]
    return rank


def _tiles(nodes: Lines, tokens: int) -> tuple[Lines, Lines]:
    """Every tile of so many tokens: its node, and which of the node's tiles it is."""
    return _counted(-(-(nodes[:, 1] - nodes[:, 0]) // tokens))


def _counted(counts: Lines) -> tuple[Lines, Lines]:
    """0 .. counts[i] - 1 for each i: the i's, and the numbers."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)


def _order(rank: Lines, cost: Lines, heads: int) -> Lines:
    """item * heads + head by rank, of a rank head after head, of a head dear items first.

    All SMs so stream what one head's items share, and it stays in the L2 cache; cheap items come
    last, or SMs would wait for one that began a dear item at the end.
    """
    by_tree = np.lexsort((-cost, rank))
    ends = np.flatnonzero(np.diff(rank[by_tree], append=-1)) + 1
    head = np.arange(heads)[:, None]
    trees = np.split(by_tree, ends[:-1])
    return np.concatenate([(tree * heads + head).ravel() for tree in trees])


def _lines(rows: Sequence[tuple[int, ...]], columns: int) -> Lines:
    return np.array(rows, np.int64).reshape(-1, columns)
