"""Reads machine code: ptxas's resource report, and the instructions that each role runs.

The cubin contains line numbers, so every instruction leads back, through inlining, to a line of the
generated CUDA and from there to the threads that run it.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qla_kernels.runtime import jit

HOW_TO_GET = "pip install nvidia-cuda-nvdisasm"

UNITS = {  # instruction -> the name that schedules use for the unit
    "HGMMA": "wgmma",
    "QGMMA": "wgmma",
    "IGMMA": "wgmma",
    "HMMA": "mma",
    "IMMA": "mma",
    "UTMALDG": "tma_load",
    "UTMASTG": "tma_store",
    "UTMAREDG": "tma_store",
    "LDGSTS": "cp_async",
}

# Instructions that decide whether loads, tensor cores and the rest overlap; arithmetic is left out
_ORDERED = re.compile(
    "[HQI]GMMA|HMMA|WARPGROUP|MUFU|SYNCS|BAR|UTMA|UBLKCP|LDGSTS|USETMAXREG|FENCE"
    "|(LD|ST)(SM|S|G|L)$|SHFL|RED|ATOM"
)

_FRAME = re.compile(r'//## File "(.*)", line (\d+)$')
_LABEL = re.compile(r"(\.L_x_\d+):$")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


@dataclass(frozen=True)
class Spent:
    """The resources that ptxas reports for one function."""

    registers: int  # per thread at launch; set_max_nreg moves them between warpgroups afterwards
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    address: int
    line: int | None  # of the generated CUDA; None outside it
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def unit(self) -> str | None:
        if self.name == "UBLKCP":  # a bulk copy without a tensor map, in either direction
            return "tma_load" if ".S.G" in self.opcode else "tma_store"
        return UNITS.get(self.name)

    @property
    def top_register(self) -> int:
        return max(map(int, re.findall(r"\bR(\d+)\b", self.operands)), default=0)


def spent(report: str, function: str) -> Spent:
    """Parses the report of `jit.assemble`; returns the resources of `function`.

    Raises ValueError if the report does not mention it.
    """
    about = report.partition(f"Function properties for {function}\n")[2]
    stack = re.search(r"(\d+) bytes stack frame, (\d+) .*? stores, (\d+) .*? loads", about)
    used = re.search(r"Used (\d+) registers.*", about)
    if not stack or not used:
        raise ValueError(f"ptxas said nothing about {function}:\n{report}")
    smem = re.search(r"(\d+) bytes smem", used[0])
    warnings = {line.strip() for line in report.splitlines() if re.search(r"\bC75\d\d\b", line)}
    return Spent(
        registers=int(used[1]),
        stack=int(stack[1]),
        spill_stores=int(stack[2]),
        spill_loads=int(stack[3]),
        static_smem=int(smem[1]) if smem else 0,
        warnings=tuple(sorted(warnings)),
    )


@cache
def nvdisasm() -> Path | None:
    """Returns the disassembler's path: on PATH, next to nvcc, or in its wheel; None if absent."""
    candidates = [shutil.which("nvdisasm"), jit.nvcc().with_name("nvdisasm")]
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == "nvdisasm"]
    except importlib.metadata.PackageNotFoundError:
        pass
    return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


@cache
def nvdisasm_version() -> str:
    """Returns nvdisasm's release, such as `release 13.4, V13.4.92`, or `none` without nvdisasm."""
    if (tool := nvdisasm()) is None:
        return "none"
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return next((line.partition(", ")[2] for line in said.splitlines() if "release" in line), said)


def disassemble(cubin: Path) -> str:
    """Returns a cubin's SASS with line numbers. Needs nvdisasm."""
    command = [str(nvdisasm()), "--print-code", "--print-line-info-inline", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str, function: str) -> Iterator[Instruction]:
    """Yields the instructions of one function, in address order.

    Slow paths lie behind the function's end, without line numbers: code that cannot be reached from
    the instruction above it gets the line that first branches to its label.
    """
    body = sass.partition(f"\n.text.{function}:\n")[2].partition("//-----")[0]
    line, reachable = None, True
    branched_from: dict[str, int | None] = {}
    for text in body.splitlines():
        if frame := _FRAME.search(text):  # the outermost frame comes last
            line = int(frame[2]) if frame[1].endswith("/kernel.cu") else None
        elif (label := _LABEL.match(text)) and not reachable:
            line = branched_from.get(label[1])
        elif found := _INSTRUCTION.search(text):
            address, predicate, opcode, operands = found.groups()
            reachable = bool(predicate) or opcode not in ("BRA", "EXIT")
            if target := re.search(r"\.L_x_\d+", operands):
                branched_from.setdefault(target[0], line)
            yield Instruction(int(address, 16), line, opcode, operands.strip())


def order(selected: list[Instruction]) -> list[tuple[str, int]]:
    """Returns (instruction, run length) of the instructions that show whether work overlaps."""
    runs: list[tuple[str, int]] = []
    for instruction in selected:
        if not _ORDERED.match(instruction.name):
            continue
        shown = instruction.name
        if shown in ("WARPGROUP", "USETMAXREG", "SYNCS", "MUFU"):
            shown = instruction.opcode
        if instruction.opcode.startswith("WARPGROUP.DEPBAR"):  # how many groups stay in flight
            shown += " " + instruction.operands.rpartition(",")[2].strip()
        if runs and runs[-1][0] == shown:
            runs[-1] = (shown, runs[-1][1] + 1)
        else:
            runs.append((shown, 1))
    return runs
