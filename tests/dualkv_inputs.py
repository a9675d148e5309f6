"""Forests of sequences, packed by hand, and attention as if nothing were shared."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from qla_kernels.lab.selftest.dualkv_forward import FEW_TOKENS as GROUPS
from qla_kernels.lab.selftest.dualkv_forward import Groups, qkv

__all__ = [
    "GROUPS",
    "Forest",
    "Groups",
    "any_forest",
    "any_groups",
    "any_tree",
    "folded",
    "forest",
    "gradients",
    "grown",
    "qkv",
    "replicated",
]

Tree = tuple[int, tuple[Any, ...]]  # tokens of a node, and its children


class Forest(NamedTuple):
    tout: Tensor  # [T]
    nodes: Tensor  # [n, 3]
    paths: list[list[int]]  # packed tokens of every sequence, leaf by leaf


def forest(trees: Sequence[Tree]) -> Forest:
    """Depth first, token by token; nodes without tokens leave no row in `nodes`."""
    tout: list[int] = []
    nodes: list[list[int]] = []
    paths: list[list[int]] = []

    def walk(tree: Tree, before: list[int]) -> None:
        length, children = tree
        first = len(tout)
        tout.extend([0] * length)
        here = list(range(first, first + length))
        row = len(nodes)
        nodes.append([first, first + length, 0])
        for child in children:
            walk(child, before + here)
        nodes[row][2] = len(tout)
        for token in here:
            tout[token] = len(tout)
        if not children:
            paths.append(before + here)

    for tree in trees:
        walk(tree, [])
    kept = [node for node in nodes if node[0] < node[1]]
    return Forest(
        torch.tensor(tout, dtype=torch.int32),
        torch.tensor(kept, dtype=torch.int32).reshape(-1, 3),
        [path for path in paths if path],
    )


def grown(groups: Groups) -> Forest:
    return forest([(prompt, tuple((r, ()) for r in responses)) for prompt, responses in groups])


def replicated(
    q: Tensor, k: Tensor, v: Tensor, paths: list[list[int]], scale: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """(o, lse) of each sequence alone, under a plain causal mask; [len, H, D] and [H, len]."""
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    heads_of = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    outs, lses = [], []
    for path in paths:
        rows = torch.tensor(path)
        scores = scale * torch.einsum("qhd,khd->hqk", q[rows], k[rows][:, heads_of])
        future = torch.ones(len(path), len(path), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows][:, heads_of]))
        lses.append(scores.logsumexp(-1))
    return outs, lses


def folded(parts: list[Tensor], paths: list[list[int]], tokens: int) -> Tensor:
    """Packed rows as the average of a token's replicas, which are equal; dim 0 is the token."""
    if not parts:
        return torch.zeros(tokens)
    rows = torch.tensor([token for path in paths for token in path])
    total = parts[0].new_zeros(tokens, *parts[0].shape[1:]).index_add(0, rows, torch.cat(parts))
    times = torch.bincount(rows, minlength=tokens).reshape(-1, *[1] * (total.dim() - 1))
    return total / times


def gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a loss in which every element of every result has another weight."""
    draw = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)).sum()
        for x in results
    )
    return torch.autograd.grad(loss, leaves)


lengths = st.integers(0, 12)
any_groups = st.lists(st.tuples(lengths, st.lists(lengths, max_size=5)), max_size=4)
leaves = st.tuples(lengths, st.just(()))
any_tree = st.recursive(
    leaves, lambda below: st.tuples(lengths, st.lists(below, max_size=3).map(tuple)), max_leaves=8
)
any_forest = st.lists(any_tree, max_size=3)
