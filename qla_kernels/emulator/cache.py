"""Where lowered and compiled kernels are kept between runs; the folder is safe to delete."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def folder() -> Path:
    """EMU_CACHE; else build/emulator of a checkout; else a folder of the user's cache."""
    if chosen := os.environ.get("EMU_CACHE"):
        return Path(chosen)
    if (ROOT / "pyproject.toml").exists():
        return ROOT / "build" / "emulator"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "qla_kernels" / "emulator"


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
