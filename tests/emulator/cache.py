"""Where lowered and compiled kernels are kept between runs: build/emulator, safe to delete."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    default = Path(__file__).parents[2] / "build" / "emulator"
    return Path(os.environ.get("EMU_CACHE", default))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes what is at `path`; test workers share the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Writes in one step, so that a concurrent reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
