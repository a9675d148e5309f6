"""Which sources a kernel is built from, and whether a prebuilt kernel is what they generate.

A kernel's sources are its module, all modules of this package that it imports, and their .cuh
files. `fingerprint` is of their bytes. `code` is of what they mean to Python and to nvcc: comments,
docstrings and spacing do not change it, and it is the same in every version of Python.
"""

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from qla_kernels.runtime import digests

PACKAGE = Path(__file__).parents[2]

_FROM = re.compile(r"^\s*from (qla_kernels[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*import (qla_kernels[\w.]*)", re.MULTILINE)
_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
_CONTEXT = ast.Load, ast.Store, ast.Del  # follow from where a node stands


def generate(label: str, about: Mapping[str, str]) -> bool:
    """Returns whether the sources that are here generate a kernel that a manifest describes.

    They do if they are those that it was built from, but for comments. They also do if they are
    those that digests.json was written for, and if its digests of the variant's code and launch
    are the kernel's. Edited sources whose digests were not renewed do not count.
    """
    module = module_of(label)
    if path_of(module) is None:
        return False
    if about["sources"] == fingerprint(module):
        return True
    here = code(module)
    recorded = digests.recorded_for(label, here)
    return about["code"] == here or recorded == (about["digest"], about["launch"])


@functools.cache
def fingerprint(module: str) -> str:
    """Returns a digest of the bytes of a kernel module's sources."""
    return _joined(source(name)[0] for name in modules(module))


@functools.cache
def code(module: str) -> str:
    """Returns a digest of a kernel module's sources without comments, docstrings and spacing."""
    return _joined(f"{name} {_code_of(name)}\n" for name in modules(module))[: digests.DIGITS]


def _joined(lines: Iterator[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def modules(module: str) -> list[str]:
    """Returns a kernel module and all modules of the package that it imports, sorted."""
    seen: set[str] = set()
    pending = [module, "qla_kernels.runtime.shared_memory"]  # names of buffers order shared memory
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += source(name)[1]
    return sorted(seen)


def module_of(label: str) -> str:
    """Returns the kernel module of a variant: of gdn.gate-bf16, qla_kernels.gdn.kernels.gate."""
    family, _, kernel = label.partition("-")[0].rpartition(".")
    return f"qla_kernels.{family}.kernels.{kernel}"


@functools.cache
def source(module: str) -> tuple[str, list[str]]:
    """Returns the digest of a module's files, and the modules of the package that it imports."""
    text, inline = _files(module)
    digest = hashlib.sha256(text + inline).hexdigest()
    return f"{module} {digest}\n", [*_imports(text.decode())]


@functools.cache
def _code_of(module: str) -> str:
    text, inline = _files(module)
    parts = [*structure(text.decode()), *digests.tokens(inline.decode())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _files(module: str) -> tuple[bytes, bytes]:
    """Returns a module's text, and that of the .cuh file beside it, empty if there is none."""
    path = path_of(module)
    assert path is not None, module
    inline = path.with_suffix(".cuh")
    return path.read_bytes(), inline.read_bytes() if inline.exists() else b""


def structure(text: str) -> Iterator[str]:
    """Yields the parts of a Python text's syntax tree, without docstrings.

    Fields and parts of texts that are empty are left out: versions of Python differ in them.
    """
    return _parts(ast.parse(text))


def _parts(node: object) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node, False):
                value = node.body[1:]
            if name == "values" and isinstance(node, ast.JoinedStr):
                value = [x for x in node.values if getattr(x, "value", None) != ""]
            if value is not None and value != [] and not isinstance(value, _CONTEXT):
                yield name
                yield from _parts(value)
        yield "end"
    elif isinstance(node, list):
        yield str(len(node))
        for item in node:
            yield from _parts(item)
    else:
        yield ascii(node)


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
