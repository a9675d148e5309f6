"""Inputs of convolutions over trees and packs, and the convolution of every sequence alone."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tests.dualkv_inputs import Forest, Tree, folded, forest, grown

WIDTHS = (2, 3, 4)

CHAIN = (1, ((1, ((1, ((2, ()), (1, ()))),)),))  # four nodes, shorter than the convolution
LENGTHS = {  # of packed sequences
    "one": [9],
    "ragged": [5, 1, 3, 2, 17, 4],
    "empty ones": [0, 3, 0, 0, 2, 0],
    "single tokens": [1] * 9,
    "nothing": [0, 0],
}
TREES: dict[str, Sequence[Tree]] = {
    "a chain of single tokens": [CHAIN],
    "short nodes": [(2, ((1, ((3, ()), (1, ()), (2, ((1, ()),)))), (3, ((1, ()), (5, ())))))],
    "empty inner nodes": [(2, ((0, ((3, ()), (1, ()))), (2, ((0, ()),)))), (0, ((0, ((2, ()),)),))],
    "turns": [(9, ((4, ((7, ((5, ((3, ()),)),)),)), (6, ()))), (11, ())],
    "two trees": [(3, ((8, ()), (1, ()))), (2, (CHAIN,))],
    "many leaves": [(5, tuple((1 + i % 5, ()) for i in range(64)))],
}
FORESTS = {name: forest(trees) for name, trees in TREES.items()}
FORESTS |= {name: grown([(n, []) for n in lengths]) for name, lengths in LENGTHS.items()}


def bounds_of(packed: Forest) -> Tensor:
    return torch.tensor([*packed.nodes[:, 0].tolist(), len(packed.tout)])


def halo_of(packed: Forest, width: int) -> Tensor:
    """The tokens before each node's first, looked up in a sequence that contains it."""
    path_of = {token: path for path in packed.paths for token in path}
    rows = []
    for first in packed.nodes[:, 0].tolist():
        before = path_of[first][: path_of[first].index(first)]
        rows.append(([-1] * width + before)[len(before) + 1 :])
    return torch.tensor(rows, dtype=torch.long).view(-1, width - 1)


def packed_bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def tensors(
    tokens: int, channels: int = 5, width: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, weight and bias, all of which require gradients."""
    shapes = (tokens, channels), (channels, width), (channels,)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def replicated(
    alone: Callable[..., Tensor], packed: Forest, x: Tensor, *parameters: Tensor | None
) -> Tensor:
    """y [T, C] from runs of each sequence alone; a token's replicas are averaged."""
    outs = [alone(x[torch.tensor(path)], *parameters) for path in packed.paths]
    return folded(outs, packed.paths, len(packed.tout)) if outs else torch.zeros_like(x)
