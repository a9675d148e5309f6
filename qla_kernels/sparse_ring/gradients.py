"""How the gradients of chunks come home: dK and dV in fp32, from every rank that met the chunk.

Both ways have one use: `of` gives the accumulators of chunks, the caller adds its part before it
asks for more, which hands it on, and `home` waits for the rank's own. Each sum has a fixed order.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Pending
from qla_kernels.sparse_ring.route import GRADIENT_TAG, Chunk, Route
from qla_kernels.sparse_ring.shard import wide


class Part(NamedTuple):
    """To be added up in one launch."""

    chunks: list[Chunk]
    dkv: Tensor  # fp32 [chunks, 2, B, L, Hk, D], dK and dV so far
    first: bool  # nothing yet


class Gradients(Protocol):
    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Each part is on its way when the next is asked for."""
        ...

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        """dK and dV of the rank's own chunk, rounded once, in memory of their own."""
        ...


def gradients_of(route: Route, k: Tensor) -> Gradients:
    return Direct(route, k) if route.gathers else Travelling(route, k)


class Travelling:
    """The gradient goes with its chunk: around each inner ring from zero, and along the outer.

    After an inner turn it has met every rank of a node. It is then added to what earlier nodes gave
    and sent to the next node; the last hop of both rings brings it home.
    """

    def __init__(self, route: Route, k: Tensor) -> None:
        self._inner, self._outer = route.inner, route.outer
        self._here = _room(k)
        self._next = _room(k) if route.inner.size > 1 else self._here
        shared = route.per_launch > 1 and route.inner.size > 2  # a launch's chunks are several
        self._mine = _room(k) if shared else self._here
        self._sum = _room(k) if route.outer.size > 1 else self._here
        self._received = _room(k) if route.outer.size > 1 else self._here
        self._around: Pending | None = None
        self._across: Pending | None = None

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        for n, chunk in enumerate(chunks):
            if n == 0:  # what was launched since the last batch hid the way
                self._land()
                yield Part([chunk], self._here[None], chunk.step == 0)
            else:  # this part does
                yield Part([chunk], self._mine[None], True)
                self._land()
                self._here += self._mine
            self._leave(chunk)

    def _leave(self, chunk: Chunk) -> None:
        if self._inner.size > 1:
            self._around = self._inner.shift([self._here], [self._next], GRADIENT_TAG)
        if chunk.step + 1 == self._inner.size and self._outer.size > 1:
            self._land()
            self._leave_node()

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        self._land()
        if self._across is not None:
            self._across.wait()
        own = self._received if self._outer.size > 1 else self._here
        return [x.to(dtype, copy=True) for x in own]

    def _land(self) -> None:
        if self._around is not None:
            self._around.wait()
            self._around = None
            self._here, self._next = self._next, self._here

    def _leave_node(self) -> None:
        if self._across is None:
            self._sum.copy_(self._here)
        else:
            self._across.wait()
            self._sum, self._received = self._received.add_(self._here), self._sum
        self._across = self._outer.shift([self._sum], [self._received], GRADIENT_TAG)


class Direct:
    """Each rank's parts of all chunks at once, straight to the owners, which get their sums."""

    def __init__(self, route: Route, k: Tensor) -> None:
        self._ring = route.whole
        self._parts = _room(k, self._ring.size)
        self._coming: Pending | None = None

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        yield Part(chunks, self._parts, True)
        self._coming = self._ring.sum(self._parts)

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        assert self._coming is not None, "its chunks came"
        (own,) = self._coming.wait()
        return [x.to(dtype, copy=True) for x in own]


def _room(k: Tensor, *chunks: int) -> Tensor:
    return torch.empty(*chunks, 2, *k.shape, dtype=wide(k), device=k.device)
