"""Rings without their transfers, and over slower links between nodes.

A slow link is emulated: what comes from another node counts as here after bytes / rate, or when it
is here, whichever is later. On a GPU the delay is one thread that waits on a stream of its own.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Pending, RankRing, Swap
from qla_kernels.sparse_ring.route import Route

from ..harness.timing import event

CYCLES = 10_000_000  # of the call that the clock of delays is read from


class Silent(RankRing):
    """Sends nothing, and at once has something in the place of what would come."""

    def swap(self, swaps: Sequence[Swap], tag: int) -> Pending:
        return Pending([], [x for swap in swaps for x in swap.receive])

    def gather(self, *tensors: Tensor) -> Pending:
        of = [(n, (self.size, *x.shape), x.dtype, x.device) for n, x in enumerate(tensors)]
        return Pending([], [_random(*x) for x in of])

    def sum(self, x: Tensor) -> Pending:
        return Pending([], [x[self.rank]])


@functools.lru_cache(maxsize=2)  # k and v, made once: the copy is no part of what is timed
def _random(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros would cost less power."""
    return torch.randn(shape, dtype=dtype, device=device)


class _Late(Pending):
    """A transfer that is here after a delay as well."""

    def __init__(self, posted: Pending, delay: Callable[[], object]) -> None:
        self._posted, self._delay = posted, delay

    def wait(self) -> Sequence[Tensor]:
        received = self._posted.wait()
        self._delay()
        return received


@dataclass(frozen=True)
class Slow(RankRing):
    """`node` neighbouring ranks are a node; links between nodes have `rate` bytes a second."""

    node: int = 1
    rate: float = 25e9

    def swap(self, swaps: Sequence[Swap], tag: int) -> Pending:
        mine = self.rank // self.node
        far = [x for s in swaps if s.source % self.size // self.node != mine for x in s.receive]
        return self._late(super().swap(swaps, tag), far)

    def gather(self, *tensors: Tensor) -> Pending:
        return self._late(super().gather(*tensors), list(tensors) * (self.size - self.node))

    def sum(self, x: Tensor) -> Pending:
        return self._late(super().sum(x), [x[0]] * (self.size - self.node))

    def _late(self, posted: Pending, far: Sequence[Tensor]) -> Pending:
        """`far`: what comes from other nodes."""
        if not far:
            return posted
        seconds = sum(x.numel() * x.element_size() for x in far) / self.rate
        return _Late(posted, (_gpu_delay if far[0].is_cuda else _host_delay)(seconds))


def _host_delay(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds
    return lambda: time.sleep(max(0.0, end - time.monotonic()))


def _gpu_delay(seconds: float) -> Callable[[], None]:
    """One behind the other, as transfers over a link are, from when what is sent is there."""
    link, cycles_a_second = _link()
    link.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(link):
        torch.cuda._sleep(round(seconds * cycles_a_second))  # type: ignore[no-untyped-call]
        over = event()
        over.record()
    return lambda: torch.cuda.current_stream().wait_event(over)


@functools.cache
def _link() -> tuple[Any, float]:
    """The stream of delays, and the cycles of a second on it."""
    start, end, sleep = event(), event(), torch.cuda._sleep
    sleep(CYCLES)  # type: ignore[no-untyped-call]  # the clock rises first
    start.record()
    sleep(CYCLES)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return torch.cuda.Stream(), CYCLES / start.elapsed_time(end) * 1e3  # type: ignore[no-untyped-call]


def through(route: Route, links: Callable[[RankRing], RankRing]) -> Route:
    """The route over other links."""
    whole, inner, outer = map(links, (route.whole, route.inner, route.outer))
    return route._replace(whole=whole, inner=inner, outer=outer)


def silent(route: Route) -> Route:
    return through(route, lambda x: Silent(x.group, x.rank, x.size))


def slow(route: Route, node: int, rate: float) -> Route:
    """Neighbours are nodes of so many ranks; of the outer ring each rank is one of another node."""

    def links(ring: RankRing) -> RankRing:
        return Slow(ring.group, ring.rank, ring.size, 1 if ring is route.outer else node, rate)

    return through(route, links)
