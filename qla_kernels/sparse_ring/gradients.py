"""How the gradients of chunks come home: dK and dV in fp32, from every rank that met the chunk.

Both ways have one use: `arrive` gives the accumulator for a chunk, the caller adds its part,
`leave` hands it on, and `home` waits for the rank's own. Each sum has a fixed order.
"""

from typing import Protocol

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Pending
from qla_kernels.sparse_ring.route import GRADIENT_TAG, Chunk, Route
from qla_kernels.sparse_ring.shard import wide


class Gradients(Protocol):
    def arrive(self, chunk: Chunk) -> tuple[Tensor, bool]:
        """dK and dV of this chunk so far, [2, B, L, Hk, D], and whether there is nothing yet."""
        ...

    def leave(self, chunk: Chunk) -> None: ...

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
        self._sum = _room(k) if route.outer.size > 1 else self._here
        self._received = _room(k) if route.outer.size > 1 else self._here
        self._around: Pending | None = None
        self._across: Pending | None = None

    def arrive(self, chunk: Chunk) -> tuple[Tensor, bool]:
        if chunk.step:
            self._land()
        return self._here, chunk.step == 0

    def leave(self, chunk: Chunk) -> None:
        if self._inner.size > 1:
            self._around = self._inner.shift([self._here], [self._next], GRADIENT_TAG)
        if chunk.step + 1 == self._inner.size:
            self._land()
            if self._outer.size > 1:
                self._leave_node()

    def home(self, dtype: torch.dtype) -> list[Tensor]:
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
    """Each rank sends its part straight to the owner, which adds them in the order of steps."""

    def __init__(self, route: Route, k: Tensor) -> None:
        self._ring = route.whole
        self._own, others = _room(k), route.whole.size - 1
        self._sent, self._received = ([_room(k) for _ in range(min(2, others))] for _ in range(2))
        self._arriving: Pending | None = None

    def arrive(self, chunk: Chunk) -> tuple[Tensor, bool]:
        return (self._sent[self._slot(chunk)] if chunk.step else self._own), True

    def leave(self, chunk: Chunk) -> None:
        if chunk.step == 0:
            return
        before, n, rank = self._arriving, self._slot(chunk), self._ring.rank
        to, source = rank - chunk.step, rank + chunk.step
        sent, received = [self._sent[n]], [self._received[n]]
        self._arriving = self._ring.swap(sent, received, to, source, GRADIENT_TAG)
        if before is not None:
            (part,) = before.wait()
            self._own += part

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        assert self._arriving is not None, "more than one rank"
        (last,) = self._arriving.wait()
        return [
            torch.add(own, part, out=torch.empty_like(own, dtype=dtype))
            for own, part in zip(self._own, last, strict=True)
        ]

    def _slot(self, chunk: Chunk) -> int:
        return chunk.step % len(self._sent)


def _room(k: Tensor) -> Tensor:
    return torch.empty(2, *k.shape, dtype=wide(k), device=k.device)
