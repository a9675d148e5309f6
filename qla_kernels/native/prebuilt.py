"""Finds prebuilt kernels and makes their launchers.

`QLA_PREBUILT` names a folder that `python -m qla_kernels.build` filled, or one of its kernel files,
beside which the launcher lies. If it is not set, the folder `prebuilt` inside the package is used
if there is one; if it is empty, no prebuilt kernel is used. A kernel is used only if its sources
are those that it was built from.
"""

import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from qla_kernels.errors import Unsupported, need
from qla_kernels.native.pack import DTYPES, pack, texts

FORMAT = 1  # of kernel files; goes up with every change of entries or of launcher.c that they need
SETS = ("13", "12.9")  # nvcc; a driver of CUDA 12 reads only the second
FILE, MANIFEST, LAUNCHER = "kernels-{}.zip", "manifest.json", "launcher.abi3.so"
DRIVER_OF_13 = 13000
CUDA = 2  # DLPack's number

PACKAGE = Path(__file__).parent.parent
INSIDE = PACKAGE / "prebuilt"

log = logging.getLogger("qla_kernels")

_lock = threading.Lock()


class Prebuilt(NamedTuple):
    launch: Callable[..., None]
    digest: str  # of the generated code, as in digests.json


_found: dict[str, Prebuilt | None] = {}


def find(label: str, module: str) -> Prebuilt | None:
    """Returns a variant's prebuilt kernel; None if there is none, or none of these sources.

    Args:
        label: the variant's name, as `jit.label` returns it.
        module: the full name of its kernel module.

    Raises Unsupported if QLA_PREBUILT names nothing, or if a file is damaged. Threads that ask at
    once get one launcher, which loads its kernel once.
    """
    with _lock:
        if label not in _found:
            _found[label] = _read(label, module)
        return _found[label]


def _read(label: str, module: str) -> Prebuilt | None:
    file = _kernels(os.environ.get("QLA_PREBUILT"))
    if file is None or (about := file.kernels.get(label)) is None:
        return None
    if about["sources"] != fingerprint(module):
        _say_edited(file.path, module)
        return None
    entry = json.loads(file.read(f"{label}.json", about["entry"]))
    cubin = file.read(f"{label}.cubin", about["cubin"])
    native = _native(file.path.with_name(LAUNCHER))
    launch = native.launcher(label, entry["function"], cubin, pack(entry), *texts(entry))
    return Prebuilt(launch, about["digest"])


def used() -> str | None:
    """Returns which file's kernels are used, and how many it has; None if there is no file."""
    with _lock:
        file = _kernels(os.environ.get("QLA_PREBUILT"))
    return None if file is None else f"{file.path}, {len(file.kernels)} variants"


class KernelFile(NamedTuple):
    path: Path
    kernels: dict[str, dict[str, str]]  # by label: digests and checksums

    def read(self, name: str, checksum: str) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as file:
                contents = file.read(name)
        except (OSError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise damaged(self.path, f"{name} ({error})") from error
        if hashlib.sha256(contents).hexdigest() != checksum:
            raise damaged(self.path, name)
        return contents


def damaged(path: Path, what: str) -> Unsupported:
    fix = "install qla_kernels again, or run `python -m qla_kernels.build` again"
    return Unsupported(need("qla_kernels", f"cannot read {what} in {path}", "a whole file", fix))


@functools.cache
def _kernels(wanted: str | None) -> KernelFile | None:
    """Opens the kernel file that suits the driver, if there is one."""
    if wanted == "":
        return None
    place = INSIDE if wanted is None else Path(wanted).expanduser()
    if wanted is not None and not place.exists():
        fix = "set it to the folder of `python -m qla_kernels.build --out FOLDER`"
        raise Unsupported(need("QLA_PREBUILT", f"{place} does not exist", "a folder or file", fix))
    files = [place] if place.is_file() else [place / FILE.format(of_set) for of_set in SETS]
    files = [path for path in files if path.exists()]
    if not files or not (launcher := files[0].with_name(LAUNCHER)).exists():
        if wanted is not None:
            log.warning("%s has no prebuilt kernels and launcher; kernels are compiled", place)
        return None
    if len(files) > 1 and _driver_version(launcher) < DRIVER_OF_13:
        files.reverse()
    return _opened(files[0])


def _opened(path: Path) -> KernelFile:
    try:
        with zipfile.ZipFile(path) as file:
            manifest = json.loads(file.read(MANIFEST))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise damaged(path, f"its manifest ({error})") from error
    if manifest["format"] != FORMAT:
        got = f"{path} is of format {manifest['format']}"
        fix = "run `python -m qla_kernels.build` again"
        raise Unsupported(need("qla_kernels", got, f"format {FORMAT}", fix))
    return KernelFile(path, manifest["kernels"])


def _driver_version(launcher: Path) -> int:
    try:
        return int(_native(launcher).driver_version())
    except RuntimeError:  # there is no driver: nothing will be launched
        return 0


@functools.cache
def _native(path: Path) -> Any:
    """Imports the launcher and tells it how to talk to torch."""
    import torch

    loader = ExtensionFileLoader("launcher", str(path))
    spec = importlib.util.spec_from_loader("launcher", loader, origin=str(path))
    assert spec is not None
    try:
        native = importlib.util.module_from_spec(spec)
        loader.exec_module(native)
    except ImportError as error:  # of another machine, or a Python that has no such extensions
        raise damaged(path, f"the launcher ({error})") from error
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # from torch 2.10 on
    dtypes = {getattr(torch, name): code << 8 | bits for name, (code, bits) in DTYPES.items()}
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    native.configure(exchange, torch.Tensor, stream, dtypes, CUDA)
    return native


# ---- sources: a kernel is used only if it was built from those that are here ----


@functools.cache
def fingerprint(module: str) -> str:
    """Returns a digest of a kernel module's source and of all of ours that it imports."""
    seen: set[str] = set()
    pending = [module, "qla_kernels.shared_memory"]  # names of buffers order shared memory
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += _source(name)[1]
    return hashlib.sha256("".join(_source(name)[0] for name in sorted(seen)).encode()).hexdigest()


@functools.cache
def _source(module: str) -> tuple[str, list[str]]:
    """Returns the digest of a module's files, and the modules of the package that it imports."""
    path = _path(module)
    assert path is not None, module
    text = path.read_bytes()
    inline = path.with_suffix(".cuh")
    digest = hashlib.sha256(text + (inline.read_bytes() if inline.exists() else b"")).hexdigest()
    return f"{module} {digest}\n", [*_imports(text.decode())]


_FROM = re.compile(r"^\s*from (qla_kernels[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*import (qla_kernels[\w.]*)", re.MULTILINE)


def _imports(text: str) -> Iterator[str]:
    yield from _IMPORT.findall(text)
    for module, names in _FROM.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names)):
            yield f"{module}.{name}" if _path(f"{module}.{name}") else module


@functools.cache
def _path(module: str) -> Path | None:
    """Returns the file of a module of the package, without importing it."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None):
        return Path(str(loaded.__file__))
    place = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.exists():
            return path
    return None


_edited: set[Path] = set()


def _say_edited(path: Path, module: str) -> None:
    """Says once that kernels of a file are compiled instead, and which is the first of them."""
    if path not in _edited:
        _edited.add(path)
        log.warning(
            "%s was built from other sources of %s: it is compiled, as are other edited kernels",
            path,
            module.removeprefix("qla_kernels."),
        )
