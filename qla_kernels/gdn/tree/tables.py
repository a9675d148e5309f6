"""The tables of a prefix tree: which tokens and states each launch of a tree's kernels works on.

A node is a run of tokens; its level is the number of its ancestors. The nodes of a level do not
wait for each other, so that a launch of a chain runs a level. *Level order* takes the nodes of
level 0, then those of level 1, ..; within a level it is the nodes' own order, in which the children
of a node are neighbours.

The host computes all tables from lengths, which it knows. They take O(nodes and chunks) memory.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qla_kernels.tile.constants import CHUNK

SIBLINGS = 128  # nodes whose gradients of start states lie in memory at a time

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class DeltaTables(NamedTuple):
    """The tables, int32; the first three stay on the CPU, the others lie with the call's tensors.

    `tree_tables` makes them. State rows number the end states that are kept: those of nodes with
    children, in level order, then those of the leaves, in their own order, if final states were
    asked for. -1 stands for no row.
    """

    # [n, 4], a row for each node: first token, one past the last, parent or -1, row of its end
    nodes: Tensor
    levels: Tensor  # [levels + 1] first node of each level, in level order
    # [blocks, 4], at most SIBLINGS nodes of one level, not 0, in level order: first node, one past
    # the last, first run, one past the last
    blocks: Tensor
    bounds: Tensor  # [n + 1] tokens of each node; they cover all tokens
    starts: Tensor  # [n] the row of the state from which each node starts
    spans: Tensor  # [n, 2] first token, one past the last; in level order
    level_starts: Tensor  # [n] in level order: as `starts`
    level_ends: Tensor  # [n] in level order: the row to which the node's end state goes
    level_chunks: Tensor  # [n] in level order: the node's first chunk
    chunks: Tensor  # [num_chunks, 2] as varlen.ChunkTable's
    num_chunks: Tensor  # [1] likewise
    first_chunk: Tensor  # [n + 1] likewise
    owner: Tensor  # [num_chunks] the place in level order of the node that owns the chunk
    runs: Tensor  # [runs, 3] siblings in a block: the first, counted from the block's; row; count
    inner: Tensor  # [nodes with children] their numbers, in the order of their rows
    leaves: Tensor  # [leaves] their numbers, in the order of their rows; [0] if nobody asked

    @property
    def num_rows(self) -> int:
        """The number of end states that are kept."""
        return self.inner.shape[0] + self.leaves.shape[0]


ON_HOST = 3  # fields that stay on the CPU


def tree_tables(
    bounds: Sequence[int], parents: Sequence[int], output_final_state: bool
) -> DeltaTables:
    """Returns the tables of a tree, on the CPU.

    Args:
        bounds: node n has the tokens bounds[n] to bounds[n + 1], at least one.
        parents: of each node the number of an earlier node, or -1. Nodes are in depth-first order.
        output_final_state: keep the end states of leaves, too.
    """
    n, ends = len(parents), np.asarray(bounds, dtype=np.int64)
    up = np.asarray(parents, dtype=np.int64)
    level = np.zeros(n, dtype=np.int64)
    for node, parent in enumerate(parents):
        level[node] = 0 if parent < 0 else level[parent] + 1
    order = np.argsort(level, kind="stable")
    place = np.argsort(order)  # of each node in level order

    has_children = np.zeros(n, dtype=bool)
    has_children[up[up >= 0]] = True
    inner = order[has_children[order]]
    leaves = np.flatnonzero(~has_children) if output_final_state else order[:0]
    rows = np.full(n + 1, -1)  # the last one is that of parent -1
    rows[np.concatenate([inner, leaves])] = np.arange(len(inner) + len(leaves))
    starts = rows[up]

    chunks = -(-np.diff(ends) // CHUNK)
    first = np.concatenate([[0], chunks.cumsum()])
    of_node = np.arange(n).repeat(chunks)
    tok0 = ends[of_node] + (np.arange(first[-1]) - first[of_node]) * CHUNK
    tokens = np.minimum(ends[of_node + 1] - tok0, CHUNK)

    spans = np.stack([ends[:-1], ends[1:]], 1)
    levels = np.searchsorted(level[order], np.arange(level.max(initial=-1) + 2))
    blocks, runs = _sums(levels, up[order], starts[order])
    return DeltaTables(
        _int32(np.column_stack([spans, up, rows[:n]])),
        _int32(levels),
        _int32(blocks),
        _int32(ends),
        _int32(starts),
        _int32(spans[order]),
        _int32(starts[order]),
        _int32(rows[order]),
        _int32(first[order]),
        _int32(np.stack([tok0, tokens], 1)),
        _int32(first[-1:]),
        _int32(first),
        _int32(place[of_node]),
        _int32(runs),
        _int32(inner),
        _int32(leaves),
    )


def _sums(levels: Numbers, up: Numbers, starts: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the tables `blocks` and `runs`; parents and start rows are in level order."""
    blocks, runs = [], list[tuple[int, int, int]]()
    for begin, end in zip(levels[1:-1].tolist(), levels[2:].tolist(), strict=True):
        for a in range(begin, end, SIBLINGS):
            b = min(a + SIBLINGS, end)
            edges = [a, *(a + 1 + np.flatnonzero(np.diff(up[a:b]))).tolist(), b]
            blocks.append((a, b, len(runs), len(runs) + len(edges) - 1))
            runs += [(i - a, int(starts[i]), j - i) for i, j in itertools.pairwise(edges)]
    return np.array(blocks).reshape(-1, 4), np.array(runs).reshape(-1, 3)


def moved_together(tables: DeltaTables, buffer: Tensor) -> DeltaTables:
    """Returns the tables as views of a buffer, the result of `one_buffer` on any device."""
    views, begin = [], 0
    for table in tables[ON_HOST:]:
        views.append(buffer[begin : begin + table.numel()].view(table.shape))
        begin += -(-table.numel() // ALIGNED) * ALIGNED
    return DeltaTables(*tables[:ON_HOST], *views)


ALIGNED = 4  # numbers: each table begins at a multiple of 16 bytes


def one_buffer(tables: DeltaTables) -> Tensor:
    """Returns the tables that do not stay on the host, end to end."""
    room = [
        torch.nn.functional.pad(table.flatten(), (0, -table.numel() % ALIGNED))
        for table in tables[ON_HOST:]
    ]
    return torch.cat(room)


def _int32(numbers: Numbers) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
