"""QLA_DUMP: what was compiled, next to what was intended."""

import logging
from pathlib import Path
from typing import Any

from qla_kernels import jit
from qla_kernels.errors import Unsupported, need

log = logging.getLogger("qla_kernels")

_refused: set[Path] = set()  # what was warned of


def dump(root: Path, module: jit.KernelModule, variant: Any, source: str) -> None:
    """Fill a folder under `root`; where that cannot be written, say so once and go on."""
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
