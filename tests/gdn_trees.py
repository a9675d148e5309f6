"""Prefix trees on which the gated delta rule is tested, and its answer for every sequence alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels import SharedLayout
from reference import gdn


class Forest(NamedTuple):
    """Lengths and parents of nodes in depth-first order; lengths may be 0."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def layout(self) -> SharedLayout:
        return SharedLayout.from_forest(self.lengths, self.parents)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def sequences(self) -> list[Tensor]:
        """The tokens of each sequence, from a root to a node without children."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        paths: list[Tensor] = []
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            own = torch.arange(ends[node], ends[node] + length)
            paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
        return [path for node, path in enumerate(paths) if node not in {*self.parents}]

    def leaf_sequences(self) -> list[Tensor]:
        """The sequence of each leaf among the nodes that have tokens."""
        kept = self.layout.nodes.tolist()
        leaves = [first for first, end, tout in kept if end == tout]
        ends_in = {int(s[-1]): s for s in self.sequences() if len(s)}
        nodes = {first: end for first, end, _ in kept}
        return [ends_in[nodes[first] - 1] for first in leaves]


def drawn(seed: int, depth: int, fan: int = 3, longest: int = 30, trees: int = 2) -> Forest:
    """Nodes of 0 to `longest` tokens, half of them of 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    parents: list[int] = []

    def draw(high: int) -> int:
        return int(torch.randint(high + 1, (), generator=generator))

    def grow(parent: int, left: int) -> None:
        lengths.append(draw(3) if draw(1) else draw(longest))
        parents.append(parent)
        node = len(lengths) - 1
        if left > 1:
            for _ in range(draw(fan)):
                grow(node, left - 1)

    for _ in range(trees):
        grow(-1, depth)
    return Forest(tuple(lengths), tuple(parents))


FORESTS = {
    **{f"depth {d}, {s}": drawn(s, d) for d in (1, 2, 3, 4) for s in range(6)},
    "tiny nodes": Forest((1, 1, 1, 1, 2, 0, 1, 3), (-1, 0, 1, 2, 2, 1, 5, 5)),
    "empty nodes": Forest((0, 3, 0, 0, 2, 0), (-1, 0, 1, 2, 3, -1)),
    "a group": Forest((130, 70, 0, 64, 1, 65), (-1, 0, 0, 0, 0, 0)),
    "nothing": Forest((), ()),
    "300 leaves": Forest((5, *[2] * 300), (-1, *[0] * 300)),
}


def alone(forest: Forest, given: dict[str, Tensor], do: Tensor, dfinal: Tensor | None = None):
    """o, final states and gradients when every sequence runs by itself.

    `given` are q, k, v, g and beta of the packed tokens. A token's gradient of o is divided among
    the sequences that contain it. Tokens of no sequence do not occur.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    sequences = [s for s in forest.sequences() if len(s)]
    shares = torch.zeros(forest.num_tokens, dtype=do.dtype)
    for s in sequences:
        shares[s] += 1
    o, loss = torch.zeros_like(do), 0.0
    ends = {}
    for s in sequences:
        found, state = gdn.recurrent(*(x[:, s] for x in leaves.values()))
        o[:, s] = found.detach()
        loss = loss + (found * (do / shares.view(1, -1, 1, 1))[:, s]).sum()
        ends[tuple(s.tolist())] = state
    final = [ends[tuple(s.tolist())][0] for s in forest.leaf_sequences()]
    if dfinal is not None and final:
        loss = loss + (torch.stack(final) * dfinal).sum()
    if not sequences:
        return o, [], {name: torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return o, [x.detach() for x in final], dict(zip(leaves, grads, strict=True))
