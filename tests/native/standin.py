"""Builds the stand-in driver and the launcher, and starts processes that run on them."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qla_kernels.runtime.native.launcher import compile_launcher
from qla_kernels.runtime.native.symbols import Number
from tests import zygote

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libcuda.so.1", "libcudart.so.13")
CPU, CUDA = 1, 2  # DLPack's types of devices


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
    start = environment(built())
    how, what, *rest = arguments
    if how in ("-c", "-m"):
        module = f"import runpy; runpy.run_module({what!r}, run_name='__main__', alter_sys=True)"
        code, env = what if how == "-c" else module, {**start, **env}
        path = start["PYTHONPATH"]
        return said(zygote.run(code, *rest, cwd=ROOT, path=path, env=env, start=start))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**start, **env},
        timeout=timeout,
    )
    return said(done)


def said(done: subprocess.CompletedProcess[str]) -> str:
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
        room = ctypes.create_string_buffer(1 << 20)
        size = self.library.standin_record(room)
        return room.raw[:size]

    def note(self, name: str, first: int, second: int) -> None:
        """Writes two numbers into the record."""
        self.library.standin_note(name.encode(), *map(ctypes.c_uint64, (first, second)))

    def on_host(self, begin: int, size: int) -> bool:
        """Says that this memory is the host's; 0: that none is. False: there is no room for it."""
        return bool(self.library.standin_on_host(ctypes.c_void_p(begin), ctypes.c_uint64(size)))

    def is_on_host(self, address: int) -> bool:
        return bool(self.library.standin_is_on_host(ctypes.c_void_p(address)))

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"standin_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"standin_{name}").value = value


def launcher(device_type: int = CPU, exchange: bool = True, passing: bool = False):
    """In such a process: the launcher, for tensors of the CPU, or for those passing for a GPU's."""
    return configured(Path(os.environ["STANDIN_FOLDER"]), device_type, exchange, passing)


def configured(folder: Path, device_type: int = CPU, exchange: bool = True, passing: bool = False):
    """A folder's launcher; without `exchange`, and before torch 2.10, it asks torch by Python."""
    import torch

    from qla_kernels.runtime.native import prebuilt

    native = prebuilt._native(folder / prebuilt.LAUNCHER)
    api = prebuilt._exchange(torch.Tensor) if exchange else None
    if passing:
        api = _passing_for_cuda(api)
    codes = {
        getattr(torch, name): code << 8 | bits for name, (code, bits) in prebuilt.DTYPES.items()
    }
    native.configure(api, torch.Tensor, lambda device: 0, codes, device_type)
    return native


_EXCHANGE = b"dlpack_exchange_api"  # a capsule points to its name


def _passing_for_cuda(api):
    """A capsule with torch's exchange API as driver.c changes it."""
    name, capsules = _EXCHANGE, ctypes.pythonapi
    capsules.PyCapsule_GetPointer.restype = ctypes.c_void_p
    capsules.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
    capsules.PyCapsule_New.restype = ctypes.py_object
    capsules.PyCapsule_New.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    exchange = ctypes.CDLL("libcuda.so.1").standin_exchange
    exchange.restype, exchange.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return capsules.PyCapsule_New(exchange(capsules.PyCapsule_GetPointer(api, name)), name, None)


def replaying(passing: bool = False):
    """The launcher, told how to ask torch what observes a call; programs of this process use it.

    Tensors that pass for a GPU's may be replayed under a mode, which sees what torch does.
    """
    import torch

    from qla_kernels.runtime import programs

    native = launcher(CUDA if passing else CPU, passing=passing)
    native.watch_with(
        torch.nn.Parameter,
        torch.is_grad_enabled,
        int if passing else torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch.autograd.forward_ad,
        torch.autograd.graph.increment_version,
    )
    programs._native = lambda: native
    return native


def like(x: Any) -> Any:
    """What made-up entries depend on."""
    if isinstance(x, Number):
        return int
    return type(x) if isinstance(x, int | float) else (x.dtype, x.shape, x.stride())


def entry(function: str, given, pointers: int = 0, numbers: int = 0):
    """An entry for arguments like these, whose sizes and strides are constants.

    The kernel's own arguments are so many pointers and integers, or as many as there are.
    """
    tensors = [x for x in given if not isinstance(x, int | float)]
    scalars = [(f"n{i}", x) for i, x in enumerate(given) if isinstance(x, int | float)]
    whole = [name for name, x in scalars if not isinstance(x, float)]
    pointers, numbers = max(pointers, len(tensors)), max(numbers, len(whole))
    return {
        "function": function,
        "tensors": [
            {
                "name": f"t{i}",
                "dtype": str(x.dtype).removeprefix("torch."),
                "sizes": [[n] for n in x.shape],
                "strides": [[n] for n in x.stride()],
            }
            for i, x in enumerate(tensors)
        ],
        "scalars": [(name, "float32" if isinstance(x, float) else "int32") for name, x in scalars],
        "order": [not isinstance(x, int | float) for x in given],
        "symbols": [],
        "maps": [],
        "arguments": [
            *(("pointer", [min(i, len(tensors) - 1)]) for i in range(pointers)),
            *(("int32", [name]) for name in whole),
            *[("int32", [0])] * (numbers - len(whole)),
        ],
        "launch": [[1]] * 6 + [[0]],
        "dependent": False,
    }


def kinds(entry) -> str:
    """The letters of an entry's kernel arguments."""
    letters = {"pointer": "p", "map": "m", "int32": "i", "float32": "f"}
    return "".join(letters[kind] for kind, _ in entry["arguments"])
