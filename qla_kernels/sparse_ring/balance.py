"""How evenly a mask spreads over ranks and steps, and how long a ring then takes: a simulator.

Work is counted in 64 x 64 tiles: an active tile is one, and so are 64 columns over a block of rows.
Three degrees of imbalance are reported, and the makespan. An imbalance is not a slow-down: a ring
has no barrier, only neighbours that wait for each other; the makespan is what a schedule loses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qla_kernels.errors import need
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.shapes import BLOCK

Array = npt.NDArray[np.float64]
Lines = tuple[Sequence[int], Sequence[int]]  # columns and diagonals of a head


@dataclass(frozen=True)
class Balance:
    """What a call costs; `work` sums the heads, because a launch runs them together."""

    work: Array  # [world, steps] tiles of each rank in each step of its ring
    start: Array  # [world, steps] when each step begins, in the unit of t, x and x_outer
    end: Array  # [world, steps]

    @property
    def id_total(self) -> float:
        """Worker level: the busiest rank's work by the mean."""
        return float(self.work.sum(1).max() / self.work.sum(1).mean())

    @property
    def id_step(self) -> float:
        """Step level: the time of a ring with a barrier after each step, by that of an even one."""
        return float(self.work.max(0).sum() / self.work.mean(0).sum())

    @property
    def id_within(self) -> float:
        """The heaviest step of a rank by its mean step, mean over ranks."""
        return float((self.work.max(1) / self.work.mean(1)).mean())

    @property
    def makespan(self) -> float:
        """When the last rank is done, by the mean work of a rank: 1 is perfect."""
        return float(self.end.max() / (self.end - self.start).sum(1).mean())

    def __str__(self) -> str:
        return (
            f"imbalance {self.id_total:.3f} over ranks, {self.id_step:.3f} over steps, "
            f"{self.id_within:.3f} within ranks; makespan {self.makespan:.3f}"
        )


def balance_report(
    mask: VSIndex | Sequence[Lines] | npt.NDArray[np.bool_],
    T: int,
    *,
    layout: Layout,
    inner_size: int | None = None,
    t: float = 1.0,
    x: float = 0.0,
    x_outer: float = 0.0,
    columns_last: bool = False,
) -> Balance:
    """Simulate one attention call: when each rank computes which chunk, and for how long.

    A rank starts a step when it is done with the one before and the chunk of this one has come.
    Time has no unit of its own: `t`, `x` and `x_outer` are in the same one, such as milliseconds,
    and the result's times are in it, too. With the defaults a tile takes 1 and a transfer nothing.

    Args:
        mask: an index, (columns, diagonals) of each head, or a block mask [T / 64, T / 64].
        T: tokens: whole blocks of 64, and at least one for every rank.
        layout: who holds what.
        inner_size: ranks a node of a double ring, a divisor of all ranks; None for the plain ring.
        t: time that a rank takes for a 64 x 64 tile, of one head.
        x: time that a chunk of k and v takes from a rank to the next one of its node.
        x_outer: the same from node to node; it has a whole turn of the inner ring to arrive.
        columns_last: columns are attended to in the last step, as our launches do, instead of where
            their rows are.

    Returns:
        Balance: `work`, `start` and `end` of each rank's steps, [world, world]; three imbalances,
        busiest by mean, 1 if even: `id_total` of ranks, `id_step` of the ranks in each step,
        `id_within` of a rank's steps; and `makespan`, the time until the last rank is done by
        the mean time that a rank computes, which is what waiting costs. It prints as one line.
    """
    world = layout.world
    inner_size = world if inner_size is None else inner_size
    _check(mask, T, layout, inner_size)
    met = owners(world, inner_size)  # [world, steps]
    tiles, of_columns = _work(mask, T, layout)
    rank = np.arange(world)[:, None]
    steps = tiles[rank, met]
    if columns_last:
        steps[:, -1] += of_columns.sum(1)
    else:
        steps += of_columns[rank, met]
    start, end = _timeline(t * steps, inner_size, x, x_outer)
    return Balance(steps, start, end)


def _check(mask: Any, T: int, layout: Layout, inner_size: int) -> None:
    ranks = set(range(layout.world))
    blocks, rest = divmod(T, BLOCK)
    if rest or blocks < layout.world or set(_owner_of_blocks(T, layout).tolist()) != ranks:
        got, needs = f"T={T} for {layout}", f"a multiple of {BLOCK} with a block for every rank"
        raise ValueError(need("balance_report", got, needs, f"try {layout.pad_len(T)}"))
    if inner_size < 1 or layout.world % inner_size:
        got = f"inner_size is {inner_size} for {layout.world} ranks"
        fix = "pass the number of ranks on each node"
        raise ValueError(need("balance_report", got, "a divisor of the number of ranks", fix))
    of_another = ""
    if isinstance(mask, VSIndex) and mask.T != T:
        of_another = f"an index of {mask.T} tokens"
    if isinstance(mask, np.ndarray) and mask.shape != (T // BLOCK, T // BLOCK):
        of_another = f"a block mask {mask.shape}"
    if of_another:
        needs, fix = f"one of {T} tokens, {T // BLOCK} blocks", "pass the T that it was made for"
        raise ValueError(need("balance_report", of_another, needs, fix))


def owners(world: int, inner: int) -> npt.NDArray[np.int64]:
    """Whose chunk each rank has in each step of a double ring, [world, world]."""
    rank, step = np.arange(world)[:, None], np.arange(world)[None, :]
    node = (rank // inner - step // inner) % (world // inner)
    return np.asarray(node * inner + (rank - step) % inner)


def _work(mask: Any, T: int, layout: Layout) -> tuple[Array, Array]:
    """Tiles, and columns / 64 over row blocks, of each (query rank, key rank)."""
    world, blocks = layout.world, T // BLOCK
    own = _owner_of_blocks(T, layout)
    if isinstance(mask, np.ndarray):
        i, j = np.nonzero(mask)
        return _counted(own[i], own[j], np.ones(len(i)), world), np.zeros((world, world))
    if isinstance(mask, VSIndex):
        mask = [head for row in mask.to_lists() for head in row]
    tiles, of_columns = np.zeros((world, world)), np.zeros((world, world))
    below = np.zeros((blocks, world))  # rows of each rank in later blocks
    below[np.arange(blocks), own] = 1
    below = below[::-1].cumsum(0)[::-1] - below
    for columns, diagonals in mask:
        held = np.bincount(np.asarray(columns, np.int64) // BLOCK, minlength=blocks) / BLOCK
        np.add.at(of_columns.T, own, held[:, None] * below)
        for d in diagonals:
            i, j = own[d:], own[: blocks - d]
            tiles += _counted(i, j, np.ones(len(i)), world)
            if d:  # where a slash covers a column, the column is not alone
                of_columns -= _counted(i, j, held[: blocks - d], world)
    return tiles, of_columns


def _owner_of_blocks(T: int, layout: Layout) -> npt.NDArray[np.int64]:
    return np.asarray(layout.owner(torch.arange(0, T, BLOCK, device="cpu"), T))


def _counted(i: Any, j: Any, weight: Any, world: int) -> Array:
    counts: Array = np.bincount(i * world + j, weight, world * world).astype(np.float64)
    return counts.reshape(world, world)


def _timeline(work: Array, inner: int, x: float, x_outer: float) -> tuple[Array, Array]:
    """Start and end of each step. A transfer is posted when both of its ranks begin a step.

    A chunk is here `x` later; the first of a turn comes from the node before, which posted it when
    the turn before began.
    """
    world, steps = work.shape
    rank = np.arange(world)
    left = rank - rank % inner + (rank - 1) % inner
    before = (rank - inner) % world
    start, end = np.zeros_like(work), np.zeros_like(work)
    end[:, 0] = work[:, 0]
    for s in range(1, steps):
        # the first step of a turn waits for what was posted when the last turn began
        posted, source, takes = (s - 1, left, x) if s % inner else (s - inner, before, x_outer)
        arrives = np.maximum(start[:, posted], start[source, posted]) + takes
        start[:, s] = np.maximum(end[:, s - 1], arrives)
        end[:, s] = start[:, s] + work[:, s]
    return start, end


def token_stripe_tiles(diagonals: Sequence[int], T: int, world: int) -> float:
    """Tiles that stripes of single tokens would make active, by those of the mask.

    A local tile then spans `world` blocks of the sequence, so tiles n apart see each other if any
    diagonal from (n - 1) world + 1 to (n + 1) world - 1 is active. Up to 64 ranks.
    """
    blocks = T // BLOCK
    active = np.zeros(blocks, bool)
    active[list(diagonals)] = True
    mine = sum(blocks - d for d in diagonals)
    spans = blocks // world
    near = [active[max(0, (n - 1) * world + 1) : (n + 1) * world].any() for n in range(spans)]
    return float(sum(world**2 * (spans - n) for n, hit in enumerate(near) if hit) / mine)


class Latencies(NamedTuple):
    """Milliseconds of the parts of one layer's attention, on every rank alike."""

    chunk: float  # attention to one chunk
    inner: float  # a transfer inside a node
    outer: float  # a transfer between nodes
    fixed: float  # index, verticals, host

    def flat(self, world: int) -> float:
        """One ring over all ranks: each step hides behind the slowest link, or the other way."""
        return (world - 1) * max(self.chunk, self.outer) + self.chunk + self.fixed

    def hierarchical(self, world: int, inner_size: int) -> float:
        """A transfer between nodes hides behind a whole turn of the inner ring."""
        turn = inner_size * max(self.chunk, self.inner)
        return world // inner_size * max(turn, self.outer) + self.fixed


# As published for 512K tokens on 4 nodes of 8 A100: index 1.13 and host 2.08 ms are the forward's
# fixed part, verticals 1.86 and host 1.90 ms the backward's.
PUBLISHED_FORWARD = Latencies(chunk=0.51, inner=0.13, outer=0.98, fixed=1.13 + 2.08)
PUBLISHED_BACKWARD = Latencies(chunk=2.65, inner=0.42, outer=3.40, fixed=1.86 + 1.90)
