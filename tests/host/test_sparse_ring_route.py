"""The schedules over stand-in rings: what is where when, posted before what, and any world size.

A chunk is filled with the number of its owner, so what a neighbour sends is known without one. A
transfer may land the moment it is posted, or not before it is awaited; both must be right.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from qla_kernels.sparse_ring import (
    FixedVerticalSlash,
    RingGroups,
    StripedLayout,
    build_index,
    ring,
)
from qla_kernels.sparse_ring.gradients import ReturnedGradients
from qla_kernels.sparse_ring.groups import ALONE, RankRing, Swap
from qla_kernels.sparse_ring.route import Chunk, Route, route_of
from qla_kernels.sparse_ring.shard import shard_of
from reference import sparse_ring
from tests.compare import assert_close
from tests.mail import Mail

NAN = float("nan")


@dataclass
class FakeRing:
    """Of a double ring with `inner` ranks a node, this rank's inner ring or outer ring."""

    rank: int
    size: int
    inner: int
    is_outer: bool
    early: bool
    log: list[str] = field(default_factory=list)

    def holder(self, owner: float, source: int) -> float:
        """Whose chunk the rank `source` of this ring holds while this one holds `owner`'s."""
        node, number = divmod(int(owner), self.inner)
        back = self.rank - source
        if self.is_outer:
            return ((node - back) % self.size) * self.inner + number
        return node * self.inner + (number - back) % self.size

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> object:
        return self.swap([Swap(send, receive, self.rank + 1, self.rank - 1)], tag)

    def swap(self, swaps: Sequence[Swap], tag: int) -> object:
        name = "outer" if self.is_outer else "inner"
        self.log.append(f"post {name}" + (f" {len(swaps)}" if len(swaps) > 1 else ""))
        assert len({s.to % self.size for s in swaps}) == len(swaps)

        def land() -> None:
            for s in swaps:
                assert (s.to + s.source) % self.size == 2 * self.rank % self.size
                for x, room in zip(s.send, s.receive, strict=True):
                    room.fill_(self.holder(x.flatten()[0].item(), s.source))

        def wait() -> None:
            self.log.append(f"wait {name}")
            if not self.early:
                land()

        for s in swaps:
            for room in s.receive:
                room.fill_(NAN)
        if self.early:
            land()
        return SimpleNamespace(wait=wait)


def route(inner: int, outer: int, rank: int, per_launch: int, early: bool) -> Route:
    log: list[str] = []
    of_node = FakeRing(rank % inner, inner, inner, False, early, log)
    of_nodes = FakeRing(rank // inner, outer, inner, True, early, log)
    return Route(of_node, of_node, of_nodes, False, per_launch)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("per_launch", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("inner", "outer"), [(1, 1), (2, 1), (5, 1), (8, 1), (1, 4), (2, 3), (4, 2)]
)
def test_a_batch_is_where_it_says_for_as_long_as_it_is_used(inner, outer, per_launch, early):
    for rank in range(inner * outer):
        way = route(inner, outer, rank, per_launch, early)
        k = torch.full((1, 2, 1, 1), float(rank))
        met, flags = [], []
        for batch in way.batches(k, k + 0):
            for chunk in batch.chunks:
                assert (batch.k[chunk.slot] == chunk.owner).all()
                assert (batch.v[chunk.slot] == chunk.owner).all()
                met.append(chunk.owner)
            flags.append((batch.first, batch.last))
            assert len(batch.chunks) <= per_launch
            assert len(batch.k) <= max(1, 2 * per_launch)  # memory: two launches' worth
        assert met[0] == rank
        assert sorted(met) == list(range(inner * outer))
        assert [first for first, _ in flags] == [True] + [False] * (len(flags) - 1)
        assert [last for _, last in flags] == [False] * (len(flags) - 1) + [True]


def test_transfers_are_posted_before_the_launch_they_hide_behind():
    way = route(inner=2, outer=2, rank=0, per_launch=1, early=False)
    k = torch.zeros(1, 2, 1, 1)
    for batch in way.batches(k, k + 0):
        way.inner.log.append(f"launch {batch.chunks[0].owner}")
    assert way.inner.log == [
        "post outer", "post inner", "launch 0", "wait inner", "launch 1", "wait outer",
        "post inner", "launch 2", "wait inner", "launch 3",
    ]  # fmt: skip


def test_the_chunks_of_a_launch_come_at_the_same_time():
    way = route(inner=5, outer=1, rank=0, per_launch=3, early=True)
    k = torch.zeros(1, 2, 1, 1)
    for batch in way.batches(k, k + 0):
        way.inner.log.append(f"launch {len(batch.chunks)}")
    assert way.inner.log == [
        "post inner 3", "launch 1", "wait inner", "post inner", "launch 3", "wait inner",
        "launch 1",
    ]  # fmt: skip


def test_a_gather_is_under_way_before_a_batch_is_asked_for():
    posted = []

    def gather(*tensors: Tensor) -> object:
        posted.append(len(tensors))
        return SimpleNamespace(wait=lambda: [x.expand(3, *x.shape) for x in tensors])

    k = torch.zeros(1, 2, 1, 1)
    way = Route(SimpleNamespace(rank=1, size=3, gather=gather), ALONE, ALONE, True, 1)
    batches = way.batches(k, k)
    assert posted == [2]
    (batch,) = batches
    assert [(chunk.owner, chunk.slot) for chunk in batch.chunks] == [(0, 0), (1, 1), (2, 2)]
    assert batch.first
    assert batch.last


def test_the_own_chunk_may_hide_a_gather():
    log = []

    def gather(*tensors: Tensor) -> object:
        log.append("post")
        gathered = [x.expand(3, *x.shape) for x in tensors]
        return SimpleNamespace(wait=lambda: log.append("wait") or gathered)

    k = torch.zeros(1, 2, 1, 1)
    way = Route(SimpleNamespace(rank=1, size=3, gather=gather), ALONE, ALONE, True, 1)
    for batch in way.batches(k, k, own_first=True):
        log.append([(chunk.owner, chunk.slot) for chunk in batch.chunks])
        log.append((len(batch.k), batch.first, batch.last))
    own, others = [(1, 0)], [(0, 0), (2, 2)]
    assert log == ["post", own, (1, True, False), "wait", others, (3, False, True)]


def test_every_way_of_a_gradient_is_beside_a_launch():
    """Parts go to their owners behind the launch for dQ, those of a launch at the same time."""
    way = route(inner=4, outer=1, rank=0, per_launch=2, early=False)
    gradients, log = ReturnedGradients(way, torch.zeros(1, 2, 1, 1)), way.inner.log
    for steps in (range(1), range(1, 3), range(3, 4)):
        for part in gradients.of([Chunk(-step % 4, 0, 0, step) for step in steps]):
            log.append(f"keys {len(part.dkv)}")
            part.dkv.fill_(0)
        log.append("queries")
    gradients.home(torch.float32)
    assert log == [
        "keys 1", "queries", "keys 2", "post inner 2", "queries", "wait inner", "keys 1",
        "post inner", "queries", "wait inner",
    ]  # fmt: skip


def test_between_nodes_a_sum_is_sent_before_the_launch_for_queries():
    way = route(inner=2, outer=2, rank=0, per_launch=1, early=False)
    gradients, log = ReturnedGradients(way, torch.zeros(1, 2, 1, 1)), way.inner.log
    for turn in range(2):
        for step in range(2):
            for part in gradients.of([Chunk(way.owner(turn, step), 0, turn, step)]):
                part.dkv.fill_(0)
            log.append("queries")
    gradients.home(torch.float32)
    turn = ["queries", "post inner", "wait inner", "post outer", "queries"]
    assert log == [*turn, *turn[:3], "wait outer", *turn[3:], "wait outer"]


def test_one_node_has_a_group_for_attention_and_one_for_its_index():
    whole, inner, half = RankRing(None, 0, 4), RankRing(None, 0, 4), RankRing(None, 0, 2)
    for schedule in ("allgather", "ring"):
        assert route_of(RingGroups(whole, inner, ALONE, None), schedule, 1).whole is inner
        assert route_of(RingGroups(whole, half, half, None), schedule, 1).whole is whole


@pytest.mark.parametrize(
    ("inner", "outer", "gathers", "per_launch"),
    [
        (5, 1, False, 3), (8, 1, False, 8), (2, 3, False, 1), (3, 2, False, 2), (2, 4, False, 3),
        (5, 1, True, 1), (5, 1, "own chunk first", 1), (5, 1, "kept", 1),
    ],
)  # fmt: skip
def test_any_number_of_ranks_is_one_rank(inner, outer, gathers, per_launch):
    """The engine itself, each rank a thread, against the definition in fp64."""
    world = inner * outer
    T = 128 * world
    q, k, v, do = (torch.randn(1, T, h, 8, dtype=torch.float64) for h in (2, 1, 1, 2))
    index = build_index(q, k, FixedVerticalSlash([[3, 70, T - 9], []], [[1, 4], [2, 3, world]]))
    layout, seqlen = StripedLayout(world), T - 70
    boxes: dict[object, Queue] = {}

    def one(rank: int) -> list[Tensor]:
        everybody, node = list(range(world)), rank // inner * inner
        whole = Mail(boxes, everybody, rank)
        of_node = Mail(boxes, everybody[node : node + inner], rank)
        of_nodes = Mail(boxes, everybody[rank % inner :: inner], rank)
        way = Route(whole, of_node, of_nodes, bool(gathers), per_launch)
        shard = shard_of(layout, rank, T, seqlen, 0.3, index[:3])
        mine = [layout.shard(x, 1, rank) for x in (q, k, v, do)]
        batches = way.batches(*mine[1:3], gathers == "own chunk first")
        done = ring.forward(shard, mine[0], batches, gathers == "kept")
        assert len(done.gathered) == 2 * (gathers == "kept")
        return [done.o, *ring.backward(shard, way, *mine[:3], done, mine[3], None)]

    with ThreadPoolExecutor(world) as ranks:
        parts = zip(*ranks.map(one, range(world)), strict=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    visible = index.to_mask() & (torch.arange(T) < seqlen)[:, None]
    o, _ = sparse_ring.attention(*leaves, visible, 0.3)
    want = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    order = layout.perm(T).argsort()
    for name, part, whole in zip(("o", "dq", "dk", "dv"), parts, want, strict=True):
        assert_close(name, torch.cat(part, 1)[:, order], whole, 1e-12)
