"""How long a call takes on several ranks, which begin together."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .timing import event


def once(run: Callable[[], Any], on_gpu: bool, calls: int = 1) -> tuple[float, float]:
    """Returns the ms of calls, one behind the other: of the device, and of Python alone."""
    if not on_gpu:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (1e3 * (time.perf_counter() - begin),) * 2
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    first, last, results = event(), event(), None
    begin = time.perf_counter()
    first.record()
    for _ in range(calls):
        results = run()  # freed only after the end was recorded
    last.record()
    python = 1e3 * (time.perf_counter() - begin)
    last.synchronize()
    del results
    return first.elapsed_time(last), python


def of_all(values: Sequence[float], device: str | torch.device) -> list[list[float]]:
    """Returns every rank's values, on every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [x.tolist() for x in everyone]
