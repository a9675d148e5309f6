"""The process that touches the device: one workload after the other, every step announced.

It runs apart from the harness because a kernel may hang, a compiler may crash, and an illegal
access spoils a CUDA context for good. The harness listens to what is announced here, knows whom to
blame, and starts another worker.
"""

import gc
import importlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from qla_kernels.runtime import jit

from . import records
from .adapters import Call, Implementation, describe
from .messages import Begin, Done, Machine, Options, RowFacts, RowFailed
from .problems import Problem, problem_of
from .records import FAILED, MEMORY, NOT_APPLICABLE, OK, UNSUPPORTED, WRONG, Result, rounded
from .timing import CpuTimer, EagerTimer, EventTimer, GraphTimer, Timer, measure_ceilings
from .truth import Truth, relative_l2
from .workload import Ceilings

T = TypeVar("T")
SLOW_ENOUGH = 0.5  # seconds: on a CPU one more such call is enough


class Spoiled(Exception):
    """The CUDA context no longer works."""


@dataclass
class Entry:
    """An implementation that got the row right."""

    name: str
    implementation: Implementation
    calls: list[Call]  # on the first input set; from the capture on, one for each
    result: Result
    timer: Timer | None = None
    samples: list[float] = field(default_factory=list)


def main(
    connection: Any, provider: str, family: str, names: list[str], excluded: list[str], log: str,
    ceilings: Ceilings | None,
) -> None:  # fmt: skip
    """Entry point of the process; `provider` ("module:function") gives the implementations."""
    os.setsid()  # compilers that it starts go when it goes
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    module, function = provider.split(":")
    found = getattr(importlib.import_module(module), function)(family, names)
    worker = Worker(connection.send, [i for i in found if i.name not in excluded])
    worker.greet(ceilings)
    while True:
        try:
            workload, wanted, options = connection.recv()
        except EOFError:  # the harness is gone
            return
        spoiled = not worker.row(workload, wanted, options)
        connection.send(Done(spoiled, jit.compiled()))


class Worker:
    def __init__(self, send: Callable[[Any], None], implementations: list[Implementation]) -> None:
        self._send = send
        self._implementations = {i.name: i for i in implementations}
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._on_gpu = self._device.type == "cuda"
        if self._on_gpu:  # autograd runs a backward on its forward's stream: one to be captured
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def greet(self, ceilings: Ceilings | None) -> None:
        kind = self._device.type
        missing, versions = {}, records.package_versions(("torch", "triton", "tilelang", "numpy"))
        for name, implementation in self._implementations.items():
            self._send(Begin(name, "import"))
            reason = implementation.missing()
            if reason is not None:
                missing[name] = reason
            else:
                # a rival may be called as a library is: torch, whose version is another's
                key = implementation.distribution if name in versions else name
                versions[key] = implementation.version()
        self._send(Begin("", "ceilings"))
        ceilings = ceilings or measure_ceilings(self._device)
        labels = {i.name: i.label for i in self._implementations.values()}
        environment, device = records.device_environment(kind), records.device_name(kind)
        self._send(Machine(device, kind, environment, versions, labels, missing, ceilings))

    def row(self, workload: Any, wanted: list[str], options: Options) -> bool:
        """False when the CUDA context broke on the way."""
        try:
            self._row(workload, wanted, options)
        except Spoiled:
            return False
        except Exception as error:  # inputs or truth; every implementation's own is caught below
            self._send(RowFailed(describe(error)))
        return self._healthy()

    def _row(self, workload: Any, wanted: list[str], options: Options) -> None:
        self._send(Begin("", "inputs"))
        problem = problem_of(workload, self._device)
        self._send(RowFacts(problem.work, len(problem.inputs)))
        self._send(Begin("", "truth"))
        truth = problem.truth()
        entries = [
            entry
            for name in wanted
            if (entry := self._attempt(name, "first call", self._first, problem, truth, name))
        ]
        del truth
        self._free()
        for entry in entries:
            entry.timer = self._attempt(entry.name, "capture", self._timer, entry, problem)
        entries = self._bursts(entries, "timing", options)
        for entry in entries:
            self._send(_timed(entry))
        entries = [entry for entry in entries if self._on_gpu and entry.calls[0].eager]
        for entry in entries:
            entry.timer = self._attempt(entry.name, "eager", self._eager_timer, entry)
        for entry in self._bursts(entries, "eager", options):
            self._send(_timed(entry))

    def _bursts(self, entries: list[Entry], phase: str, options: Options) -> list[Entry]:
        """Entries with a timer take turns; returns those of which no burst failed."""
        entries = [entry for entry in entries if entry.timer is not None]
        for _ in range(options.rounds):
            for entry in list(entries):
                time.sleep(options.idle_s if self._on_gpu else 0)
                samples = self._attempt(entry.name, phase, self._burst, entry, options)
                if samples is None:
                    entries.remove(entry)
                entry.samples += samples or []
        return entries

    def _attempt(
        self, name: str, phase: str, step: Callable[..., T | None], *args: Any
    ) -> T | None:
        """`step`, or None after sending why it failed. Sticky CUDA errors end the worker."""
        self._send(Begin(name, phase))
        try:
            return step(*args)
        except torch.OutOfMemoryError as error:
            self._send(Result(name, MEMORY, f"{phase}: {describe(error)}"))
        except Exception as error:
            refused = type(error).__name__ == "Unsupported"
            status = UNSUPPORTED if refused else FAILED
            detail = str(error) if refused else f"{phase}: {describe(error)}"
            self._send(Result(name, status, detail))
        if not self._healthy():
            raise Spoiled
        return None

    def _first(self, problem: Problem, truth: Truth, name: str) -> Entry | None:
        implementation = self._implementations[name]
        lacking = implementation.inapplicable(problem.workload)
        if lacking is not None:
            self._send(Result(name, NOT_APPLICABLE, lacking))
            return None
        self._poison(problem.work.bytes)
        call = implementation.prepare(problem.workload, problem.inputs[0])
        self._synchronize()
        start = time.perf_counter()
        raw = call.run()
        self._synchronize()
        first_call = time.perf_counter() - start
        truth = truth._replace(rounded=(*truth.rounded, *implementation.rounds))
        verdict = truth.judge(call.collect(raw), problem.dtype, implementation.leaves_out)
        result = Result(name, OK, first_call_s=first_call, errors=rounded(verdict.errors))
        if verdict.complaint is not None:
            self._send(replace(result, status=WRONG, detail=verdict.complaint))
            return None
        return Entry(name, implementation, [call], result)

    def _timer(self, entry: Entry, problem: Problem) -> Timer:
        if not self._on_gpu:
            return CpuTimer([entry.calls[0].run])
        entry.result = replace(entry.result, peak_bytes=_peak_bytes(entry.calls[0]))
        prepare = entry.implementation.prepare
        entry.calls += [prepare(problem.workload, inputs) for inputs in problem.inputs[1:]]
        runs = [call.run for call in entry.calls]
        if not entry.calls[0].capture:
            return EventTimer(runs)
        try:
            timer = GraphTimer(runs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._synchronize()
            note = f"not captured ({describe(error)}): launch gaps are in its time"
            entry.result = replace(entry.result, detail=note)
            return EventTimer(runs)
        _check_replay(timer, entry.calls[-1])
        return timer

    def _burst(self, entry: Entry, options: Options) -> list[float]:
        assert entry.timer is not None, "timers are made before rounds begin"
        slow = not self._on_gpu and (entry.result.first_call_s or 0.0) >= SLOW_ENOUGH
        if slow and entry.samples:
            return []
        return entry.timer.burst(options.burst_s)

    def _eager_timer(self, entry: Entry) -> Timer:
        return EagerTimer([call.eager() for call in entry.calls if call.eager], self._device)

    def _poison(self, num_bytes: float) -> None:
        """The next allocations find NaN, so that an element nobody wrote is not right by luck."""
        if self._on_gpu:
            self._free()
            count = min(2 * int(num_bytes), torch.cuda.mem_get_info()[0] // 2) // 4
            torch.full((count,), math.nan, device=self._device)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _healthy(self) -> bool:
        """Frees what is not used any more; an error in a kernel shows here at the latest."""
        try:
            self._free()
            self._synchronize()
        except Exception:
            return False
        return True

    def _free(self) -> None:
        if self._on_gpu:
            gc.collect()
            torch.cuda.empty_cache()


def _timed(entry: Entry) -> Result:
    """What is known of an entry with what its timer found; frees the timer, and its graph."""
    assert entry.timer is not None, "only entries with a timer have bursts"
    entry.result = replace(entry.result, **entry.timer.measured(entry.samples))
    entry.timer, entry.samples = None, []
    return entry.result


def _peak_bytes(call: Call) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _check_replay(timer: GraphTimer, last: Call) -> None:
    """The graph computes what the call does: a launch on another stream would not be in it."""
    want = {name: x.clone() for name, x in last.collect(last.run()).items()}
    for x in last.collect(timer.results).values():
        x.fill_(math.nan)
    got = last.collect(timer.replay())
    for name, x in want.items():
        if not relative_l2(got[name], x) < 1e-3:
            raise RuntimeError(f"a replay of its graph does not write {name}")
