"""Compiles what workloads need in several processes at once, so that a benchmark finds it cached.

FLA times variants against each other in its first call. It is told not to keep what it chose on a
GPU as busy as this.
"""

import argparse
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import groupby
from typing import Any, NoReturn

from .messages import Machine, Options
from .progress import Progress
from .records import OK
from .watchdog import Harness

Task = tuple[str, list[Any]]  # an implementation, and workloads for which kernels are the same


def compile_all(options: argparse.Namespace, workloads: Sequence[Any]) -> int:
    """Exit status: 0 when every first call worked."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # for the workers
    progress = Progress()
    settings = Options(compile_only=True, input_sets=1)
    log = options.out / f"{options.family}-warm.log"

    def harness(names: Sequence[str]) -> Harness:
        return Harness(options.family, names, settings, log, first_call_limit=options.limit)

    with harness(options.impl) as scout:
        machine = scout.machine
    tasks = tasks_for(machine, workloads)
    progress.start(len(tasks), machine)
    failures = []

    def work(task: Task) -> None:
        name, group = task
        progress.row(f"{name} {group[0].heads_label} {group[0].kind}")
        with harness([name]) as worker:
            for workload in group:
                result = worker.row(workload).result(name)
                if result is not None and result.status not in (OK, "not applicable"):
                    failures.append(f"{workload.name}, {name}: {result.status} {result.detail}")

    # An exception from a handler can be lost in code whose exceptions Python ignores.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _abandon)
    with ThreadPoolExecutor(options.warm) as pool:
        futures = [pool.submit(work, task) for task in tasks]
        while wait(futures, timeout=1).not_done:
            pass  # handlers run in this thread, so it has to be awake if another got the signal
    for future in futures:
        future.result()
    progress.close()
    names = ", ".join(name for name in machine.labels if name not in machine.missing)
    print("\n".join(failures) or f"compiled for {len(workloads)} workloads: {names}")
    return 1 if failures else 0


def _abandon(*_: object) -> NoReturn:
    """Ends the workers, and the compilers that they started; what they finished is on disk.

    Leaving the pool would wait for each to end by itself.
    """
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
    os.write(1, b"stopped: not everything is compiled\n")  # this thread may be printing
    os._exit(130)


def tasks_for(machine: Machine, workloads: Sequence[Any]) -> list[Task]:
    names = [name for name in machine.labels if name not in machine.missing]
    each, alike = [[workload] for workload in workloads], _alike(workloads)
    return [(n, group) for n in names for group in (each if n in machine.by_length else alike)]


def _alike(workloads: Sequence[Any]) -> list[list[Any]]:
    def kind(workload: Any) -> tuple[str, str]:
        return workload.heads_label, workload.kind

    return [list(group) for _, group in groupby(sorted(workloads, key=kind), key=kind)]
