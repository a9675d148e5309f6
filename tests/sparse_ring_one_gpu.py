"""What ranks find that share one GPU, for tests.ranks: the kernels, and transfers of CPUs.

NCCL takes one rank a GPU. Here tensors cross through host memory, over gloo, so that four ranks and
nodes of two run every schedule with the kernels where there is one GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import ALONE, Pending, RankRing, RingGroups, Swap
from tests.ranks import WORLD, serve
from tests.sparse_ring_gpus import results


class Landing(Pending):
    """What came to host memory goes on to the GPU."""

    def __init__(self, posted: Pending, places: Sequence[Tensor]) -> None:
        self._posted, self._places = posted, places

    def wait(self) -> Sequence[Tensor]:
        for place, x in zip(self._places, self._posted.wait(), strict=True):
            place.copy_(x)
        return self._places


class ThroughHost(RankRing):
    def swap(self, swaps: Sequence[Swap], tag: int) -> Pending:
        places = [x for swap in swaps for x in swap.receive]
        on_host = [
            swap._replace(
                send=[x.cpu() for x in swap.send],
                receive=[torch.empty(x.shape, dtype=x.dtype) for x in swap.receive],
            )
            for swap in swaps
        ]
        return Landing(super().swap(on_host, tag), places)

    def gather(self, *tensors: Tensor) -> Pending:
        gathered = super().gather(*(x.cpu() for x in tensors)).wait()
        return Pending([], [x.to(tensors[0].device) for x in gathered])

    def sum(self, x: Tensor) -> Pending:
        (own,) = super().sum(x.cpu()).wait()
        return Pending([], [own.to(x.device)])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(super().broadcast(x.cpu(), source))


def through_host(groups: RingGroups) -> RingGroups:
    def of(ring: RankRing) -> RankRing:
        return ring if ring is ALONE else ThroughHost(ring.group, ring.rank, ring.size)

    return replace(groups, whole=of(groups.whole), inner=of(groups.inner), outer=of(groups.outer))


def ways_of_four(rank: int) -> Iterator[tuple[str, Any]]:
    yield from results(rank, WORLD, through_host)


if __name__ == "__main__":
    serve(ways_of_four)
