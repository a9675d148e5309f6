"""Translated sources to one executable per kernel, with g++, kept on disk and keyed by content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from qla_kernels.lab.emulator import translate
from qla_kernels.lab.emulator.cache import folder, locked, write
from qla_kernels.lab.emulator.errors import EmulationError, UnknownCodeError
from qla_kernels.lab.emulator.lowering import Generated, version
from qla_kernels.runtime.errors import Unsupported, need

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
# Uninitialised registers hold a pattern (-1.7e38 as float), so that using one shows.
# -O2 compiled twice as long and launched no faster: products and copies are the runtime's.
# Each load and store calls a function of the runtime, which notes who uses shared memory.
DEVICE_FLAGS = [
    "-Og",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
]
# Without C++'s own <math.h>, which took longer to read than the wrapper to compile.
HOST_FLAGS = ["-O0", "-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS"]
RUNTIME_FLAGS = ["-O3"]
HEADER = "device/emulator.h"  # the first line of every kernel: compiled once, as g++ calls it

# What g++ says when the translated source uses a name that no header of ours has.
UNKNOWN = [
    (r"error: '(\w+)' is not a member of '(\w+)'", r"\2::\1"),
    (r"error: '(\w+)' was not declared", r"\1"),
    (r"error: '(\w+)' does not name a type", r"\1"),
    (r"error: there are no arguments to '(\w+)'", r"\1"),
    (r"error: '[^\n]*?' has no member named '(\w+)'", r"a member \1"),
    (r"error: no matching function for call to '([^'\n]*)'", r"\1"),
    (r"error: static assertion failed: ([^\n]*)", r"\1"),
    (r"undefined reference to `(\w+)'", r"\1"),
]


def build(lowered: Generated) -> Path:
    """The executable of a lowered kernel; its folder also holds the translated sources."""
    sources = {
        "kernel.cpp": translate.device(lowered.device, lowered.launch_parameters),
        "host.cpp": translate.host(lowered.host),
    }
    runtime = _runtime()
    key = _digest([*sources.values(), runtime.name, *DEVICE_FLAGS, *HOST_FLAGS])
    place = folder() / "kernels" / f"{lowered.name}-{key}"
    executable = place / "kernel"
    with locked(place):
        if executable.exists():
            return executable
        for name, text in sources.items():
            write(place / name, text)
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            objects = [Path(scratch) / "kernel.o", Path(scratch) / "host.o"]
            flags = [f"-I{runtime}", *DEVICE_FLAGS]  # there g++ finds the compiled header first
            _compile(place / "kernel.cpp", objects[0], flags, lowered)
            _compile(place / "host.cpp", objects[1], HOST_FLAGS, lowered)
            linked = Path(scratch) / "kernel"
            inputs = map(str, [*runtime.glob("*.o"), *objects])  # of two copies, the fast one
            _run([*inputs, "-pthread", "-o", str(linked)], lowered, place)
            os.replace(linked, executable)
    return executable


@cache
def _runtime() -> Path:
    """The folder of the runtime's object files and of `HEADER`, compiled once for all kernels."""
    files = sorted([*HERE.glob("device/*.h"), *HERE.glob("runtime/*")])
    flags = [*_architecture(), *FLAGS, *RUNTIME_FLAGS, *DEVICE_FLAGS]
    key = _digest([*(file.read_text() for file in files), *flags])
    place = folder() / f"runtime-{key}"
    with locked(place), ThreadPoolExecutor(max_workers=2) as pool:
        if place.exists():
            return place
        scratch = place.with_name(place.name + ".new")
        (scratch / HEADER).parent.mkdir(parents=True, exist_ok=True)

        def compile_one(source: Path) -> None:
            if source.suffix == ".h":
                header = ["-x", "c++-header", *DEVICE_FLAGS]
                _compile(source, scratch / f"{HEADER}.gch", header)
            else:
                _compile(source, scratch / f"{source.stem}.o", RUNTIME_FLAGS)

        list(pool.map(compile_one, [HERE / HEADER, *HERE.glob("runtime/*.cpp")]))
        os.rename(scratch, place)
    return place


def _compile(
    source: Path, target: Path, flags: list[str], lowered: Generated | None = None
) -> None:
    arguments = [*FLAGS, *_architecture()[1:], *flags, f"-I{HERE}", "-c", str(source)]
    _run([*arguments, "-o", str(target)], lowered, source)


def _run(arguments: list[str], lowered: Generated | None, source: Path) -> None:
    command = [_architecture()[0], *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False
    )
    if result.returncode == 0:
        return
    names = list(
        dict.fromkeys(
            found.expand(name)
            for pattern, name in UNKNOWN
            for found in re.finditer(pattern, result.stderr)
        )
    )
    first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr)
    if lowered is None or not names:
        raise EmulationError(f"g++ failed on {source}:\n{result.stderr[:4000]}")
    raise UnknownCodeError(
        f"{lowered.name}: TileLang {version()} generated code that the emulator does"
        f" not know: {'; '.join(names)}. Add it under lab/emulator/device (README.md there,"
        f" 'Teaching it something new'). Translated source: {source}. First message: {first}"
    )


@cache
def _architecture() -> tuple[str, ...]:
    """The compiler's path, and flags for this processor; Unsupported without a compiler."""
    if not sys.platform.startswith("linux"):
        raise _lacks(f"found {sys.platform}", "Linux", "run it in a Linux container")
    compiler = shutil.which("g++")
    if compiler is None:
        raise _lacks("found no g++", "g++ 11 or newer", "apt install g++")
    found = subprocess.run(
        [compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if int(found.split(".")[0]) < 11:
        fix = "put a newer one first in PATH, under the name g++"
        raise _lacks(f"found g++ {found} at {compiler}", "g++ 11 or newer", fix)
    processor = Path("/proc/cpuinfo").read_text()
    wide = all(re.search(rf"\b{flag}\b", processor) for flag in ("avx2", "fma", "f16c", "bmi2"))
    return (compiler, "-march=x86-64-v3") if wide else (compiler,)


def _lacks(got: str, needs: str, fix: str) -> Unsupported:
    return Unsupported(need("emulator", got, needs, fix))


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
