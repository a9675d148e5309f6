"""A layer of sparse attention as one rank of a ring runs it: what it must give, what it takes."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring import FixedVerticalSlash, StripedLayout, build_index, ring
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.route import LOCAL, Route
from qla_kernels.sparse_ring.shard import Shard, shard_of

from ..attention.workloads import VerticalSlash
from ..harness.ranks import of_all, once
from ..harness.truth import relative_l2

WARM_UP = 2  # samples of a time that are not counted
LIMIT = 5e-3  # relative L2 error of a ring beside one device


class Way(NamedTuple):
    what: str
    layout: Layout
    route: Route
    own_first: bool = False  # a forward that gathers begins with the rank's own chunk
    kept: bool = False  # what a forward gathers is kept for the backward


ALONE = Way("sparse, one device", StripedLayout(1), LOCAL)


class Layer:
    """A mask, and tensors of any of its shards; what is in those does not matter for times."""

    def __init__(self, workload: VerticalSlash, device: str) -> None:
        self.workload, self.device, self.scale = workload, device, workload.head_dim**-0.5
        diagonals, columns = workload.mask()
        q = torch.empty(1, workload.tokens, workload.heads[1], 64, device=device).bfloat16()
        self.index = build_index(q, q, FixedVerticalSlash(columns, diagonals))

    @property
    def work(self) -> float:
        """FLOPs of forward and backward: 2 + 5 products over the mask's pairs."""
        return 14.0 * self.workload.pairs * self.workload.head_dim * self.workload.heads[1]

    def tensors(self, world: int = 1, seed: int | None = None) -> list[Tensor]:
        """q, k, v, do of a rank, or with `seed` of the whole sequence, on every rank the same."""
        kv_heads, heads = self.workload.heads
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        shape = (1, self.workload.tokens // world)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        made = partial(torch.randn, generator=generator, device=self.device)
        sizes = (heads, kv_heads, kv_heads, heads)
        return [made(*shape, n, self.workload.head_dim).to(dtype) for n in sizes]

    def calls(
        self, way: Way, tensors: Sequence[Tensor] = (), index: Callable[..., object] | None = None
    ) -> tuple[Callable[[], ring.RingForward], Callable[[], ring.RingBackward]]:
        """`index` runs where one is built, beside what is gathered; its lines are not taken."""
        q, k, v, do = tensors or self.tensors(way.layout.world)
        T, rank = self.workload.tokens, way.route.whole.rank

        def shard() -> Shard:  # made by every call, as its tables are
            return shard_of(way.layout, rank, T, T, self.scale, self.index[:3])

        def forward() -> ring.RingForward:
            batches = way.route.batches(k, v, way.own_first)
            if index is not None:
                index(q, k)
            return ring.forward(shard(), q, batches, way.kept)

        done = forward()
        return forward, lambda: ring.backward(shard(), way.route, q, k, v, done, do, None)


def check(layer: Layer, way: Way, rank: int) -> None:
    """A ring gives what one device gives."""
    whole = layer.tensors(seed=0)
    forward, backward = layer.calls(ALONE, whole)
    want = [forward().o, *backward()]
    forward, backward = layer.calls(way, [way.layout.shard(x, 1, rank) for x in whole])
    found = [forward().o, *backward()]
    agree(way.what, way.layout, rank, found, want)


def agree(
    what: str, layout: Layout, rank: int, found: Sequence[Tensor], want: Sequence[Tensor]
) -> None:
    for name, got, right in zip(("o", "dq", "dk", "dv"), found, want, strict=True):
        error = relative_l2(got, layout.shard(right, 1, rank))
        if not error < LIMIT:
            raise RuntimeError(f"{what}: {name} is off by {error:.1e} on rank {rank}")


def slowest(taken: list[list[float]]) -> float:
    """Of times by sample and rank: of each sample the slowest rank, of these the median."""
    return statistics.median(max(sample) for sample in taken)


def by_rank(taken: list[list[float]]) -> list[float]:
    """Of times by sample and rank: the median of each rank."""
    return [statistics.median(of_rank) for of_rank in zip(*taken, strict=True)]


class Clock:
    """Medians over samples, each of several calls, one behind the other."""

    def __init__(self, device: str, samples: int, queued: int) -> None:
        self._gpu, self._samples, self._queued = device == "cuda", samples, queued

    def slowest(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call on the rank that takes longest."""
        return slowest(self.each(call))

    def each(self, call: Callable[[], Any]) -> list[list[float]]:
        """Milliseconds of a call, by sample and rank."""
        count = WARM_UP + self._samples
        samples = [once(call, self._gpu, self._queued)[0] / self._queued for _ in range(count)]
        of_ranks = of_all(samples[WARM_UP:], "cuda" if self._gpu else "cpu")
        return [list(sample) for sample in zip(*of_ranks, strict=True)]
