"""Puts prebuilt kernels into a wheel: `QLA_PREBUILT=FOLDER python -m build --wheel`.

`python -m qla_kernels build --out FOLDER` fills such a folder. The wheel then has its kernels and
the launcher in `qla_kernels/prebuilt`, and a tag for the machine that the launcher was compiled
for. The build prints each set and its number of kernels, and ends if one is lacking, damaged or of
other sources. Without QLA_PREBUILT the wheel has no binary file. An editable installation never has
kernels: there, QLA_PREBUILT says at run time where they are.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = (2, 28)  # torch's own wheels need it
MACHINES = {62: "x86_64", 183: "aarch64"}  # by e_machine of an ELF file


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("QLA_PREBUILT")
        if not folder or version == "editable":
            return
        sys.path.insert(0, self.root)  # not what is installed: the kernels have to fit these files
        try:
            from qla_kernels.errors import Unsupported
            from qla_kernels.native import prebuilt
        finally:
            del sys.path[0]
        try:
            files = prebuilt.checked(Path(folder).expanduser())
        except Unsupported as error:  # its sentence is the last line, below no traceback
            self.app.abort(str(error))
        for kernels in map(prebuilt.opened, files[:-1]):
            found, of_set = len(kernels.kernels), kernels.manifest["set"]
            self.app.display_info(f"kernels for this wheel: set {of_set}, all {found} variants")
        build_data["force_include"].update(
            {str(path): f"qla_kernels/{prebuilt.INSIDE.name}/{path.name}" for path in files}
        )
        build_data["pure_python"] = False
        build_data["tag"] = tag(files[-1].read_bytes())


def tag(launcher: bytes) -> str:
    """Returns the wheel's tag: any Python from 3.10 on, the launcher's machine and its glibc."""
    machine = MACHINES[int.from_bytes(launcher[18:20], "little")]
    needed = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", launcher)
    major, minor = max(OLDEST_GLIBC, *((int(x), int(y)) for x, y in needed))
    return f"cp310-abi3-manylinux_{major}_{minor}_{machine}"
