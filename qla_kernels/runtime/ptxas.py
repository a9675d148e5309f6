"""Assembles nvcc's PTX by another ptxas: kernels for drivers of CUDA 12 without that toolkit.

Drivers of CUDA 12 read machine code of ptxas 12.9, but none of ptxas 13. The package
`nvidia-cuda-nvcc-cu12` has this ptxas, and no nvcc. It reads PTX up to version 8.8, and nvcc 13.0
writes 9.0, so the number in the file is lowered. That is legal if the text is a program of both
versions and means the same in both. nvcc's own ptxas knows both: it has to give the same machine
code, byte by byte, for the text under either number.
"""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported, need

NEWEST_PTX = {"12.9": (8, 8)}  # that a release reads; others read what their own nvcc writes
FOR_PTXAS = "--ptxas-options="
WITHOUT_PTX = ("--cubin", "-lineinfo")  # flags of nvcc

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)


def version(ptxas: Path) -> str:
    """Returns the release of a ptxas, as `jit.nvcc_version` does; Unsupported if it is none."""
    fix = "pip install --target FOLDER nvidia-cuda-nvcc-cu12==12.9.86, which has bin/ptxas"
    try:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise Unsupported(need("--ptxas", str(error), "a program", fix)) from error
    found = re.search(r"release .*", said)
    if not said.startswith("ptxas:") or not found:
        raise Unsupported(need("--ptxas", f"{ptxas} is no ptxas", "an assembler of CUDA", fix))
    return found[0]


def assemble(
    name: str, source: str, pass_configs: Mapping[str, object], folder: Path, ptxas: Path
) -> jit.Assembled:
    """Assembles CUDA C++ to a cubin as `jit.assemble` does, without line information.

    Raises Unsupported if this ptxas does not know what the PTX uses. `name` is for messages.
    """
    ptx = ptx_of(source, pass_configs, folder)
    text, written, read_as = lowered(ptx, version(ptxas))
    named = f"its PTX {written}, read as {read_as}"
    flags = jit.nvcc_flags(pass_configs)
    options = [flag.removeprefix(FOR_PTXAS) for flag in flags if flag.startswith(FOR_PTXAS)]
    if written != read_as:
        own = jit.nvcc().resolve().with_name("ptxas")
        texts = ptx, text
        first, other = (
            _run(name, own, x, options, folder, named).cubin.read_bytes() for x in texts
        )
        if first != other:
            got, fix = f"{named}, is another program", "build with nvcc 12.9 of a toolkit"
            raise Unsupported(need(name, got, "PTX that means the same in both", fix))
    return _run(name, ptxas, text, options, folder, named)


def ptx_of(source: str, pass_configs: Mapping[str, object], folder: Path) -> str:
    """Returns the PTX that nvcc makes of CUDA C++; RuntimeError with its output if it fails."""
    code, ptx = folder / "kernel.cu", folder / "nvcc.ptx"
    code.write_text(source)
    flags = [flag for flag in jit.nvcc_flags(pass_configs) if flag not in WITHOUT_PTX]
    flags = [flag for flag in flags if not flag.startswith(FOR_PTXAS)]
    command = [str(jit.nvcc()), "--ptx", *flags, "-o", str(ptx), str(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return ptx.read_text()


def _run(
    name: str, ptxas: Path, ptx: str, options: Sequence[str], folder: Path, named: str
) -> jit.Assembled:
    given, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    given.write_text(ptx)
    command = [str(ptxas), f"-arch={jit.TARGET['arch']}", "-m64", *options]
    done = subprocess.run([*command, "-o", cubin, given], capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode:
        said = next((line for line in report.splitlines() if "error" in line), report.strip())
        got = f"ptxas {version(ptxas)} refuses {named} ({said})"
        fix = "build with nvcc of a toolkit of that release, or leave the kernel out"
        raise Unsupported(need(name, got, "PTX that this ptxas knows", fix))
    return jit.Assembled(cubin, report)


def lowered(ptx: str, release: str) -> tuple[str, str, str]:
    """Returns PTX whose version this release of ptxas reads, the version before, and after.

    Raises ValueError if the text has no version.
    """
    found = _VERSION.search(ptx)
    if not found:
        raise ValueError(need("nvcc --ptx", "a text without .version", "PTX", "report it"))
    written = int(found[1]), int(found[2])
    number = release.removeprefix("release ").partition(",")[0]
    read_as = min(written, NEWEST_PTX.get(number, written))
    text = _VERSION.sub(f".version {read_as[0]}.{read_as[1]}", ptx, count=1)
    return text, f"{written[0]}.{written[1]}", f"{read_as[0]}.{read_as[1]}"
