"""Imports kernels of files outside the package, for the commands `inspect` and `emulate`."""

import importlib.util
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported, need


def kernel_of(tool: str, file: Path, needs: Sequence[str]) -> jit.Kernel:
    """Imports a file and returns its kernel, named after the file.

    `needs` are the names that `tool` uses, such as VARIANTS. Raises Unsupported if there is no such
    file, if it does not define them all, or if its code raises.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise Unsupported(need(tool, f"no file {file}", "one", "check the path"))
    module: Any = importlib.util.module_from_spec(spec)
    with mistakes(tool, file, "importing it"):
        spec.loader.exec_module(module)
    if absent := [name for name in needs if not hasattr(module, name)]:
        wanted = f"{', '.join(needs[:-1])} and {needs[-1]}"
        fix = f"see python -m qla_kernels {tool} --help"
        raise Unsupported(need(tool, f"{file} without {' and '.join(absent)}", wanted, fix))
    module.PASS_CONFIGS = getattr(module, "PASS_CONFIGS", {})
    return jit.Kernel("", file.stem, cast(jit.KernelModule, module))


@contextmanager
def mistakes(tool: str, file: Path, doing: str, *others: type[Exception]) -> Iterator[None]:
    """Turns what a file's code raises into Unsupported, which says at which of its lines.

    Unsupported and `others` pass as they are.
    """
    passing: tuple[type[Exception], ...] = (Unsupported, *others)
    try:
        yield
    except passing:
        raise
    except Exception as error:
        message = str(error)
        if isinstance(error, jit.KernelError):
            message, error = error.message, error.original
        frames = traceback.extract_tb(error.__traceback__)
        lines = [x.lineno for x in frames if Path(x.filename) == file]
        at = f"{file}, line {lines[-1]}" if lines else str(file)
        got = f"{at}: {doing} raises {type(error).__name__}: {message}"
        raise Unsupported(need(tool, got, "code that runs", "mend the file")) from error


def chosen(kernel: jit.Kernel, text: str, exact: str = "") -> Iterator[Any]:
    """Yields the variants whose label contains `text`, or of them the one whose id is `exact`."""
    for variant in kernel.module.VARIANTS:
        same = exact in ("", jit.variant_id(variant))
        if same and text in jit.label(kernel.module, variant):
            yield variant
