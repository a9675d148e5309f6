"""Writes what QLA_DUMP asks for: files about each kernel that is compiled.

The environment variable QLA_DUMP names a folder. A kernel's files go to a folder in it: the table
of roles (the schedule), the generated CUDA, the cubin, and what ptxas reported.
"""

import logging
from pathlib import Path
from typing import Any

from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported, need

log = logging.getLogger("qla_kernels")

_refused: set[Path] = set()  # roots for which a warning was logged


def dump(root: Path, module: jit.KernelModule, variant: Any, source: str) -> None:
    """Writes schedule, source, cubin and ptxas report to a folder under `root`, named by the label.

    Without nvcc it writes the source alone. If the folder cannot be written or nvcc fails, logs a
    warning once per root and returns.
    """
    folder = root / jit.label(module, variant)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedule.md").write_text(module.schedule(variant).table() + "\n")
        try:
            report = jit.assemble(source, module.PASS_CONFIGS, folder).report
        except Unsupported as missing:
            (folder / "kernel.cu").write_text(source)
            report = f"not assembled: {missing}\n"
        (folder / "ptxas.txt").write_text(report)
    except (OSError, RuntimeError) as error:  # RuntimeError: nvcc could not write its part
        if root not in _refused:
            _refused.add(root)
            fix = "set QLA_DUMP to such a folder, or unset it"
            log.warning(need("QLA_DUMP", str(error), f"{root} to be writable", fix))
