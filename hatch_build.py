"""Puts prebuilt kernels into a wheel, and sets its tag for the machine of the launcher.

A checkout of a release has kernels in `qla_kernels/prebuilt`, which `python -m qla_kernels build
--release` filled: a wheel of it has them, so that `pip install .` needs no compiler. Kernels that
the sources here do not generate stay unused in the wheel, and the build says how many there are. If
C sources of the launcher were edited, it is compiled; where that fails, the wheel has no kernels.

`QLA_PREBUILT=FOLDER` puts in those of a folder that `python -m qla_kernels build --out FOLDER`
filled: all variants, of these sources, or the build ends. With QLA_PREBUILT set to nothing, the
wheel has no kernels. An editable installation is the checkout itself, with the kernels there; a
source distribution has its files.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = (2, 28)  # torch's own wheels need it
MACHINES = {62: "x86_64", 183: "aarch64"}  # by e_machine of an ELF file


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("QLA_PREBUILT")
        if folder == "" or version == "editable":
            return
        with imported_from(self.root):
            from qla_kernels.runtime.errors import Unsupported
            from qla_kernels.runtime.native import prebuilt
        try:
            if folder is not None:
                files = prebuilt.checked(Path(folder).expanduser())
            else:
                files = self.own(Path(self.root, "qla_kernels", prebuilt.INSIDE.name))
            for kernels in map(prebuilt.opened, files[:-1]):
                used, every = sum(map(kernels.has, kernels.kernels)), len(kernels.kernels)
                of_set = kernels.manifest["set"]
                said = f"all {every} variants" if used == every else f"{used} of {every} variants"
                self.app.display_info(f"kernels for this wheel: set {of_set}, {said}")
                if used < every:
                    others = f"{every - used} were built from other sources and are not used"
                    self.app.display_warning(f"set {of_set}: {others}")
        except Unsupported as error:  # its sentence is the last line, below no traceback
            self.app.abort(str(error))
        if files:
            build_data["force_include"].update(
                {str(path): f"qla_kernels/{prebuilt.INSIDE.name}/{path.name}" for path in files}
            )
            build_data["pure_python"] = False
            build_data["tag"] = tag(files[-1].read_bytes())

    def own(self, folder: Path) -> list[Path]:
        """Returns the checkout's kernel files and its launcher last; none if it has none."""
        with imported_from(self.root):
            from qla_kernels.runtime.errors import Unsupported
            from qla_kernels.runtime.native import launcher, prebuilt
        *files, path = prebuilt.files_of(folder)
        if not files:
            return []
        if not launcher.is_current(path):
            self.compiled = tempfile.TemporaryDirectory()
            try:
                path = launcher.compile_launcher(Path(self.compiled.name))
            except Unsupported as error:
                self.app.display_warning(f"this wheel has no kernels: {error}")
                return []
        return [*files, path]

    def finalize(self, *_: object) -> None:
        if hasattr(self, "compiled"):
            self.compiled.cleanup()


@contextmanager
def imported_from(root: str) -> Iterator[None]:
    """Imports this checkout's package, not an installed one: kernels have to fit its files."""
    sys.path.insert(0, root)
    try:
        yield
    finally:
        sys.path.remove(root)


def tag(launcher: bytes) -> str:
    """Returns the wheel's tag: any Python from 3.10 on, the launcher's machine and its glibc."""
    machine = MACHINES[int.from_bytes(launcher[18:20], "little")]
    needed = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", launcher)
    major, minor = max(OLDEST_GLIBC, *((int(x), int(y)) for x, y in needed))
    return f"cp310-abi3-manylinux_{major}_{minor}_{machine}"
