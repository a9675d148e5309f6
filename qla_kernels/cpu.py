"""`reference`: finds and imports the reference package, which runs CPU tensors.

The package is called `reference` in a checkout and `qla_kernels.reference` inside a wheel, so that
installing qla_kernels does not claim the name `reference`. Other modules call `reference()` and
need not know which.
"""

import functools
import importlib
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

from qla_kernels.errors import need

log = logging.getLogger(__name__)


@functools.cache
def reference() -> ModuleType:
    """Returns the reference package, imported on the first call.

    Raises ImportError if `import reference` finds another package of that name.
    """
    in_wheel = importlib.util.find_spec("qla_kernels.reference") is not None
    module = importlib.import_module("qla_kernels.reference" if in_wheel else "reference")
    root = Path(__file__).resolve().parents[0 if in_wheel else 1]
    if root not in Path(module.__file__ or "").resolve().parents:
        raise ImportError(
            need(
                "CPU tensors",
                f"`import reference` found {module.__file__}",
                f"the one in {root}",
                "put the repository root first on sys.path, or rename the other package",
            )
        )
    log.debug("CPU tensors run %s", module.__name__)
    return module
