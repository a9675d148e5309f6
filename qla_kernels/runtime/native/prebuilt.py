"""Finds prebuilt kernels and makes their launchers.

`QLA_PREBUILT` names a folder that `python -m qla_kernels build` filled, or one of its kernel files,
beside which the launcher lies. Of a folder's two sets the driver decides; without a driver, checks
read both. A file that is named is used whatever its set, if the driver can read it. If QLA_PREBUILT
is not set, the folder `prebuilt` inside the package is used, which a wheel with kernels and a
checkout of a release have; if it is empty, no prebuilt kernel is used. A kernel is used only if the
sources here generate it (`sources.py`), a launcher only if it is of the C sources here. Nothing is
written.
"""

import functools
import hashlib
import importlib.util
import io
import json
import logging
import os
import sysconfig
import threading
import zipfile
from collections.abc import Callable, Iterable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple, cast

from qla_kernels.runtime import digests
from qla_kernels.runtime.compiler import NEEDS_TILELANG
from qla_kernels.runtime.compiler import can_compile as can_compile  # for those who ask here
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import launcher as launcher_file
from qla_kernels.runtime.native.launcher import contents_of, damaged
from qla_kernels.runtime.native.pack import DTYPES, pack, texts
from qla_kernels.runtime.native.sources import PACKAGE, generate

FORMAT = 4  # of kernel files; goes up with every change of entries or of launcher.c that they need
SETS = ("13", "12.9")  # ptxas; a driver of CUDA 12 reads only the second
TOOLS = ("tilelang", "nvcc", "ptxas")  # whose versions a manifest has; the last if it was named
FILE, MANIFEST, LAUNCHER = "kernels-{}.zip", "manifest.json", launcher_file.NAME
DRIVER_OF_13 = 13000
CUDA = 2  # DLPack's number
MEMBERS = {"entry": "{}.json", "cubin": "{}.cubin"}  # of a kernel file, by their names in manifests
ABOUT = ("digest", "launch", "sources", "code", "entry", "cubin")  # of a kernel, in manifests

INSIDE = PACKAGE / "prebuilt"
NOTHING_TO_LAUNCH = f"{NEEDS_TILELANG} is not installed either, so calls with CUDA tensors raise"

log = logging.getLogger("qla_kernels")

_lock = threading.RLock()


class Prebuilt(NamedTuple):
    launch: Callable[..., None]
    digest: str  # of the generated code, as in digests.json


class KernelFile(NamedTuple):
    path: Path
    manifest: dict[str, Any]
    contents: zipfile.ZipFile  # of bytes that were read once: a build may replace the file

    @property
    def kernels(self) -> dict[str, dict[str, str]]:
        """Digests and checksums of each variant, by its label."""
        return cast(dict[str, dict[str, str]], self.manifest["kernels"])

    def has(self, label: str) -> bool:
        """Returns whether a variant is in the file and is what the sources here generate."""
        about = self.kernels.get(label)
        return about is not None and generate(label, about)

    def read(self, label: str, kind: str) -> bytes:
        """Returns a variant's "entry" or "cubin"; raises Unsupported if it is damaged."""
        name = MEMBERS[kind].format(label)
        try:
            contents = self.contents.read(name)
        except Exception as error:  # zipfile raises many types for damaged bytes
            raise damaged(self.path, f"{name} ({error})") from error
        if hashlib.sha256(contents).hexdigest() != self.kernels[label][kind]:
            raise damaged(self.path, name)
        return contents


_found: dict[tuple[Path, str], Prebuilt | None] = {}
_edited: set[Path] = set()


def find(label: str) -> Prebuilt | None:
    """Returns a variant's prebuilt kernel; None if there is none, or none of these sources.

    Raises Unsupported if QLA_PREBUILT names nothing, if a file is damaged, or if this Python cannot
    import the launcher. Threads that ask at once get one launcher, which loads its kernel once.
    """
    with _lock:
        file = in_use()
        if isinstance(file, str):
            return None
        if (file.path, label) not in _found:
            _found[file.path, label] = _read(file, label)
        return _found[file.path, label]


def _read(file: KernelFile, label: str) -> Prebuilt | None:
    if not file.has(label):
        if label in file.kernels:
            _say_edited(file.path, label)
        return None
    return Prebuilt(_launch_of(file, label), file.kernels[label]["digest"])


def _launch_of(file: KernelFile, label: str) -> Callable[..., None]:
    contents, cubin = file.read(label, "entry"), file.read(label, "cubin")
    native = _native(file.path.with_name(LAUNCHER))
    launch: Callable[..., None]
    try:
        entry = json.loads(contents)
        launch = native.launcher(label, entry["function"], cubin, pack(entry), *texts(entry))
    except Exception as error:  # an entry of another form
        name = MEMBERS["entry"].format(label)
        raise damaged(file.path, f"{name} ({type(error).__name__}: {error})") from error
    return launch


def read_all(path: Path) -> None:
    """Reads every kernel of a file; raises ValueError if the launcher beside it cannot."""
    file = opened(path)
    read(file, file.kernels)


def read(file: KernelFile, labels: Iterable[str]) -> None:
    """Reads kernels of a file as a launch would; raises ValueError if one is damaged."""
    for label in labels:
        _launch_of(file, label)


def _say_edited(path: Path, label: str) -> None:
    """Says once that kernels of a file are compiled instead, and which is the first of them."""
    if path not in _edited:
        _edited.add(path)
        log.warning(
            "%s was built from other sources of %s: it is compiled, as are other edited kernels",
            path,
            label.partition("-")[0],
        )


def lacking(label: str) -> str:
    """Returns why `find` returned None, for a message."""
    file = in_use()
    if isinstance(file, str):
        return file
    if label in file.kernels:
        return f"{file.path} was built from other sources"
    return f"it is not in {file.path}"


def in_use() -> KernelFile | str:
    """Returns the file whose kernels are used, or why no prebuilt kernel is used.

    QLA_DUMP asks for files that only a compile gives. Raises Unsupported as `find` does.
    """
    if os.environ.get("QLA_DUMP"):
        return "QLA_DUMP asks for compiled kernels"
    with _lock:
        return _kernels(os.environ.get("QLA_PREBUILT"))


@functools.cache
def _kernels(wanted: str | None) -> KernelFile | str:
    """Opens the kernel file that suits the driver, or returns why there is none."""
    if wanted == "":
        return "QLA_PREBUILT is empty"
    place = _place(wanted)
    if wanted is not None and not os.path.exists(place):
        fix = "set it to the folder of `python -m qla_kernels build --out FOLDER`"
        raise Unsupported(need("QLA_PREBUILT", f"{place} does not exist", "a folder or file", fix))
    *files, launcher = files_of(place)
    if not files or not os.path.exists(launcher):
        if wanted is None:
            return "this installation has no prebuilt kernels"
        kernels = " or ".join(FILE.format(of_set) for of_set in SETS)
        got = f"no {kernels} in {place}" if not files else f"no {launcher}"
        fix = "name the folder of `python -m qla_kernels build --out FOLDER`, or unset QLA_PREBUILT"
        raise Unsupported(need("QLA_PREBUILT", got, f"kernels, and {LAUNCHER} beside them", fix))
    file = opened(files[0])
    if not launcher_file.is_current(launcher):
        why = f"{launcher} was compiled from other C sources than these"
        log.warning("%s; kernels are compiled; `python -m qla_kernels build` renews it", why)
        return why
    driver = _driver_version(launcher)
    # without a driver nothing will be launched, and `others` has the other set
    if driver == 0 or driver >= DRIVER_OF_13 or file.manifest["set"] != SETS[0]:
        return file
    if len(files) > 1:
        return opened(files[1])
    has = f"{driver // 1000}.{driver % 1000 // 10}"
    why = f"{file.path} needs a driver of CUDA 13 (R580 or newer), and this one is of CUDA {has}"
    log.warning("%s; kernels are compiled", why)
    return why


def _place(wanted: str | None) -> Path:
    return INSIDE if wanted is None else Path(os.path.expanduser(wanted))


def others() -> list[KernelFile]:
    """Returns the sets beside the one in use that a driver may choose; none where one has chosen.

    An image is built and checked without a driver, and it is not known on which it will run.
    """
    file = in_use()
    if isinstance(file, str) or _driver_version(file.path.with_name(LAUNCHER)):
        return []
    *files, _ = files_of(_place(os.environ.get("QLA_PREBUILT")))
    return [opened(path) for path in files if path != file.path]


def files_of(place: Path) -> list[Path]:
    """Returns the kernel files of a folder, or the file itself, and the launcher's path."""
    files = [place] if place.is_file() else [place / FILE.format(of_set) for of_set in SETS]
    return [*filter(os.path.exists, files), files[0].with_name(LAUNCHER)]


def opened(path: Path) -> KernelFile:
    """Reads a kernel file; raises Unsupported if it is damaged or of another format."""
    try:
        file = zipfile.ZipFile(io.BytesIO(contents_of(path)))
        manifest = json.loads(file.read(MANIFEST))
        _check_form(manifest)
    except Exception as error:  # zipfile and json raise many types for damaged bytes
        raise damaged(path, f"its manifest ({error})") from error
    if manifest["format"] != FORMAT:
        got = f"{path} is of format {manifest['format']}"
        fix = "run `python -m qla_kernels build` again"
        raise Unsupported(need("qla_kernels", got, f"format {FORMAT}", fix))
    return KernelFile(path, manifest, file)


def _check_form(manifest: Any) -> None:
    """Raises ValueError unless a manifest of this format has all fields, of the right types."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise ValueError("no format")
    if manifest["format"] != FORMAT:
        return
    for name in ("set", *TOOLS[:2]):
        if not isinstance(manifest.get(name), str):
            raise ValueError(f"no {name}")
    if not isinstance(manifest.get("kernels"), dict):
        raise ValueError("no kernels")
    for label, about in manifest["kernels"].items():
        if not isinstance(about, dict) or not all(isinstance(about.get(x), str) for x in ABOUT):
            raise ValueError(f"{label} without {', '.join(ABOUT)}")


def _driver_version(launcher: Path) -> int:
    try:
        return int(_native(launcher).driver_version())
    except RuntimeError:  # there is no driver
        return 0


def launcher() -> Any:
    """Returns the launcher of the file in use; None if no prebuilt kernel is used."""
    with _lock:
        file = in_use()
        return None if isinstance(file, str) else _native(file.path.with_name(LAUNCHER))


@functools.cache
def _native(path: Path) -> Any:
    """Imports the launcher and tells it how to talk to torch."""
    import torch

    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # its objects have another layout
        got = f"this Python is free-threaded, for which {path} was not compiled"
        fix = "use such a Python, or set QLA_PREBUILT to nothing and compile kernels with TileLang"
        raise Unsupported(need("qla_kernels", got, "a Python with the GIL", fix))
    launcher_file.is_current(path)  # raises if it is damaged
    loader = ExtensionFileLoader("launcher", str(path))
    spec = importlib.util.spec_from_loader("launcher", loader, origin=str(path))
    assert spec is not None
    try:
        native = importlib.util.module_from_spec(spec)
        loader.exec_module(native)
    except ImportError as error:  # of another machine
        raise damaged(path, f"the launcher ({error})") from error
    dtypes = {getattr(torch, name): code << 8 | bits for name, (code, bits) in DTYPES.items()}
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    native.configure(_exchange(torch.Tensor), torch.Tensor, stream, dtypes, CUDA)
    return native


def _exchange(tensor: type) -> object:
    """Returns DLPack's C exchange API, a capsule; None where torch has none (before 2.10)."""
    found = getattr(tensor, "__dlpack_c_exchange_api__", None)
    return found if type(found).__name__ == "PyCapsule" else None


def checked(place: Path) -> list[Path]:
    """Returns the files of a folder that go into a wheel: kernel files, and the launcher last.

    Raises Unsupported if there are none, if one is damaged or lacks a variant, or if kernels were
    built from other sources than this package has.
    """
    *files, launcher = files_of(place)
    if not files:
        fix = "run `python -m qla_kernels build --out FOLDER`"
        raise Unsupported(need("QLA_PREBUILT", f"no kernels in {place}", "a built folder", fix))
    if not launcher_file.is_current(launcher):
        got = f"{launcher} was compiled from other C sources"
        fix = "run `python -m qla_kernels build` in this checkout"
        raise Unsupported(need("QLA_PREBUILT", got, "the launcher of these sources", fix))
    every = digests.recorded()
    for file in map(opened, files):
        if other := sorted(label for label in file.kernels if not file.has(label)):
            got = (
                f"{file.path} was built from other sources of {len(other)} kernels ({other[0]}, ..)"
            )
            fix = "run `python -m qla_kernels build` in this checkout"
            raise Unsupported(need("QLA_PREBUILT", got, "kernels of these sources", fix))
        if absent := sorted(every.keys() - file.kernels.keys()):
            got = f"{file.path} lacks {len(absent)} of {len(every)} variants ({absent[0]}, ..)"
            fix = "run `python -m qla_kernels build --out FOLDER` without names of kernels"
            raise Unsupported(need("QLA_PREBUILT", got, "all of them for a wheel", fix))
        for label in file.kernels:
            for kind in MEMBERS:
                file.read(label, kind)
    return [*files, launcher]
