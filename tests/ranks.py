"""Ranks as processes: one start, every case, what they found as JSON. Those of `serve` use gloo.

Starting interpreters takes longer than the cases, so four ranks run all of them, smaller worlds in
groups of some of the four; and those of `serve` are forks of one process that has imported torch.
The last case may kill one.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[1]
WORLD = 4
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT = HANG  # seconds for everything; a deadlock is a failure
DEADLINE = 4.0  # seconds, of the groups in which somebody is missing; all others take a tenth

Case = Callable[[int], Iterator[tuple[str, Any]]]  # what a rank finds, with its name


def start(module: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a module that ends in `serve` has to say."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives here
    command = (sys.executable, "-m", module, str(folder), str(store.port))
    ended(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True), LIMIT)
    return gathered(folder, WORLD)


def forked(
    module: str, folder: Path, world: int, limit: float = LIMIT
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """As `launched`; the ranks are forks of one process that has imported the module. Not on GPUs.

    Each calls the module's `main` with what a rank of `launched` is told.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives here
    command = (sys.executable, "-m", "tests.ranks", module, str(folder), str(store.port))
    command = (*command, str(world))
    ended(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True), limit)
    codes = [folder / f"{r}.code" for r in range(world)]
    return gathered(folder, world), [int(x.read_text()) if x.exists() else None for x in codes]


def fork(module: str, folder: str, port: str, world: str) -> None:
    """The ranks of `forked`."""
    import torch

    main, ranks = importlib.import_module(module).main, {}
    torch.set_num_threads(1)
    for rank in range(int(world)):
        if child := os.fork():
            ranks[child] = rank
            continue
        with (Path(folder) / f"{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), sys.stderr.fileno())
        code = 1
        try:
            main(Path(folder), int(port), rank, int(world))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    for _ in ranks:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        (Path(folder) / f"{ranks[child]}.code").write_text(str(code))


def ended(process: subprocess.Popen[bytes], limit: float) -> None:
    """Waits for a process and its children; those that hang have said what they had found."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launched(
    module: str, folder: Path, world: int, limit: float = LIMIT
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """What each rank has to say, by case, and how it ended; None if it had to be killed.

    A rank is told the folder for what it has to say, the store's port, its number, and how many
    there are.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives here
    command = (sys.executable, "-m", module, str(folder), str(store.port))
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(world)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stderr=(folder / f"{r}.err").open("w"),
        )
        for r in range(world)
    ]
    end, codes = time.monotonic() + limit, []
    for rank in ranks:
        try:
            codes.append(rank.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            rank.kill()
            codes.append(None)
    return gathered(folder, world), codes


def gathered(folder: Path, world: int) -> list[dict[str, Any]]:
    said = []
    for r in range(world):
        file = folder / f"{r}.json"
        errors = (folder / f"{r}.err").read_text()[-3000:]
        said.append(json.loads(file.read_text()) if file.exists() else {"no end": errors})
    return said


def serve(*cases: Case, before: Callable[[], object] | None = None) -> None:
    """As all ranks, in the folder and by the store of the command line.

    `before` computes once what each of them needs, and caches it.
    """
    import torch

    from qla_kernels import gdn, sparse_ring  # noqa: F401
    from qla_kernels.runtime.cpu import reference
    from tests import compare, gdn_calls  # noqa: F401

    reference()
    torch.set_num_threads(1)
    # Fresh memory is NaN. Torch imports its compiler for this: once, not in each rank.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if before:
        before()
    for rank in range(WORLD):
        if os.fork() == 0:
            with (Path(sys.argv[1]) / f"{rank}.err").open("w") as errors:
                os.dup2(errors.fileno(), sys.stderr.fileno())
            try:
                serve_as(rank, cases)
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # torch would wait for the dead
    for _ in range(WORLD):
        os.wait()


def serve_as(rank: int, cases: tuple[Case, ...]) -> None:
    import torch
    import torch.distributed as dist

    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    patience = timedelta(seconds=HANG)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    said: dict[str, Any] = {}
    for case in cases:
        said.update(case(rank))
        (folder / f"{rank}.json").write_text(json.dumps(said))


def raised(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    fork(*sys.argv[1:])
