"""What the doctor and the self-test say about files of prebuilt kernels."""

from collections.abc import Iterator
from typing import Any

from qla_kernels.runtime import digests
from qla_kernels.runtime.compiler import NEEDS_TILELANG
from qla_kernels.runtime.native import prebuilt

OTHERS = "prebuilt kernels for other drivers"


def section() -> dict[str, object]:
    """Returns which file's kernels are used, and which variants would be compiled instead.

    Without a driver, which decides, it is all files that are there.
    """
    try:
        file = prebuilt.in_use()
        if isinstance(file, str):
            return {"file": f"none: {file}"}
        others = [contents(other) for other in prebuilt.others()]
    except Exception as error:  # a damaged file: its error says what to do
        return {"file": f"unknown ({type(error).__name__}: {error})"}
    also = [line for about in others for line in (about["file"], about["set"], *about["kernels"])]
    return contents(file) | ({"for other drivers": also} if also else {})


def contents(file: prebuilt.KernelFile) -> dict[str, Any]:
    """Returns a file's path, its set, and how many of its kernels are used."""
    every = digests.recorded()
    here = [label for label in every if file.has(label)]
    other = [label for label in every if label in file.kernels and label not in here]
    lines = [f"{len(here)} of {len(every)} variants are used"]
    if other:
        names = ", ".join(sorted({label.partition("-")[0] for label in other}))
        lines.append(f"{len(other)} were built from other sources: {names}")
    if absent := len(every) - len(here) - len(other):
        lines.append(f"{absent} are not in the file")
    made_by = ", ".join(f"{k} {v}" for k, v in file.manifest.items() if k in prebuilt.TOOLS)
    return {"file": str(file.path), "set": f"{file.manifest['set']}: {made_by}", "kernels": lines}


def read(file: prebuilt.KernelFile) -> tuple[bool, str]:
    """Reads all kernels of a file; returns whether none is lacking, or may be, and what is there.

    Raises ValueError if one is damaged.
    """
    prebuilt.read(file, file.kernels)
    every = digests.recorded()
    used = sum(map(file.has, every))
    said = f"{used} of {len(every)} variants, {file.path}"
    if used == len(every):
        return True, said
    return prebuilt.can_compile(), f"{said}; the others need {NEEDS_TILELANG}"


def other_sets() -> Iterator[tuple[str, bool, str]]:
    """Reads the kernels that other drivers would use; yields a name, whether they pass, and why.

    The self-test reads the file in use. Nothing is yielded if that cannot be opened, or if a driver
    has chosen.
    """
    try:
        prebuilt.in_use()
    except ValueError:  # the self-test says so
        return
    try:
        for file in prebuilt.others():
            yield OTHERS, *read(file)
    except ValueError as error:
        yield OTHERS, False, str(error)
