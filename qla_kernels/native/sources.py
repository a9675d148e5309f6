"""Which sources a kernel is built from: a prebuilt one is used only if they are those here."""

import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent

_FROM = re.compile(r"^\s*from (qla_kernels[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*import (qla_kernels[\w.]*)", re.MULTILINE)


@functools.cache
def fingerprint(module: str) -> str:
    """Returns a digest of a kernel module's source and of all of ours that it imports."""
    seen: set[str] = set()
    pending = [module, "qla_kernels.shared_memory"]  # names of buffers order shared memory
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += source(name)[1]
    return hashlib.sha256("".join(source(name)[0] for name in sorted(seen)).encode()).hexdigest()


def module_of(label: str) -> str:
    """Returns the kernel module of a variant: of gdn.gate-bf16, qla_kernels.gdn.kernels.gate."""
    family, _, kernel = label.partition("-")[0].rpartition(".")
    return f"qla_kernels.{family}.kernels.{kernel}"


@functools.cache
def source(module: str) -> tuple[str, list[str]]:
    """Returns the digest of a module's files, and the modules of the package that it imports."""
    path = path_of(module)
    assert path is not None, module
    text = path.read_bytes()
    inline = path.with_suffix(".cuh")
    digest = hashlib.sha256(text + (inline.read_bytes() if inline.exists() else b"")).hexdigest()
    return f"{module} {digest}\n", [*_imports(text.decode())]


def _imports(text: str) -> Iterator[str]:
    yield from _IMPORT.findall(text)
    for module, names in _FROM.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names)):
            yield f"{module}.{name}" if path_of(f"{module}.{name}") else module


@functools.cache
def path_of(module: str) -> Path | None:
    """Returns the file of a module of the package, without importing it."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None):
        return Path(str(loaded.__file__))
    place = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.exists():
            return path
    return None
