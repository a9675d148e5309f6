"""Adds up dK and dV of chunks over all ranks, and brings each sum to the chunk's owner.

`ReturnedGradients` serves the schedules ring and double_ring, `ReducedGradients` serves allgather.
Both are used as follows: `of(chunks)` yields one part; the caller adds its gradients to
`part.dkv`, and advances the iterator, which sends the part; `home()` waits for the sums of this
rank's own chunk. Sums are kept in fp32 (fp64 for fp64 tensors). For one rank count and schedule
their order is fixed.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Pending, Swap
from qla_kernels.sparse_ring.route import GRADIENT_TAG, Chunk, Route
from qla_kernels.sparse_ring.shard import launches, wide


class Part(NamedTuple):
    """Room to which one launch writes this rank's gradients of some chunks."""

    chunks: list[Chunk]
    dkv: Tensor  # fp32 [chunks, 2, B, L, Hk, D], dK and dV; uninitialised


class Gradients(Protocol):
    """The gradients of chunks under way to their owners; the module's docstring shows their use."""

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Yields the part of `chunks`, which is sent when the iterator is advanced."""
        ...

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        """Waits for dK and dV of the own chunk; returns them rounded once, as new tensors."""
        ...


def gradients_of(route: Route, k: Tensor) -> Gradients:
    """Returns the Gradients of a call with this route; k is this rank's."""
    return ReducedGradients(route, k) if route.gathers else ReturnedGradients(route, k)


class ReturnedGradients:
    """Sends each part straight to the rank of this node that gave the chunk to the node.

    That rank adds up the parts of its node. The sum is added to the sum of earlier nodes and sent
    to the next node, around the outer ring. The last hop brings the total to the chunk's owner.
    """

    def __init__(self, route: Route, k: Tensor) -> None:
        self._inner, self._outer = route.inner, route.outer
        most = min(route.per_launch, route.inner.size - 1)  # chunks of a launch
        self._parts, self._room = (_empty_sums(k, most) for _ in range(2))
        self._here = _empty_sums(k)  # the sum of this node
        self._sum = _empty_sums(k) if route.outer.size > 1 else self._here
        self._received = _empty_sums(k) if route.outer.size > 1 else self._here
        self._coming: Pending | None = None
        self._across: Pending | None = None

    def of(self, chunks: list[Chunk]) -> Iterator[Part]:
        """Yields the part of `chunks`, then sends it, while other parts of the own one come."""
        self._land()
        num, at = len(chunks), self._inner.rank
        if chunks[0].step == 0:
            yield Part(chunks, self._here[None])
        else:
            yield Part(chunks, self._parts[:num])
            parts = zip(chunks, self._parts, self._room, strict=False)
            swaps = [Swap([x], [room], at - c.step, at + c.step) for c, x, room in parts]
            self._coming, self._num = self._inner.swap(swaps, GRADIENT_TAG), num
        if chunks[-1].step + 1 == self._inner.size and self._outer.size > 1:
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
        if self._coming is not None:
            self._coming.wait()
            self._coming, room = None, self._room[: self._num]
            self._here += room[0] if len(room) == 1 else room.sum(0)

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
        yield Part(chunks, self._parts)
        self._coming = self._ring.sum(self._parts)

    def home(self, dtype: torch.dtype) -> list[Tensor]:
        """Waits for the own chunk's sums and returns dK and dV, rounded to dtype."""
        assert self._coming is not None, "its chunks came"
        (own,) = self._coming.wait()
        return launches(own.device).rounded(own, dtype)


def _empty_sums(k: Tensor, *chunks: int) -> Tensor:
    """Returns uninitialised accumulators for dK and dV, [*chunks, 2, *k.shape]."""
    return k.new_empty(*chunks, 2, *k.shape, dtype=wide(k))
