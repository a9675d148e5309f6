"""Writes a wheel with kernels in the layout of Hugging Face's library `kernels`.

    python scripts/hub_layout.py dist/qla_kernels-0.1.0-cp310-abi3-*.whl --out FOLDER

FOLDER/build then has a folder for each build variant, which contains the package as the wheel has
it, with one set of kernels: nvcc 13's where torch is of CUDA 13, nvcc 12.9's where it is of CUDA
12. `kernels.get_local_kernel(Path(FOLDER))` imports the one that fits, and has the public functions
as attributes. Uploaded to the Hub, FOLDER is a kernel repository.

The launcher uses no symbol of torch, so a variant is of torch's stable ABI: that name stands for
every torch from 2.8 on. `kernels` before 0.15 does not know such variants; it finds `torch-cuda`,
which has both sets. The newer ones prefer the others.
"""

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import prebuilt

INSIDE = f"qla_kernels/{prebuilt.INSIDE.name}/"
MODULE = '''"""qla_kernels {version}: see the package beside this file."""

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).with_name("qla_kernels") / "__init__.py"


def _package():
    """Imports the package beside this file, under its own name."""
    loaded = sys.modules.get("qla_kernels")
    if loaded is None:
        spec = importlib.util.spec_from_file_location(
            "qla_kernels", _FILE, submodule_search_locations=[str(_FILE.parent)]
        )
        loaded = sys.modules["qla_kernels"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules["qla_kernels"]
            raise
    elif Path(loaded.__file__) != _FILE:
        raise ImportError(
            f"qla_kernels is imported from {{loaded.__file__}} already; need one copy a process;"
            f" use that one, or start a process that gets it from {{_FILE.parent}} alone"
        )
    return loaded


_loaded = _package()
__all__ = list(_loaded.__all__)
__version__ = _loaded.__version__


def __getattr__(name):
    return getattr(_loaded, name)


def __dir__():
    return sorted({{*globals(), *dir(_loaded)}})
'''


class Variant(NamedTuple):
    name: str
    sets: tuple[str, ...]


def variants(machine: str, sets: Sequence[str]) -> list[Variant]:
    """Returns the build variants of a wheel with these sets of kernels."""
    cuda = {"13": "cu130", "12.9": "cu126"}  # of torch, at least; minor versions are compatible
    found = [
        Variant(f"torch-stable-abi28-{cuda[of_set]}-{machine}-linux", (of_set,)) for of_set in sets
    ]
    return [*found, Variant("torch-cuda", tuple(sets))]


def write(wheel: Path, folder: Path) -> list[Path]:
    """Writes all build variants into `folder`/build; returns their folders.

    Raises Unsupported for a wheel without kernels, FileExistsError if `folder` is not empty.
    """
    machine = re.search(r"_(x86_64|aarch64)\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.startswith("qla_kernels/")]
        sets = [s for s in prebuilt.SETS if INSIDE + prebuilt.FILE.format(s) in names]
        if not machine or not sets:
            fix = "build one: QLA_PREBUILT=FOLDER python -m build --wheel"
            raise Unsupported(need("hub_layout", f"{wheel.name}", "a wheel with kernels", fix))
        (licence,) = (name for name in file.namelist() if name.endswith("licenses/LICENSE"))
        version = wheel.name.split("-")[1]
        written = []
        for variant in variants(machine[1], sets):
            place = folder / "build" / variant.name
            place.mkdir(parents=True)
            left_out = {INSIDE + prebuilt.FILE.format(s) for s in {*sets} - {*variant.sets}}
            contents = {name: file.read(name) for name in names if name not in left_out}
            contents["LICENSE"] = file.read(licence)
            contents["__init__.py"] = MODULE.format(version=version).encode()
            for name, content in contents.items():
                path = place / PurePosixPath(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            about = json.dumps(metadata(variant, contents), indent=2) + "\n"
            place.joinpath("metadata.json").write_text(about)
            written.append(place)
    return written


def metadata(variant: Variant, contents: dict[str, bytes]) -> dict[str, object]:
    """Returns what `kernels` reads about a variant; the id is unique to variant and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    unique = f"{variant.name}-{digest.hexdigest()[:12]}"
    return {
        "id": "_qla_kernels_" + re.sub(r"\W", "_", unique),
        "name": "qla-kernels",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": {"type": "cuda", "archs": ["9.0a"]},
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python scripts/hub_layout.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        written = write(options.wheel, options.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{place}\n" for place in written)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
