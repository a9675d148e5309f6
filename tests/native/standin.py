"""Builds the stand-in driver and the launcher, and starts processes that run on them."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qla_kernels.build import compile_launcher

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libcuda.so.1", "libcudart.so.13")


@functools.cache
def built() -> Path:
    """A folder, for the life of the process, with the stand-in libraries and the launcher."""
    folder = Path(tempfile.mkdtemp(prefix="qla-standin-"))
    source = str(Path(__file__).with_name("driver.c"))
    for name in LIBRARIES:
        command = ["cc", "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(folder / name), source], check=True)
    compile_launcher(folder)
    return folder


def environment(folder: Path, libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Without the runtime library for a torch that has CUDA, which needs its own."""
    preload = " ".join(str(folder / name) for name in libraries)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QLA_")}
    return {**kept, "LD_PRELOAD": preload, "STANDIN_FOLDER": str(folder), "PYTHONPATH": path}


def run(*arguments: str, timeout: float = 600, **env: str) -> str:
    """What a Python that runs on the stand-in prints; raises with its errors if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment(built()), **env},
        timeout=timeout,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


class Driver:
    """In a process that `run` started: what the stand-in was given."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def expect(self, letters: str) -> None:
        """Empties the record; the next launches have arguments p, m, i, f: see driver.c."""
        self.library.standin_expect(letters.encode())

    def record(self) -> bytes:
        room = ctypes.create_string_buffer(1 << 16)
        size = self.library.standin_record(room)
        return room.raw[:size]

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"standin_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"standin_{name}").value = value


def launcher(device_type: int = 1, exchange: bool = True):
    """In such a process: the launcher, for tensors of the CPU."""
    return configured(Path(os.environ["STANDIN_FOLDER"]), device_type, exchange)


def configured(folder: Path, device_type: int = 1, exchange: bool = True):
    """A folder's launcher; without `exchange`, and before torch 2.10, it asks torch by Python."""
    import torch

    from qla_kernels.native import prebuilt

    native = prebuilt._native(folder / prebuilt.LAUNCHER)
    api = prebuilt._exchange(torch.Tensor) if exchange else None
    codes = {
        getattr(torch, name): code << 8 | bits for name, (code, bits) in prebuilt.DTYPES.items()
    }
    native.configure(api, torch.Tensor, lambda device: 0, codes, device_type)
    return native


def replaying():
    """The launcher, told how to ask torch what observes a call; programs of this process use it."""
    import torch

    from qla_kernels import programs

    native = launcher()
    native.watch_with(
        torch.nn.Parameter,
        torch.is_grad_enabled,
        torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch.autograd.forward_ad,
    )
    programs._native = lambda: native
    return native


def kinds(entry) -> str:
    """The letters of an entry's kernel arguments."""
    letters = {"pointer": "p", "map": "m", "int32": "i", "float32": "f"}
    return "".join(letters[kind] for kind, _ in entry["arguments"])
