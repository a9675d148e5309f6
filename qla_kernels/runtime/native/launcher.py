"""The launcher's file: compiles it, and checks it before it is loaded.

The library ends with a seal: a mark, a digest of the C sources, and a digest of all bytes before
it. The loader ignores what follows a library's sections. A launcher is used if it is whole and if
its C sources are those of this package.
"""

import hashlib
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qla_kernels.runtime.errors import Unsupported, need

NAME = "launcher.abi3.so"
MARK = b"qla_kernels.launcher/1\0"
DIGEST = hashlib.sha256().digest_size
FLAGS = [
    "-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-cast-function-type",
    "-Wno-missing-field-initializers", "-fPIC", "-shared", "-fvisibility=hidden",
]  # fmt: skip
FOLDER = Path(__file__).parent


def sources() -> bytes:
    """Returns a digest of the launcher's C sources, comments included."""
    both = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.c")):
        contents = path.read_bytes()
        both.update(f"{path.name} {len(contents)}\n".encode() + contents)
    return both.digest()


def sealed(library: bytes) -> bytes:
    """Returns a compiled library with its seal."""
    contents = library + MARK + sources()
    return contents + hashlib.sha256(contents).digest()


def compile_launcher(folder: Path) -> Path:
    """Compiles launcher.c into `folder`; any Python from 3.10 on can import the result.

    Raises Unsupported without a C compiler or Python's headers.
    """
    path = folder / NAME
    compiler = shlex.split(os.environ.get("CC", "cc"))
    headers = sysconfig.get_paths()["include"]
    with whole(path) as place:
        command = [*compiler, *FLAGS, f"-I{headers}", "-o", str(place), str(FOLDER / "launcher.c")]
        try:
            done = subprocess.run([*command, "-ldl", "-pthread"], capture_output=True, text=True)
        except OSError as error:
            fix = "install gcc or clang, or set CC"
            raise Unsupported(need("the launcher", str(error), "a C compiler", fix)) from error
        if done.returncode:
            fix = "install Python's headers (python3-dev) and a C11 compiler"
            raise Unsupported(need("the launcher", done.stderr.strip(), "to compile", fix))
        place.write_bytes(sealed(place.read_bytes()))
    return path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a file to write; it gets the name `path` when it is complete, and none if that fails.

    So processes that read the folder, or build into it, at the same time see whole files.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    place = Path(name)
    try:
        yield place
        place.chmod(0o644)
        os.replace(place, path)
    finally:
        place.unlink(missing_ok=True)


def contents_of(path: Path) -> bytes:
    """Returns the contents of a regular file; raises OSError for anything else.

    Opening a pipe would wait for its other end.
    """
    if not path.is_file():
        raise OSError("not a regular file")
    return path.read_bytes()


def is_current(path: Path) -> bool:
    """Returns whether the launcher was compiled from this package's C sources.

    Raises Unsupported for a damaged file: it must not be loaded, since that can end the process.
    """
    try:
        contents = contents_of(path)
    except OSError as error:
        raise damaged(path, f"the launcher ({error})") from error
    body, digest = contents[:-DIGEST], contents[-DIGEST:]
    if contents[:4] != b"\x7fELF":
        raise damaged(path, "the launcher (not an ELF file)")
    if body[-DIGEST - len(MARK) : -DIGEST] != MARK:
        raise damaged(path, "the launcher (no checksum at its end)")
    if hashlib.sha256(body).digest() != digest:
        raise damaged(path, "the launcher (its checksum differs)")
    return body[-DIGEST:] == sources()


def damaged(path: Path, what: str) -> Unsupported:
    """Returns the error for a damaged file of a set of prebuilt kernels."""
    fix = "install qla_kernels again, or run `python -m qla_kernels build` again"
    return Unsupported(need("qla_kernels", f"cannot read {what} in {path}", "a whole file", fix))
