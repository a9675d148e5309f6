"""Where lowered and compiled kernels are kept between runs; the folder is safe to delete."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qla_kernels.runtime.errors import Unsupported, need

ROOT = Path(__file__).parents[3]


def folder() -> Path:
    """EMU_CACHE; else build/emulator of a checkout; else a folder of the user's cache."""
    if chosen := os.environ.get("EMU_CACHE"):
        return Path(chosen)
    if (ROOT / "pyproject.toml").exists():
        return ROOT / "build" / "emulator"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "qla_kernels" / "emulator"


def _made(folder: Path) -> Path:
    """Makes a folder, with those above it, and returns it; Unsupported if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except OSError as error:
        got, fix = f"no place for its files ({error})", "set EMU_CACHE to another folder"
        text = need("emulator", got, "a folder that it can write", fix)
        raise Unsupported(text) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes what is at `path`; test workers share the folder."""
    with open(_made(path.parent) / f"{path.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Writes in one step, so that a concurrent reader sees the whole file or none."""
    with tempfile.NamedTemporaryFile("w", dir=_made(path.parent), delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
