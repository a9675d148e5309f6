"""What a call takes on every rank of a ring, at the same time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..harness.timing import event

WARM_UP = 2  # samples


class Clock:
    """Medians over samples, each of several calls, one behind the other."""

    def __init__(self, device: str, samples: int, queued: int) -> None:
        self._gpu, self._samples, self._queued = device == "cuda", samples, queued

    def slowest(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call on the rank that takes longest."""
        return statistics.median(max(sample) for sample in self._taken(call))

    def of_ranks(self, call: Callable[[], Any]) -> list[float]:
        """Milliseconds of a call on each rank."""
        return [statistics.median(of_rank) for of_rank in zip(*self._taken(call), strict=True)]

    def _taken(self, call: Callable[[], Any]) -> list[list[float]]:
        """By sample and rank."""
        taken = []
        for _ in range(WARM_UP + self._samples):
            dist.barrier()
            mine = torch.tensor(self._sample(call) / self._queued, device=self._device)
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
