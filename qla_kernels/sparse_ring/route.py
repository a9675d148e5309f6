"""Moves chunks (k and v of one rank) to the other ranks, by one of three schedules.

A schedule is an iterator over batches; a batch is the chunks that one launch visits. The iterator
posts the transfers of the next batch before it yields a batch, and waits for them when it is
advanced, so that the transfers run while the launch computes.

    allgather     One batch of all chunks, in one buffer, so there are no partial results. The
                  transfer runs during the work that a call does before it asks for the batch. If
                  the call begins with the own chunk, there are two batches, and the transfer runs
                  during the first.
    ring          At step s a rank has the chunk of rank - s. The chunks of a batch come straight
                  from their owners, all at the same time.
    double_ring   The ring within each node, and an outer ring between nodes, around which chunks
                  are passed on: one turn of the inner ring for each step of the outer ring.

The ring is the double ring with one node. Chunks once were passed on within a node, too: then the
transfers of a batch wait for each other, and 8 ranks took four times as long for them as now
(docs/lessons.md).
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from qla_kernels.sparse_ring.groups import ALONE, Pending, RankRing, RingGroups, Swap

KV_TAG, GRADIENT_TAG = 0, 2  # k and v take tags 0 and 1


class Chunk(NamedTuple):
    """One rank's k and v: the rank, their slot in a batch's buffers, and when they come."""

    owner: int
    slot: int
    turn: int  # outer step
    step: int  # inner step


class Batch(NamedTuple):
    """The chunks that one launch visits, and the buffers that hold them."""

    k: Tensor  # [slots, B, L, Hk, D]
    v: Tensor
    chunks: list[Chunk]
    first: bool  # the first batch of a call
    last: bool  # the last batch of a call


class Route(NamedTuple):
    """The rings over which a call's chunks travel. `inner` and `outer` are ALONE in allgather."""

    whole: RankRing
    inner: RankRing
    outer: RankRing
    gathers: bool  # the schedule is allgather
    per_launch: int  # chunks of a batch, after the first batch

    def batches(self, k: Tensor, v: Tensor, own_first: bool = False) -> Iterator[Batch]:
        """Returns an iterator over the batches of this rank's k and v, and posts first transfers.

        All transfers that can run before or during the first launch are posted on return. With
        `own_first` a schedule that gathers has a first batch of the own chunk; others always do.
        """
        if self.inner.size == self.outer.size == 1 and not self.gathers:
            own = [Chunk(0, 0, 0, 0)]
            return iter([Batch(k[None], v[None], own, first=True, last=True)])
        if self.gathers:
            own_chunk = (k[None], v[None]) if own_first and self.whole.size > 1 else None
            return _gathered(self.whole, self.whole.gather(k, v), own_chunk)
        to_come = _circulated(self, k, v)
        return chain([next(to_come)], to_come)

    def kept(self, k: Tensor, v: Tensor) -> Iterator[Batch]:
        """Returns the batches of a schedule that gathers, given k and v of all ranks."""
        return _gathered(self.whole, Pending([], [k, v]), None)

    def owner(self, turn: int, step: int) -> int:
        """Returns the rank whose chunk this rank has at outer step `turn`, inner step `step`."""
        node = (self.outer.rank - turn) % self.outer.size
        return node * self.inner.size + (self.inner.rank - step) % self.inner.size


LOCAL = Route(ALONE, ALONE, ALONE, gathers=False, per_launch=1)


def route_of(groups: RingGroups | None, schedule: str, per_launch: int) -> Route:
    """Returns the route of a call; that of a single rank if there is only one."""
    if groups is None or groups.world == 1:
        return LOCAL
    if schedule == "double_ring":
        return Route(groups.whole, groups.inner, groups.outer, False, per_launch)
    # If the inner ring has all ranks, its process group is used: the collectives of an index run in
    # the group of `whole`, and transfers of one group wait for each other.
    ring = groups.inner if groups.inner.size == groups.world else groups.whole
    if schedule == "allgather":
        return Route(ring, ALONE, ALONE, True, per_launch)
    return Route(ring, ring, ALONE, False, per_launch)


def _gathered(
    ring: RankRing, arriving: Pending, own: tuple[Tensor, Tensor] | None
) -> Iterator[Batch]:
    """Yields a batch of all chunks, or if `own` is given, one of this and one of the others."""
    if own is not None:
        yield Batch(*own, [Chunk(ring.rank, 0, 0, 0)], first=True, last=False)
    k_all, v_all = arriving.wait()
    owners = [r for r in range(ring.size) if own is None or r != ring.rank]
    chunks = [Chunk(owner, owner, 0, 0) for owner in owners]
    yield Batch(k_all, v_all, chunks, first=own is None, last=True)


class _Place(NamedTuple):
    """The place of one chunk: a slot of two buffers, [slots, B, L, Hk, D] each."""

    k: Tensor
    v: Tensor
    slot: int

    @property
    def chunk(self) -> list[Tensor]:
        """k and v of the chunk."""
        return [self.k[self.slot], self.v[self.slot]]


def _circulated(route: Route, k: Tensor, v: Tensor) -> Iterator[Batch]:
    """Yields the batches of ring and double_ring; posts transfers one batch ahead."""
    inner, outer = route.inner, route.outer
    turn_k, turn_v = _buffers(k, v, min(2 * route.per_launch, inner.size - 1))
    node_k, node_v = _buffers(k, v, min(2, outer.size - 1))
    batches = steps_of_launches(inner.size, route.per_launch)
    held = _Place(k[None], v[None], 0)  # the chunk that this rank gives to its node in this turn
    for turn in range(outer.size):
        later = (_Place(turn_k, turn_v, i % len(turn_k)) for i in range(inner.size - 1))
        places = [held, *later]
        from_node, following = None, held
        if turn + 1 < outer.size:
            following = _Place(node_k, node_v, turn % len(node_k))
            from_node = outer.shift(held.chunk, following.chunk, KV_TAG)
        for n, steps in enumerate(batches):
            then = batches[n + 1] if n + 1 < len(batches) else range(0)
            coming = None
            if then:
                at = inner.rank
                swaps = [Swap(held.chunk, places[i].chunk, at + i, at - i) for i in then]
                coming = inner.swap(swaps, KV_TAG)
            here = places[steps[0]]
            chunks = [Chunk(route.owner(turn, i), places[i].slot, turn, i) for i in steps]
            last = turn + 1 == outer.size and n + 1 == len(batches)
            yield Batch(here.k, here.v, chunks, first=turn == n == 0, last=last)
            if coming is not None:
                coming.wait()
        if from_node is not None:
            from_node.wait()
        held = following


def steps_of_launches(size: int, per_launch: int) -> list[range]:
    """Returns the steps of a turn, grouped by launch.

    Step 0 has a launch of its own, because its chunk is the only one that is there at the start.
    """
    later = [range(i, min(i + per_launch, size)) for i in range(1, size, per_launch)]
    return [range(1), *later]


def _buffers(k: Tensor, v: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(slots, *k.shape), v.new_empty(slots, *v.shape)
