"""Adds up dK and dV of chunks over all ranks, and brings each sum to the chunk's owner.

`CirculatedGradients` serves the schedules ring and double_ring, `ReducedGradients` serves
allgather. Both are used as follows: for each part that `of(chunks)` yields, the caller adds its
gradients to `part.dkv`; advancing the loop sends the part; `home()` waits for the sums of this
rank's own chunk. Sums are kept in fp32 (fp64 for fp64 tensors). For one rank count and schedule
their order is fixed.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Pending
from qla_kernels.sparse_ring.route import GRADIENT_TAG, Chunk, Route
from qla_kernels.sparse_ring.shard import launches, wide


class Part(NamedTuple):
    """Accumulators to which one launch adds this rank's gradients of some chunks."""

    chunks: list[Chunk]
    dkv: Tensor  # fp32 [chunks, 2, B, L, Hk, D], dK and dV so far
    first: bool  # dkv is uninitialised: the launch writes it instead of adding


class Gradients(Protocol):
    """The gradients of chunks under way to their owners; the module's docstring shows their use."""

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Yields the accumulators of `chunks`. A part is sent when the iterator is advanced."""
        ...

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        """Waits for dK and dV of the own chunk; returns them rounded once, as new tensors."""
        ...


def gradients_of(route: Route, k: Tensor) -> Gradients:
    """Returns the Gradients of a call with this route; k is this rank's."""
    return ReducedGradients(route, k) if route.gathers else CirculatedGradients(route, k)


class CirculatedGradients:
    """Sends the gradient of a chunk along the same rings as the chunk itself.

    On each node the sum starts from zero and goes around the inner ring once; it then holds the
    parts of every rank of the node. It is added to the sum of earlier nodes and sent to the next
    node. The last hop of both rings brings the total to the chunk's owner.
    """

    def __init__(self, route: Route, k: Tensor) -> None:
        self._inner, self._outer = route.inner, route.outer
        self._here = _empty_sums(k)
        self._next = _empty_sums(k) if route.inner.size > 1 else self._here
        shared = route.per_launch > 1 and route.inner.size > 2  # a launch may have several chunks
        self._mine = _empty_sums(k) if shared else self._here
        self._sum = _empty_sums(k) if route.outer.size > 1 else self._here
        self._received = _empty_sums(k) if route.outer.size > 1 else self._here
        self._around: Pending | None = None
        self._across: Pending | None = None

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Yields a part for each chunk, one after the other; sends it when advanced."""
        for n, chunk in enumerate(chunks):
            if n == 0:  # its sum arrived during the launches since the last batch
                self._land()
                yield Part([chunk], self._here[None], chunk.step == 0)
            else:  # its sum arrives during this launch, which writes to a buffer of its own
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
        """Waits for the own chunk's sums and returns dK and dV, rounded to dtype."""
        self._land()
        if self._across is not None:
            self._across.wait()
        own = self._received if self._outer.size > 1 else self._here
        return launches(own.device).rounded(own, dtype)

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


class ReducedGradients:
    """Sends this rank's parts of all chunks straight to their owners, by one reduce-scatter."""

    def __init__(self, route: Route, k: Tensor) -> None:
        self._ring = route.whole
        self._parts = _empty_sums(k, self._ring.size)
        self._coming: Pending | None = None

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Yields one part with all chunks, then starts the reduce-scatter."""
        yield Part(chunks, self._parts, True)
        self._coming = self._ring.sum(self._parts)

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        """Waits for the own chunk's sums and returns dK and dV, rounded to dtype."""
        assert self._coming is not None, "its chunks came"
        (own,) = self._coming.wait()
        return launches(own.device).rounded(own, dtype)


def _empty_sums(k: Tensor, *chunks: int) -> Tensor:
    """Returns uninitialised accumulators for dK and dV, [*chunks, 2, *k.shape]."""
    return torch.empty(*chunks, 2, *k.shape, dtype=wide(k), device=k.device)
