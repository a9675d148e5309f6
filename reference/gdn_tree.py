"""The gated delta rule over a prefix tree: sequences that begin alike store their beginning once.

A node is a run of tokens that belong to the same sequences. It starts from the state in which its
parent ends, a root from 0:

    S_start(n) = S_end(parent(n))
    dS_end(n)  = dS_final(n) + sum over children c, in order, of dS_start(c)

Results are those of every sequence alone, from a root to a leaf; the gradient of a shared token is
the sum over its sequences.

Everywhere: nodes [n, 3] integers, of each node its first token, one past its last token, and its
parent or -1. Parents come before their children, no node is empty, and B is 1. Tokens of no node
are 0 in every result. `rows` [n] is the row of `states` that holds a node's end state, or -1 if
nobody asks for it; each node with children has a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .gdn_backward import Backward, chunked_backward
from .gdn_chunked import chunked, compute_dtype


class TreeForward(NamedTuple):
    g_cum: Tensor  # [1, T, HV] natural log
    A: Tensor  # [1, T, HV, C]
    o: Tensor  # [1, T, HV, V]
    states: Tensor  # [rows, HV, K, V] end states


def levels(nodes: Tensor) -> list[list[int]]:
    """The nodes by their number of ancestors: the nodes of a level do not wait for each other."""
    found: list[list[int]] = []
    depth: list[int] = []
    for node, parent in enumerate(nodes[:, 2].tolist()):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if depth[node] == len(found):
            found.append([])
        found[depth[node]].append(node)
    return found


def tree_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    nodes: Tensor,
    rows: Tensor,
    scale: float | None = None,
    chunk_size: int = 64,
) -> TreeForward:
    """`gdn_chunked.chunked`, a level of nodes at a time; chunks restart at each node."""
    (_, T, HV, V), K, wide = v.shape, q.shape[-1], compute_dtype(q)
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    out = TreeForward(
        g_cum=g.new_zeros(1, T, HV, dtype=wide),
        A=q.new_zeros(1, T, HV, chunk_size),
        o=q.new_zeros(1, T, HV, V),
        states=q.new_zeros(num_rows, HV, K, V, dtype=wide),
    )
    for level in levels(nodes):
        tokens, bounds = _packed(nodes, level)
        starts = _starts(out.states, nodes, rows, level)
        at = slice(None), tokens
        done = chunked(q[at], k[at], v[at], g[at], beta[at], scale, starts, bounds, chunk_size)
        for whole, part in zip(out, done[:3], strict=False):
            whole[:, tokens] = part
        kept = rows[level] >= 0
        out.states[rows[level][kept]] = done.final_state[kept]
    return out


def tree_chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    done: TreeForward,
    do: Tensor,
    nodes: Tensor,
    rows: Tensor,
    dstates: Tensor | None = None,
    scale: float | None = None,
) -> Backward:
    """Gradients from those of o and, if given, of `done.states`; last level first."""
    (_, T, HV, _), wide, chunk_size = v.shape, compute_dtype(q), done.A.shape[-1]
    ends = done.states.new_zeros(len(done.states) + 1, *done.states.shape[1:])  # row -1 stays 0
    if dstates is not None:
        ends[:-1] = dstates
    grads = Backward(
        dq=torch.zeros_like(q),
        dk=torch.zeros_like(k),
        dv=torch.zeros_like(v),
        dbeta=torch.zeros_like(beta),
        dg=q.new_zeros(1, T, HV, dtype=wide),
        dh0=None,
    )
    for level in reversed(levels(nodes)):
        tokens, bounds = _packed(nodes, level)
        starts = _starts(done.states, nodes, rows, level)
        at = slice(None), tokens
        part = chunked_backward(
            q[at],
            k[at],
            v[at],
            done.g_cum[at],
            beta[at],
            done.A[at],
            do[at],
            ends[rows[level]],
            scale,
            starts,
            bounds,
            chunk_size,
        )
        for whole, found in zip(grads[:5], part[:5], strict=True):
            whole[:, tokens] = found
        assert part.dh0 is not None, "every node has a start state"
        for node, dstart in zip(level, part.dh0, strict=True):
            parent = int(nodes[node, 2])
            if parent >= 0:  # one after the other: one order
                ends[rows[parent]] += dstart
    return grads


def _packed(nodes: Tensor, level: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens of a level's nodes end to end, and the nodes' bounds among them."""
    spans = nodes[level, :2].tolist()
    bounds = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0)
    return torch.cat([torch.arange(first, end) for first, end in spans]), bounds


def _starts(states: Tensor, nodes: Tensor, rows: Tensor, level: list[int]) -> Tensor:
    """The state that enters each node of a level: its parent's, or 0."""
    parents = nodes[level, 2].long()
    found = states.new_zeros(len(level), *states.shape[1:])
    inner = parents >= 0
    found[inner] = states[rows[parents[inner]].long()]
    return found
