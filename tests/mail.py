"""A ring whose ranks are threads: transfers without processes."""

from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import Swap

PATIENCE = 300  # seconds: a box stays empty only where another thread failed


class Mail:
    """What is sent lies in the receiver's box until it waits."""

    def __init__(self, boxes: dict[object, Queue], members: list[int], rank: int) -> None:
        self.boxes, self.members = boxes, members
        self.rank, self.size = members.index(rank), len(members)

    def _box(self, source: int, to: int, tag: int) -> Queue:
        ends = (self.members[source % self.size], self.members[to % self.size])
        return self.boxes.setdefault((tuple(self.members), ends, tag), Queue())  # atomic

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> object:
        return self.swap([Swap(send, receive, self.rank + 1, self.rank - 1)], tag)

    def swap(self, swaps: Sequence[Swap], tag: int) -> object:
        for swap in swaps:
            for n, x in enumerate(swap.send):
                self._box(self.rank, swap.to, tag + n).put(x.clone())

        def wait() -> None:
            for swap in swaps:
                for n, room in enumerate(swap.receive):
                    box = self._box(swap.source, self.rank, tag + n)
                    room.copy_(box.get(timeout=PATIENCE))

        for swap in swaps:
            for room in swap.receive:
                room.fill_(float("nan"))
        return SimpleNamespace(wait=wait)

    def sum(self, x: Tensor) -> object:
        for to in range(self.size):
            self._box(self.rank, to, -2).put(x[to].clone())

        def wait() -> list[Tensor]:
            parts = [self._box(r, self.rank, -2).get(timeout=PATIENCE) for r in range(self.size)]
            return [torch.stack(parts).sum(0)]

        return SimpleNamespace(wait=wait)

    def gather(self, *tensors: Tensor) -> object:
        for to in range(self.size):
            self._box(self.rank, to, -1).put([x.clone() for x in tensors])

        def wait() -> list[Tensor]:
            all_of = [self._box(r, self.rank, -1).get(timeout=PATIENCE) for r in range(self.size)]
            return [torch.stack(parts) for parts in zip(*all_of, strict=True)]

        return SimpleNamespace(wait=wait)
