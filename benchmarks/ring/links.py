"""Rings that are timed in parts: without their transfers, their transfers alone, over slower links,
and the time that launches wait for transfers.

A slow link is emulated: what comes from another node counts as here after bytes / rate, or when it
is here, whichever is later. The delay runs beside everything else, as a transfer does: on a GPU it
is one thread that waits on a stream of its own, which costs the SM that it sits on.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qla_kernels.sparse_ring.gradients import gradients_of
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


class Waits:
    """How long launches waited for transfers, in milliseconds, since the last `taken`."""

    def __init__(self) -> None:
        self._between: list[tuple[Any, Any]] = []  # events, or seconds of the host

    def add(self, before: Any, after: Any) -> None:
        self._between.append((before, after))

    def taken(self) -> float:
        """Waits for a GPU, and begins anew."""
        between, self._between = self._between, []
        if not between or isinstance(between[0][0], float):
            return 1e3 * float(sum(after - before for before, after in between))
        between[-1][1].synchronize()
        return float(sum(before.elapsed_time(after) for before, after in between))


class _Changed(Pending):
    """A transfer that is waited for in another way."""

    def __init__(self, wait: Callable[[], Sequence[Tensor]]) -> None:
        self.wait = wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Links(RankRing):
    """Transfers are changed; `node` neighbouring ranks are a node."""

    node: int = 1

    def changed(self, posted: Pending, far: Sequence[Tensor]) -> Pending:
        """`far`: what comes from other nodes."""
        raise NotImplementedError

    def swap(self, swaps: Sequence[Swap], tag: int) -> Pending:
        mine = self.rank // self.node
        far = [x for s in swaps if s.source % self.size // self.node != mine for x in s.receive]
        return self.changed(super().swap(swaps, tag), far)

    def gather(self, *tensors: Tensor) -> Pending:
        return self.changed(super().gather(*tensors), list(tensors) * (self.size - self.node))

    def sum(self, x: Tensor) -> Pending:
        return self.changed(super().sum(x), [x[0]] * (self.size - self.node))


@dataclass(frozen=True)
class Watched(_Links):
    """Marks on the stream of the launches where it begins to wait for a transfer, and the end."""

    waits: Waits = field(default_factory=Waits)

    def changed(self, posted: Pending, far: Sequence[Tensor]) -> Pending:
        def wait() -> Sequence[Tensor]:
            before = _now()
            received = posted.wait()
            self.waits.add(before, _now())
            return received

        return _Changed(wait)


def _now() -> Any:
    """A recorded event of the current stream, or the host's clock where there is no GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    now = event()
    now.record()
    return now


@dataclass(frozen=True)
class Slow(_Links):
    """Links between nodes have `rate` bytes a second each way."""

    rate: float = 25e9

    def changed(self, posted: Pending, far: Sequence[Tensor]) -> Pending:
        if not far:
            return posted
        seconds = sum(x.numel() * x.element_size() for x in far) / self.rate
        delay = (_gpu_delay if far[0].is_cuda else _host_delay)(seconds)

        def wait() -> Sequence[Tensor]:
            received = posted.wait()
            delay()
            return received

        return _Changed(wait)


def _host_delay(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds
    return lambda: time.sleep(max(0.0, end - time.monotonic()))


def _gpu_delay(seconds: float) -> Callable[[], None]:
    """One behind the other, as transfers over a link are, from when what is sent is there."""
    here, link = torch.cuda.current_stream(), _link()
    link.wait_stream(here)
    with torch.cuda.stream(link):
        _wait_on_gpu(round(seconds * _cycles_a_second()))
        over = event()
        over.record()
    return lambda: torch.cuda.current_stream().wait_event(over)


@functools.cache
def _link() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _wait_on_gpu(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@functools.cache
def _cycles_a_second() -> float:
    start, end = event(), event()
    _wait_on_gpu(CYCLES)  # the clock rises first
    start.record()
    _wait_on_gpu(CYCLES)
    end.record()
    end.synchronize()
    return float(CYCLES / start.elapsed_time(end) * 1e3)


def through(route: Route, links: Callable[[RankRing], RankRing]) -> Route:
    """The route over other links."""
    return route._replace(
        whole=links(route.whole), inner=links(route.inner), outer=links(route.outer)
    )


def silent(route: Route) -> Route:
    return through(route, lambda x: Silent(x.group, x.rank, x.size))


def watched(route: Route, waits: Waits) -> Route:
    return through(route, lambda x: Watched(x.group, x.rank, x.size, waits=waits))


def slow(route: Route, node: int, rate: float) -> Route:
    """Neighbours are nodes of so many ranks; of the outer ring each rank is one of another node."""

    def links(ring: RankRing) -> RankRing:
        return Slow(ring.group, ring.rank, ring.size, 1 if ring is route.outer else node, rate)

    return through(route, links)


def transfers(route: Route, k: Tensor, v: Tensor, gradients: bool = True) -> None:
    """All that a call sends, with nothing to hide behind; of a backward with the gradients."""
    batches = route.batches(k, v)
    if not gradients:
        for _ in batches:
            pass
        return
    sent = gradients_of(route, k)
    for batch in batches:
        for _ in sent.of(batch.chunks):
            pass
    sent.home(k.dtype)
