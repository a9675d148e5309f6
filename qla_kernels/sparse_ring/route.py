"""Moves chunks (k and v of one rank) to the other ranks, by one of three schedules.

A schedule is an iterator over batches; a batch is the chunks that one launch visits. The iterator
posts the transfers of the next batch before it yields a batch, and waits for them when it is
advanced, so that the transfers run while the launch computes.

    allgather     One batch of all chunks, in one buffer, so there are no partial results. The
                  transfer runs during the work that a call does before it asks for the batch.
    ring          One ring over all ranks: at step s a rank has the chunk of rank - s.
    double_ring   An inner ring within each node, and an outer ring between nodes: one turn of the
                  inner ring for each step of the outer ring.

The ring is the double ring with one node.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from qla_kernels.sparse_ring.groups import ALONE, Pending, RankRing, RingGroups

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

    def batches(self, k: Tensor, v: Tensor) -> Iterator[Batch]:
        """Returns an iterator over the batches of this rank's k and v, and posts first transfers.

        All transfers that can run before or during the first launch are posted on return.
        """
        if self.inner.size == self.outer.size == 1 and not self.gathers:
            own = [Chunk(0, 0, 0, 0)]
            return iter([Batch(k[None], v[None], own, first=True, last=True)])
        if self.gathers:
            return _gathered(self.whole, self.whole.gather(k, v))
        to_come = _circulated(self, k, v)
        return chain([next(to_come)], to_come)

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


def _gathered(ring: RankRing, arriving: Pending) -> Iterator[Batch]:
    k_all, v_all = arriving.wait()
    chunks = [Chunk(owner, owner, 0, 0) for owner in range(ring.size)]
    yield Batch(k_all, v_all, chunks, first=True, last=True)


class _Place(NamedTuple):
    """The place of one chunk: a slot of two buffers, [slots, B, L, Hk, D] each."""

    k: Tensor
    v: Tensor
    slot: int


def _circulated(route: Route, k: Tensor, v: Tensor) -> Iterator[Batch]:
    """Yields the batches of ring and double_ring; posts transfers one batch ahead."""
    inner, outer = route.inner, route.outer
    turn_k, turn_v = _buffers(k, v, min(2 * route.per_launch, inner.size - 1))
    node_k, node_v = _buffers(k, v, min(2, outer.size - 1))
    batches = _batched(inner.size, route.per_launch)
    held = _Place(k[None], v[None], 0)  # the chunk that this turn begins with
    for turn in range(outer.size):
        places = [held]
        for step in range(inner.size - 1):
            places.append(_Place(turn_k, turn_v, step % len(turn_k)))
        from_node, following = None, held
        if turn + 1 < outer.size:
            following = _Place(node_k, node_v, turn % len(node_k))
            from_node = _hop(outer, held, following)()
        for n, steps in enumerate(batches):
            then = batches[n + 1] if n + 1 < len(batches) else range(0)
            hops = [_hop(inner, places[i - 1], places[i]) for i in then]
            relay = _Relay(hops, inner.in_order(k))
            here = places[steps[0]]
            chunks = [Chunk(route.owner(turn, i), places[i].slot, turn, i) for i in steps]
            last = turn + 1 == outer.size and n + 1 == len(batches)
            yield Batch(here.k, here.v, chunks, first=turn == n == 0, last=last)
            relay.wait()
        if from_node is not None:
            from_node.wait()
        held = following


def _batched(size: int, per_launch: int) -> list[range]:
    """Returns the steps of a turn, grouped by launch.

    Step 0 has a launch of its own, because its chunk is the only one that is there at the start.
    """
    later = [range(i, min(i + per_launch, size)) for i in range(1, size, per_launch)]
    return [range(1), *later]


def _buffers(k: Tensor, v: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(slots, *k.shape), v.new_empty(slots, *v.shape)


def _hop(ring: RankRing, source: _Place, to: _Place) -> Callable[[], Pending]:
    """Returns a function that posts one hop.

    A hop sends the chunk in `source` to the next rank, and receives a chunk from the rank before
    into `to`.
    """

    def post() -> Pending:
        sent, received = ([x.k[x.slot], x.v[x.slot]] for x in (source, to))
        return ring.shift(sent, received, KV_TAG)

    return post


class _Relay:
    """Runs a list of hops, each of which sends the chunk that the hop before it received.

    The constructor posts the first hop, or every hop if transfers are `in_order`. `wait` posts the
    rest one by one, and returns when all chunks have arrived.
    """

    def __init__(self, hops: list[Callable[[], Pending]], in_order: bool) -> None:
        # In order, a hop waits by itself for the hop before it: all are posted before the launch.
        at_once = len(hops) if in_order else 1
        self._posted = [hop() for hop in hops[:at_once]]
        self._later = hops[at_once:]

    def wait(self) -> None:
        """Posts the hops that are left, one by one; returns when all chunks have arrived."""
        for hop in self._later:
            self._posted.pop().wait()
            self._posted.append(hop())
        for pending in self._posted:
            pending.wait()
