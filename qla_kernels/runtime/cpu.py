"""`reference`: loads the reference package, which runs CPU tensors.

The package is the folder `reference` of a checkout, and `qla_kernels/reference` inside a wheel, so
that installing qla_kernels does not claim the name `reference`. It is loaded by its path: other
code may have a package `reference` of its own. Other modules call `reference()` and need not know.
"""

import functools
import importlib
import logging
import sys
import threading
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from qla_kernels.runtime.errors import need

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
NAME = "qla_kernels.reference"

_loading = threading.Lock()


@functools.cache
def reference() -> ModuleType:
    """Returns the reference package, loaded at the first call.

    Raises ImportError if it is not there.
    """
    files = [folder / "reference" / "__init__.py" for folder in (PACKAGE, PACKAGE.parent)]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        got, fix = "the reference package is absent", "install qla_kernels again"
        raise ImportError(need("CPU tensors", got, f"{files[0]} or {files[1]}", fix))
    with _loading:
        module = importlib.import_module("reference") if _is_found(file) else _loaded(file)
    log.debug("CPU tensors run %s", module.__name__)
    return module


def _is_found(file: Path) -> bool:
    """Returns whether `import reference` finds this file; then both are one module."""
    try:
        spec = find_spec("reference")  # runs no code
    except ValueError:  # a module that was made without a file
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _loaded(file: Path) -> ModuleType:
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = spec_from_file_location(NAME, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None, "it is a Python file"
    assert spec.loader is not None, "it is a Python file"
    module = sys.modules[NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module
