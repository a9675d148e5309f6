"""Runs workloads in a worker process and turns what it says into rows, whatever goes wrong.

An implementation that raises, computes a wrong result or runs out of memory says so in its own
cell. One that hangs, or takes the process down, loses its cell: the worker is replaced, and goes on
with those that had no result yet. After two such rows it is not tried again.
"""

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.cuda import is_available as has_gpu

from .messages import Begin, Done, Machine, Options, RowFacts, RowFailed
from .records import DIED, FAILED, MISSING, OK, TIME_LIMIT, Result, Row, row_of
from .worker import main as worker_main
from .workload import Ceilings, Work

PROVIDER = "benchmarks.rivals:implementations"
PRELOADED = ["benchmarks.attention.rivals", "benchmarks.serving.rivals"]  # import no rival
STRIKES = 2

# Seconds without a word. First calls compile: ours and the rivals' take up to 70 s.
LIMITS = {
    "start": 120.0, "import": 120.0, "ceilings": 60.0, "inputs": 60.0, "truth": 240.0,
    "first call": 300.0, "capture": 120.0, "timing": 60.0, "eager": 120.0,
}  # fmt: skip

Listener = Callable[[str, str], None]  # implementation, phase


class WorkerLost(Exception):
    """The worker hung or died while `begin` was going on."""

    def __init__(self, begin: Begin, status: str, detail: str) -> None:
        super().__init__(f"{begin.phase}: {detail}")
        self.begin, self.status = begin, status


class Harness:
    """Use as a context manager: leaving it ends the worker."""

    def __init__(
        self, family: str, names: Sequence[str], options: Options, log: Path, *,
        first_call_limit: float = LIMITS["first call"], provider: str = PROVIDER,
        listener: Listener = lambda implementation, phase: None,
    ) -> None:  # fmt: skip
        self._family, self._names, self._options = family, list(names), options
        self._log, self._provider, self._listener = log, provider, listener
        self._limits = {**LIMITS, "first call": first_call_limit}
        self._strikes: Counter[str] = Counter()
        self._unimportable: dict[str, str] = {}
        self._ceilings: Ceilings | None = None  # measured by the first worker
        self.kernels: dict[str, str] = {}  # digests of what this package launched, by label
        self.machine = self._start()

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def row(self, workload: Any) -> Row:
        """One workload, with a result for every implementation asked for."""
        missing = {**self.machine.missing, **self._unimportable}
        results = {name: Result(name, MISSING, reason) for name, reason in missing.items()}
        for name, count in self._strikes.items():
            if count >= STRIKES:
                results[name] = Result(name, FAILED, f"not tried: ended the worker {count} times")
        facts = RowFacts(Work(0.0, 0.0), 1)
        while wanted := [name for name in self.machine.labels if name not in results]:
            try:
                facts, spoiled = self._attempt(workload, wanted, results)
            except WorkerLost as lost:
                culprit = lost.begin.implementation
                for name in [culprit] if culprit else wanted:
                    _note(results, Result(name, lost.status, str(lost)))
                self._strikes.update([culprit] if culprit else [])
                spoiled = True
            if spoiled:
                self._stop()
                self._start()
        ordered = [results[name] for name in sorted(results, key=self._order)]
        ceilings, input_sets = self.machine.ceilings, facts.input_sets
        return row_of(workload, facts.work, ceilings, ordered, input_sets=input_sets)

    def _attempt(
        self, workload: Any, wanted: list[str], results: dict[str, Result]
    ) -> tuple[RowFacts, bool]:
        """Fills `results`; says what the row is, and whether the worker is of no more use."""
        assert self._connection is not None, "a harness has a worker until it is left"
        facts, begin = RowFacts(Work(0.0, 0.0), 1), Begin("", "inputs")
        with suppress(OSError):  # a worker that is gone shows when listened to
            self._connection.send((workload, wanted, self._options))
        while True:
            message = self._receive(begin)
            if isinstance(message, Begin):
                begin = message
            elif isinstance(message, RowFacts):
                facts = message
            elif isinstance(message, Result):
                _note(results, message)
            elif isinstance(message, RowFailed):
                for name in wanted:
                    results.setdefault(name, Result(name, FAILED, message.detail))
            elif isinstance(message, Done):
                self.kernels |= message.kernels
                if not message.spoiled:
                    for name in wanted:
                        results.setdefault(name, Result(name, FAILED, "no result"))
                return facts, message.spoiled

    def _order(self, name: str) -> int:
        known = list(self.machine.labels)
        return known.index(name) if name in known else len(known)

    def _start(self) -> Machine:
        """A new worker, without the libraries that brought one down while being imported."""
        # a GPU's context is one process's; without a GPU a server has the imports, for all workers
        context: Any = multiprocessing.get_context("spawn" if has_gpu() else "forkserver")
        context.set_forkserver_preload([worker_main.__module__, *PRELOADED])
        while True:
            ours, theirs = context.Pipe()
            self._connection: Connection[Any, Any] | None = ours
            call = theirs, self._provider, self._family, self._names, [*self._unimportable]
            args = (*call, str(self._log), self._ceilings)
            self._process = context.Process(target=worker_main, args=args)
            self._process.start()
            theirs.close()
            begin = Begin("", "start")
            try:
                while True:
                    message = self._receive(begin)
                    if isinstance(message, Machine):
                        self._ceilings = message.ceilings
                        return message
                    begin = message
            except WorkerLost as lost:
                self._stop()
                if not lost.begin.implementation:
                    raise RuntimeError(
                        f"the worker did not start: {lost}; see {self._log}"
                    ) from lost
                self._unimportable[lost.begin.implementation] = str(lost)

    def _receive(self, begin: Begin) -> Any:
        assert self._connection is not None, "a harness has a worker until it is left"
        self._listener(begin.implementation, begin.phase)
        limit = self._limits[begin.phase]
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise WorkerLost(begin, DIED, _cause_of_death(self._process.exitcode)) from None
        raise WorkerLost(begin, TIME_LIMIT, f"nothing happened for {limit:.0f} s")

    def _stop(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self._process.join(2)
        if self._process.is_alive():
            # its process group: compilers that it started hang with it
            if self._process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join(10)


def _note(results: dict[str, Result], new: Result) -> None:
    """A failure of eager calls is said beside the time of graph replays, which stays."""
    before = results.get(new.implementation)
    if before is not None and before.status == OK != new.status:
        new = replace(before, detail="; ".join(filter(None, [before.detail, new.detail])))
    results[new.implementation] = new


def _cause_of_death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process ended with {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
