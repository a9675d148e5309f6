"""How long a call takes: bursts of CUDA graphs and of eager calls on a GPU, calls on a CPU.

A GPU under sustained load lowers its clock. So implementations are timed in short bursts, in turn,
with the device idle in between: each sees the same cool chip, and a drift meets all of them alike.
Graphs leave launch gaps out; eager calls of the Python entry point have bursts of their own. Input
sets rotate, so that no call finds its inputs in the L2 cache.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from .workload import Ceilings

Run = Callable[[], Any]
CALLS = 10  # eager ones in a row: the host is ahead of the device, and no queue is full


class Spread(NamedTuple):
    """Seconds."""

    p20: float
    p50: float
    p80: float


def spread(samples: Sequence[float]) -> Spread:
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    fifths = quantiles(samples, n=5, method="inclusive")
    return Spread(fifths[0], median(samples), fifths[3])


@contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of tiny operations, where a second thread only adds waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Timer:
    graph = False  # whether launch gaps are left out

    def burst(self, seconds: float) -> list[float]:
        """Samples, in seconds, of about this long a burst."""
        raise NotImplementedError

    def measured(self, samples: Sequence[float]) -> dict[str, Any]:
        """A result's fields, of the samples of all bursts."""
        p20, p50, p80 = (1e3 * x for x in spread(samples))
        found = {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "samples": len(samples)}
        return {**found, "graph": self.graph}


class CpuTimer(Timer):
    """Repeated calls. There is nothing to capture and no clock to spare."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._turns = cycle(runs)

    def burst(self, seconds: float) -> list[float]:
        samples: list[float] = []
        while not samples or sum(samples) < seconds:
            run, start = next(self._turns), time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return samples


class EventTimer(Timer):
    """Events around each step, all of a burst in the queue before the first wait.

    A step is a call that cannot be captured, whose launch gaps are included, unless a subclass has
    steps of several calls.
    """

    calls_per_step = 1

    def __init__(self, steps: Sequence[Run]) -> None:
        self._steps = steps

    def burst(self, seconds: float) -> list[float]:
        first = self._time(1)[0]  # wakes the clocks, and shows how many fit
        step = first * self.calls_per_step
        # a step that is longer than a burst shall not heat the device more often than it has to
        return self._time(max(3 if step < seconds else 1, min(200, int(seconds / step))))

    def _time(self, count: int) -> list[float]:
        events = [(event(), event()) for _ in range(count)]
        for (start, end), step in zip(events, cycle(self._steps), strict=False):
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / self.calls_per_step for a, b in events]


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GraphTimer(EventTimer):
    """A graph of a call per input set; a sample is a replay's time divided by the calls in it.

    The current stream must not be the default one, which cannot be captured: autograd runs a
    backward on the stream that its forward was on.
    """

    graph = True

    def __init__(self, runs: Sequence[Run]) -> None:
        for run in runs:  # allocations and tables that a capture must not see
            run()
        torch.cuda.synchronize()
        self._runs = runs  # a graph reads their tensors, and does not keep them
        self._graph, self.calls_per_step = torch.cuda.CUDAGraph(), len(runs)
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            for run in runs:
                self.results = run()  # of the last input set: to be checked after a replay
        super().__init__([self._graph.replay])

    def replay(self) -> Any:
        """The results of the last call."""
        self._graph.replay()
        torch.cuda.synchronize()
        return self.results


class EagerTimer(Timer):
    """Calls without a graph, as Python makes them; a sample is a call's wall time among several.

    `host` has, for each sample, the time that the host is busy with a call, in multiples of an
    addition of eight floats beside it: this ratio depends less on the machine than microseconds do.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        few = torch.zeros(8, device=device)
        self._turns, self._addition = cycle(runs), lambda: few + 1
        self.host: list[float] = []
        self._in_a_row(len(runs))  # whatever first calls make

    def burst(self, seconds: float) -> list[float]:
        first, _ = self._in_a_row(1)  # slower than the others: the device was idle
        count, end = max(1, min(CALLS, int(seconds / first))), time.perf_counter() + seconds
        walls: list[float] = []
        while not walls or time.perf_counter() < end:
            wall, host = self._pair(count)
            walls.append(wall)
            self.host.append(host)
        return walls

    def measured(self, samples: Sequence[float]) -> dict[str, Any]:
        p20, p50, p80 = (1e3 * x for x in spread(samples))
        found = {"eager_p20_ms": p20, "eager_ms": p50, "eager_p80_ms": p80}
        return {**found, "eager_samples": len(samples), "host_additions": median(self.host)}

    def _pair(self, count: int) -> tuple[float, float]:
        _, addition = _in_a_row(self._addition, CALLS)
        wall, host = self._in_a_row(count)
        return wall, host / addition

    def _in_a_row(self, count: int) -> tuple[float, float]:
        return _in_a_row(lambda: next(self._turns)(), count)


def _in_a_row(run: Run, count: int) -> tuple[float, float]:
    """Seconds of one of `count` calls: until all have run, and until the last is queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count, queued / count


def measure_ceilings(device: torch.device) -> Ceilings:
    """The large copy and the large matrix product that percentages of a floor refer to."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    side = 8192 if on_gpu else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randn((1 << 29) if on_gpu else (1 << 24), device=device)
    target = torch.empty_like(source)
    timings = []
    for run in (lambda: torch.mm(a, b, out=product), lambda: target.copy_(source)):
        timer: Timer = EventTimer([run]) if on_gpu else CpuTimer([run])
        samples: list[float] = []
        timer.burst(0)
        for _ in range(5):
            time.sleep(0.05 if on_gpu else 0)
            samples += timer.burst(0.02)
        timings.append(spread(samples).p50)
    return Ceilings(
        flops=2 * side**3 / timings[0],
        bandwidth=2 * source.numel() * source.element_size() / timings[1],
        matmul=f"{side}^3 {str(dtype).removeprefix('torch.')}",
    )
