"""Simulates how evenly a mask spreads work over ranks and steps, and how long a ring takes.

Work is counted in 64 x 64 tiles: an active tile counts 1, and so do 64 columns over one block of
rows. The report has three imbalances and the makespan. An imbalance is not a slow-down, because a
ring has no barrier: only neighbours wait for each other. The makespan measures the time lost by
waiting.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qla_kernels.runtime.arguments import described, flag, integer, number
from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.shapes import BLOCK

Array = npt.NDArray[np.float64]
Lines = tuple[Sequence[int], Sequence[int]]  # columns and diagonals of a head

OP = "balance_report"


@dataclass(frozen=True)
class Balance:
    """Record: simulated work and times of one attention call on a ring, from `balance_report`.

    In each step a rank computes the attention of its queries to the k and v of one rank. Work and
    times are sums over heads, because one launch computes all heads. str(balance) is one line.

    Attributes:
        work: [ranks, steps], the number of 64 x 64 tiles of the mask that a rank computes in a
            step. 64 columns of the mask over a block of 64 queries count as one tile.
        start: [ranks, steps], when the step begins, in the unit of the times that `balance_report`
            got.
        end: [ranks, steps], when the step ends.
    """

    work: Array
    start: Array
    end: Array

    @property
    def id_total(self) -> float:
        """Imbalance of ranks: work of the busiest rank divided by the mean work of a rank."""
        return float(self.work.sum(1).max() / self.work.sum(1).mean())

    @property
    def id_step(self) -> float:
        """Imbalance of steps: sum of the largest work of each step, divided by the sum of means."""
        return float(self.work.max(0).sum() / self.work.mean(0).sum())

    @property
    def id_within(self) -> float:
        """Imbalance within ranks: heaviest step of a rank by its mean step, mean over ranks."""
        return float((self.work.max(1) / self.work.mean(1)).mean())

    @property
    def makespan(self) -> float:
        """The end time of the last rank, divided by the mean time for which a rank computes.

        1 is perfect.
        """
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
    """Simulates one attention call on a ring: when each rank computes its attention to each chunk.

    A chunk is the k and v of one rank. In each step a rank computes attention to one chunk, as soon
    as its step before has ended and the chunk has arrived. Chunks move from rank to rank around the
    ring. (`sparse_ring_attention` does this between nodes only; within a node it sends a chunk
    straight to each rank.) `t`, `x`, `x_outer` and the resulting times share one unit, such as
    milliseconds.

    Args:
        mask: a `VSIndex`; or a pair (columns, diagonals) for each head; or a square bool array with
            T / 64 rows, which marks the pairs of 64-token blocks in the mask.
        T: tokens of the sequence, a multiple of 64 with at least one block for every rank.
        layout: which rank holds which tokens, such as StripedLayout(world).
        inner_size: for a double ring, the number of ranks per node, a divisor of the number of
            ranks; None for a single ring over all ranks.
        t: time to compute one 64 x 64 tile of one head.
        x: time to send one chunk to the next rank of the node.
        x_outer: time to send one chunk to the next node. The transfer may take as long as all steps
            within a node together.
        columns_last: True counts the work of all columns in the last step, as
            `sparse_ring_attention` computes them. False counts a column in the step whose chunk
            contains the column.

    Returns:
        A `Balance`: the work, start and end of each rank's steps; three properties that measure how
        unevenly the work is spread; and the makespan, which measures the time lost by waiting.

    Raises:
        ValueError: an argument has a wrong type or is out of range, or mask, T, layout and
            inner_size do not fit together.
    """
    T, inner_size = _sizes(T, layout, inner_size)
    times = [_time(name, y) for name, y in (("t", t), ("x", x), ("x_outer", x_outer))]
    columns_last = flag(OP, "columns_last", columns_last)
    world = layout.world
    met = owners(world, inner_size)  # [world, steps]
    tiles, columns = _work(_readable_mask(mask, T), T, layout)
    rank = np.arange(world)[:, None]
    steps = tiles[rank, met]
    if columns_last:
        steps[:, -1] += columns.sum(1)
    else:
        steps += columns[rank, met]
    start, end = _timeline(times[0] * steps, inner_size, *times[1:])
    return Balance(steps, start, end)


def _sizes(T: int, layout: Layout, inner_size: int | None) -> tuple[int, int]:
    """Returns T and inner_size as ints; ValueError if they do not fit each other and the layout."""
    if not isinstance(layout, Layout):
        got, fix = described("layout", layout), "pass one, such as StripedLayout(world)"
        raise ValueError(need(OP, got, "a layout", fix))
    world, T = layout.world, integer(OP, "T", T, "pass the number of tokens")
    blocks, rest = divmod(T, BLOCK)
    if rest or blocks < world or len(set(_owner_of_blocks(T, layout).tolist())) != world:
        got, needs = f"T={T} for {layout}", f"a multiple of {BLOCK} with a block for every rank"
        raise ValueError(need(OP, got, needs, f"pass {layout.pad_len(T)}, for example"))
    fix = "pass the number of ranks on each node"
    inner_size = world if inner_size is None else integer(OP, "inner_size", inner_size, fix)
    if inner_size < 1 or world % inner_size:
        got = f"inner_size is {inner_size} for {world} ranks"
        raise ValueError(need(OP, got, "a divisor of the number of ranks", fix))
    return T, inner_size


def _time(name: str, x: float) -> float:
    """Returns t, x or x_outer as a float.

    Raises ValueError unless it is finite and positive; x and x_outer may be 0.
    """
    fix = "pass a time, in one unit for t, x and x_outer"
    time = number(OP, name, x, fix)
    least = "more than 0" if name == "t" else "0 or more"
    if not (0 <= time < float("inf")) or (name == "t" and time == 0):
        raise ValueError(need(OP, f"{name}={time:g}", f"{least}, and finite", fix))
    return time


def _readable_mask(mask: Any, T: int) -> Any:
    """Returns a block mask unchanged, and the lines of any other mask as pairs of lists of ints.

    Raises ValueError if the mask has another form, or is one for another T.
    """
    blocks = T // BLOCK
    got = ""
    if isinstance(mask, VSIndex) and mask.T != T:
        got = f"mask is an index of {mask.T} tokens"
    if isinstance(mask, np.ndarray) and mask.shape != (blocks, blocks):
        got = f"mask is a block mask of shape {mask.shape}"
    if got:
        needs, fix = f"one of {T} tokens, {blocks} blocks", "pass the T that it was made for"
        raise ValueError(need(OP, got, needs, fix))
    if isinstance(mask, np.ndarray):
        return mask
    if isinstance(mask, VSIndex):
        return [head for row in mask.to_lists() for head in row]
    try:
        heads = [
            ([*map(operator.index, columns)], [*map(operator.index, diagonals)])
            for columns, diagonals in mask
        ]
    except (TypeError, ValueError):
        needs = "a VSIndex, a block mask, or (columns, diagonals) of each head"
        fix = "pass build_index(q, k, pattern), or lists of ints"
        raise ValueError(need(OP, described("mask", mask), needs, fix)) from None
    for head, (columns, diagonals) in enumerate(heads):
        for name, lines, end in (("columns", columns, T), ("diagonals", diagonals, blocks)):
            if lines and not 0 <= min(lines) <= max(lines) < end:
                got = f"head {head} of mask has {name} from {min(lines)} to {max(lines)}"
                needs = f"0 to {end - 1}"
                raise ValueError(need(OP, got, needs, "remove the others, or pass another T"))
    return heads


def owners(world: int, inner: int) -> npt.NDArray[np.int64]:
    """Returns which chunk each rank has in each step of a double ring, as an array [world, world].

    Entry [rank, step] is the rank that owns the chunk; a chunk is the k and v of one rank. In a
    double ring the chunks of a node move between its ranks for `inner` steps, and then on to the
    next node.

    Args:
        world: number of ranks, and of steps.
        inner: number of ranks per node.
    """
    rank, step = np.arange(world)[:, None], np.arange(world)[None, :]
    node = (rank // inner - step // inner) % (world // inner)
    return np.asarray(node * inner + (rank - step) % inner)


def _work(mask: Any, T: int, layout: Layout) -> tuple[Array, Array]:
    """Returns the work of slashes and the work of columns, each [query rank, key rank].

    A tile of a slash counts 1, and a column counts 1 / 64 for each block of rows that sees it by no
    slash. `mask` is a block mask, or (columns, diagonals) of each head.
    """
    world, blocks = layout.world, T // BLOCK
    own = _owner_of_blocks(T, layout)
    if isinstance(mask, np.ndarray):
        i, j = np.nonzero(mask)
        return _counted(own[i], own[j], np.ones(len(i)), world), np.zeros((world, world))
    tiles, column_work = np.zeros((world, world)), np.zeros((world, world))
    below = np.zeros((blocks, world))  # rows of each rank in later blocks
    below[np.arange(blocks), own] = 1
    below = below[::-1].cumsum(0)[::-1] - below
    for columns, diagonals in mask:
        share_of_columns = (
            np.bincount(np.asarray(columns, np.int64) // BLOCK, minlength=blocks) / BLOCK
        )
        np.add.at(column_work.T, own, share_of_columns[:, None] * below)
        for d in diagonals:
            i, j = own[d:], own[: blocks - d]
            tiles += _counted(i, j, np.ones(len(i)), world)
            if d:  # where a slash covers a column, the column is not alone
                column_work -= _counted(i, j, share_of_columns[: blocks - d], world)
    return tiles, column_work


def _owner_of_blocks(T: int, layout: Layout) -> npt.NDArray[np.int64]:
    """Returns the rank that holds each block, int64 [T / 64]."""
    return np.asarray(layout.owner(torch.arange(0, T, BLOCK, device="cpu"), T))


def _counted(i: Any, j: Any, weight: Any, world: int) -> Array:
    """Returns [world, world]: the sum of the weights of each pair of ranks (i, j)."""
    counts: Array = np.bincount(i * world + j, weight, world * world).astype(np.float64)
    return counts.reshape(world, world)


def _timeline(work: Array, inner: int, x: float, x_outer: float) -> tuple[Array, Array]:
    """Returns the start and end times of each rank's steps, given the time of their work.

    A transfer is posted when both of its ranks have begun the step before, and its chunk arrives
    `x` later. The first chunk of a turn comes from the node before: its transfer is posted when the
    previous turn begins, and takes `x_outer`.
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
    """Returns the ratio of work between two layouts: stripes of one token, and of 64 tokens.

    In both, ranks get stripes in turn. Work is the number of 64 x 64 tiles, of a rank's own tokens,
    that have any pair of the mask. With stripes of one token, 64 rows of a rank come from `world`
    blocks of the sequence, so fewer tiles are empty. The result is the work with stripes of one
    token, divided by that with stripes of 64. Valid for up to 64 ranks.

    Args:
        diagonals: the mask: distances, in blocks of 64 tokens, of queries and keys that see each
            other.
        T: tokens of the sequence.
        world: number of ranks.
    """
    blocks = T // BLOCK
    active = np.zeros(blocks, bool)
    active[list(diagonals)] = True
    striped_tiles = sum(blocks - d for d in diagonals)
    spans = blocks // world
    near = [active[max(0, (n - 1) * world + 1) : (n + 1) * world].any() for n in range(spans)]
    return float(sum(world**2 * (spans - n) for n, hit in enumerate(near) if hit) / striped_tiles)


class Latencies(NamedTuple):
    """Record: measured times, in ms, from which a layer's attention time on a ring is estimated.

    A chunk is the k and v of one rank, which the ranks pass around. `flat` estimates the time of
    one ring over all ranks, and `hierarchical` that of rings within the nodes and a ring of nodes.
    Both assume that each time is the same on every rank.

    Attributes:
        chunk: to compute the attention of one rank's queries to one chunk.
        inner: to send one chunk to another rank of the node.
        outer: to send one chunk to another node.
        fixed: what a layer does once: choosing the mask, attention to its columns, work of the
            host.
    """

    chunk: float
    inner: float
    outer: float
    fixed: float

    def flat(self, world: int) -> float:
        """Returns the estimated time, in ms, of one ring over all `world` ranks.

        This is `(world - 1) * max(chunk, outer) + chunk + fixed`, where chunk, outer and fixed are
        the times in this record. A rank has `world` steps; in each it computes attention to one
        chunk (the k and v of one rank), and in all but the last it also sends a chunk.
        """
        return (world - 1) * max(self.chunk, self.outer) + self.chunk + self.fixed

    def hierarchical(self, world: int, inner_size: int) -> float:
        """Returns the estimated time, in ms, of a ring of nodes with a ring of ranks in each node.

        This is `fixed + (world / inner_size) * max(inner_size * max(chunk, inner), outer)`, where
        chunk, inner, outer and fixed are the times in this record. A chunk is the k and v of one
        rank. A layer takes world / inner_size turns. In a turn, the ranks of a node pass around the
        chunks that the node holds and compute attention to each; meanwhile every rank sends one
        chunk to the next node.

        Args:
            world: number of ranks.
            inner_size: number of ranks per node, a divisor of world.
        """
        turn = inner_size * max(self.chunk, self.inner)
        return world // inner_size * max(turn, self.outer) + self.fixed


# As published for 512K tokens on 4 nodes of 8 A100: index 1.13 and host 2.08 ms are the forward's
# fixed part, verticals 1.86 and host 1.90 ms the backward's.
PUBLISHED_FORWARD = Latencies(chunk=0.51, inner=0.13, outer=0.98, fixed=1.13 + 2.08)
PUBLISHED_BACKWARD = Latencies(chunk=2.65, inner=0.42, outer=3.40, fixed=1.86 + 1.90)
