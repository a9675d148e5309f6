"""On record: the kernels that each emulated test launches, and the CPU seconds that it takes.

`python -m pytest tests/emulated/FILE --record` writes the record of the tests that pass. With
--check-record, tests whose record is not what they launch fail.
"""

import fcntl
import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "emulated"
FILE = FOLDER / "launched.json"


class Launched(NamedTuple):
    seconds: float  # of CPU time, with kernels that are built
    kernels: tuple[str, ...]  # family.kernel, sorted; empty: none


@cache
def on_record() -> dict[str, Launched]:
    """Returns the record, by the part of a test's id behind `tests/emulated/`."""
    if not FILE.exists():
        return {}
    read = json.loads(FILE.read_text())
    return {
        f"{file}::{test}": Launched(seconds, tuple(kernels))
        for file, tests in read.items()
        for test, (seconds, *kernels) in tests.items()
    }


def write(new: dict[str, Launched]) -> None:
    """Puts tests on record. Workers of one run take turns; tests that are gone are taken off."""
    with open(FILE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        on_record.cache_clear()
        by_file: dict[str, dict[str, list[object]]] = {}
        for name, (seconds, kernels) in sorted((on_record() | new).items()):
            file, test = name.split("::", 1)
            if (FOLDER / file).exists():
                by_file.setdefault(file, {})[test] = [round(seconds, 1), *kernels]
        lines = ",\n".join(
            f'"{file}": {{\n'
            + ",\n".join(f"  {json.dumps(test)}: {json.dumps(row)}" for test, row in tests.items())
            + "\n}"
            for file, tests in by_file.items()
        )
        FILE.write_text(f"{{\n{lines}\n}}\n")


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])
