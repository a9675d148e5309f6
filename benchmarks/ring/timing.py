"""What a call takes on every rank of a ring, at the same time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..harness.timing import event

WARM_UP = 2  # samples


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

    def each(
        self, call: Callable[[], Any], instead: Callable[[], float] | None = None
    ) -> list[list[float]]:
        """Milliseconds of a call, by sample and rank; or what `instead` says after each sample."""
        taken = []
        for _ in range(WARM_UP + self._samples):
            dist.barrier()
            sample = self._sample(call)
            if instead is not None:
                sample = instead()
            mine = torch.tensor(sample / self._queued, device=self._device)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            taken.append([float(x) for x in everyone])
        return taken[WARM_UP:]

    @property
    def _device(self) -> str:
        return "cuda" if self._gpu else "cpu"

    def _sample(self, call: Callable[[], Any]) -> float:
        if not self._gpu:
            start = time.perf_counter()
            for _ in range(self._queued):
                call()
            return (time.perf_counter() - start) * 1e3
        start_event, end_event = event(), event()
        torch.cuda.synchronize()
        start_event.record()
        for _ in range(self._queued):
            call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event))
