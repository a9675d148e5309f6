"""Ranks as processes: one start, every case, what they found as JSON. Those of `serve` use gloo.

Starting interpreters takes longer than the cases, so four ranks run all of them, smaller worlds in
groups of some of the four. The last case may kill one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[1]
WORLD = 4
LIMIT = HANG  # seconds for everything; a deadlock is a failure
DEADLINE = 20.0  # seconds, of the groups in which somebody is missing: ranks share two cores

Case = Callable[[int], Iterator[tuple[str, Any]]]  # what a rank finds, with its name


def start(module: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a module that ends in `serve` has to say."""
    said, _ = launched(module, folder, WORLD)
    return said


def launched(
    module: str, folder: Path, world: int, limit: float = LIMIT
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """What each rank has to say, by case, and how it ended; None if it had to be killed.

    A rank is told the folder for what it has to say, the store's port, its number, and how many
    there are.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives here
    command = (sys.executable, "-m", module, str(folder), str(store.port))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(world)],
            cwd=ROOT,
            env=env,
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
    said = []
    for r in range(world):
        file = folder / f"{r}.json"
        errors = (folder / f"{r}.err").read_text()[-3000:]
        said.append(json.loads(file.read_text()) if file.exists() else {"no end": errors})
    return said, codes


def serve(*cases: Case) -> None:
    """As the rank that the command line names."""
    import torch
    import torch.distributed as dist

    folder, port, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    patience = timedelta(seconds=HANG)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    said: dict[str, Any] = {}
    for case in cases:
        said.update(case(rank))
        (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # torch would wait for the dead


def raised(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
