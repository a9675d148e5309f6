"""One launch in a process of its own: tensors go through shared memory, arguments through stdin.

A crash, an endless loop or a wrong write cannot touch the caller. Each storage lies between pages
that fault: right before those behind it where the seed is even, right behind those before it where
it is odd. So two seeds find every access outside; writes on the far side are found by each.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qla_kernels.lab.emulator.errors import EmulationError

PAGE = mmap.PAGESIZE
ALIGNMENT = 256  # of a device allocation; less where a storage would not end at its pages' edge,
PIECE = 16  # but no less than what TMA reads in; integers are read one by one
HANG = 1500.0  # seconds of waiting for a launch, or PATIENCE times its limit if that is more:
PATIENCE = 6  # the limit counts the time in which it computes, and it is not alone on its machine
POISON = 0xFF  # fills what lies between a storage and its guard pages

DTYPES = {  # DLPack code and bits
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}

Argument = torch.Tensor | int | float | bool | None


@dataclass
class Region:
    """A storage in the shared file: pages at `begin`, data at `data`, poison around it."""

    storage: torch.Tensor  # as bytes
    names: list[str]
    begin: int
    data: int
    end: int

    @property
    def stop(self) -> int:
        return self.data + self.storage.numel()


def run(
    executable: Path,
    names: Sequence[str],
    arguments: Sequence[Argument],
    options: dict[str, Any],
    time_limit: float,
) -> None:
    """Runs one launch; writes the tensors back only when it succeeds."""
    regions, words = _lay_out(names, arguments, at_start=options["seed"] % 2 == 1)
    size = max((region.end for region in regions), default=0)
    file = os.memfd_create("emulator")
    try:
        os.ftruncate(file, max(size, PAGE))
        shared = torch.frombuffer(mmap.mmap(file, max(size, PAGE)), dtype=torch.uint8)
        shared.fill_(POISON)
        for region in regions:
            shared[region.data : region.stop].copy_(region.storage)
        lines = [f"option {name} {value}" for name, value in options.items()]
        lines += [f"option time_limit {time_limit}", f"option file {file}"]
        lines += [
            f"region {r.begin} {r.data - r.begin} {r.storage.numel()} {','.join(r.names)}"
            for r in regions
        ]
        _call(executable, "\n".join(lines + words), file, max(HANG, PATIENCE * time_limit))
        for region in regions:
            _check_poison(shared, region)
        for region in regions:
            region.storage.copy_(shared[region.data : region.stop])
    finally:
        os.close(file)


def _lay_out(
    names: Sequence[str], arguments: Sequence[Argument], at_start: bool
) -> tuple[list[Region], list[str]]:
    """Places every storage once, and describes the arguments for runtime/main.cpp."""
    regions: dict[int, Region] = {}
    words = []
    offset = 0
    for name, argument in zip(names, arguments, strict=True):
        if not isinstance(argument, torch.Tensor):
            words.append(_scalar(name, argument))
            continue
        if argument.device.type != "cpu" or argument.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got {argument.dtype} on {argument.device}; need a CPU tensor of one of"
                f" {', '.join(str(dtype) for dtype in DTYPES)}"
            )
        storage = argument.untyped_storage()
        key = storage.data_ptr() or -len(regions) - 1  # empty storages share the null pointer
        if key not in regions:
            data = torch.empty(0, dtype=torch.uint8).set_(storage)
            size = data.numel()
            end = offset + -(-size // PAGE) * PAGE
            least = argument.element_size() if not argument.dtype.is_floating_point else PIECE
            alignment = max(least, min(ALIGNMENT, size & -size))
            start = offset if at_start else end - -(-size // alignment) * alignment
            regions[key] = Region(data, [], offset, start, end)
            offset = end
        region = regions[key]
        region.names.append(name)
        code, bits = DTYPES[argument.dtype]
        index = list(regions).index(key)
        byte_offset = argument.storage_offset() * argument.element_size()
        fields = [index, byte_offset, code, bits, argument.dim()]
        words.append(" ".join(map(str, ["tensor", *fields, *argument.shape, *argument.stride()])))
    return list(regions.values()), words


def _scalar(name: str, argument: Argument) -> str:
    if argument is None:
        return "none"
    if isinstance(argument, bool):
        return f"bool {int(argument)}"
    if isinstance(argument, int):
        return f"int {argument}"
    if isinstance(argument, float):
        return f"float {argument!r}"
    raise TypeError(f"{name}: got {type(argument).__name__}; need a tensor, a number or None")


def _call(executable: Path, arguments: str, file: int, patience: float) -> None:
    try:
        result = subprocess.run(
            [executable],
            input=arguments,
            capture_output=True,
            text=True,
            errors="replace",
            pass_fds=[file],
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmulationError(f"killed after {patience:g} s without a report of its own") from None
    sys.stdout.write(result.stdout)  # T.print
    if result.returncode:
        raise EmulationError(
            result.stderr.strip() or f"ended with status {result.returncode} and no message"
        )


def _check_poison(shared: torch.Tensor, region: Region) -> None:
    before = shared[region.begin : region.data]
    after = shared[region.stop : region.end]
    if bool((before != POISON).any()) or bool((after != POISON).any()):
        side = "before the start" if bool((before != POISON).any()) else "past the end"
        raise EmulationError(f"wrote {side} of {', '.join(region.names)}")
