"""Compiles kernels ahead of time, for processes that have neither TileLang nor nvcc.

    python -m qla_kernels build --out FOLDER                   every variant of every kernel
    python -m qla_kernels build --out FOLDER gdn attn.delta    a family, and one kernel
    python -m qla_kernels build --out FOLDER --ptxas PATH      with another ptxas
    python -m qla_kernels build --release                      every variant, for a release

Writes FOLDER/kernels-13.zip (kernels-12.9.zip if nvcc or --ptxas is of CUDA 12.9), and compiles the
launcher, FOLDER/launcher.abi3.so. `QLA_PREBUILT=FOLDER` makes qla_kernels use both, and puts both
into a wheel that is built with it (hatch_build.py). A kernel whose registers, spills or shared
memory differ from its schedule is refused.

Kernels that the folder's file already has stay in it and are not built again if sources and tools
are the same, or if edited sources have the same digests in digests.json. All others leave it.

--release fills qla_kernels/prebuilt of a checkout, which is committed with each release. Wheels,
source distributions and editable installs of the checkout then have the kernels. It refuses to
write a kernel whose digests differ from digests.json.

Needs TileLang, nvcc and a C compiler, but no GPU. The file holds, compressed, the machine code of
each variant, without line information, and what a launch needs (`native/entry.py`); and
a manifest: versions of TileLang and nvcc, and for each variant checksums and the digests of its
generated code, launch and sources. NOTICES has the licences of headers that are compiled into the
kernels. The same sources and tools give the same bytes.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from qla_kernels import __version__
from qla_kernels.lab import command_line
from qla_kernels.lab.inspect import gather, rules, sass
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime import ptxas as other_ptxas
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import prebuilt, sources
from qla_kernels.runtime.native.host_function import read_entry
from qla_kernels.runtime.native.launcher import compile_launcher, is_current, whole
from qla_kernels.tile.schedule import Schedule

LONG_AGO = (1980, 1, 1, 0, 0, 0)  # so that the file depends on its contents alone


class Built(NamedTuple):
    label: str
    entry: bytes  # JSON
    cubin: bytes
    about: dict[str, str]  # in the manifest


def build(kernel: jit.Kernel, variant: Any, ptxas: Path | None = None) -> Built:
    """Lowers and compiles one variant, and reads what a launch of it needs.

    `ptxas` replaces that of nvcc. Raises Unsupported if it cannot read the code, or if the machine
    code does not have the resources of its schedule.
    """
    lowered, name = jit.lower(kernel, variant), jit.label(kernel.module, variant)
    source = lowered.source, kernel.module.PASS_CONFIGS
    with tempfile.TemporaryDirectory() as folder:
        if ptxas is None:
            assembled = jit.assemble(*source, Path(folder), line_info=False)
        else:
            assembled = other_ptxas.assemble(name, *source, Path(folder), ptxas)
        check_resources(name, lowered, assembled.report, kernel.module.schedule(variant))
        return built(kernel, variant, lowered, assembled.cubin.read_bytes())


def check_resources(name: str, lowered: jit.Lowered, report: str, schedule: Schedule) -> None:
    """Raises Unsupported unless ptxas's report agrees with the schedule."""
    spent = sass.spent(report, lowered.function)
    if wrong := rules.resources(gather.spent_by(name, lowered, spent), schedule):
        got, fix = "; ".join(wrong), "build with the versions that docs/install.md names"
        raise Unsupported(need(name, got, "the resources of its schedule", fix))


def built(kernel: jit.Kernel, variant: Any, lowered: jit.Lowered, cubin: bytes) -> Built:
    entry = entry_of(lowered)
    about = {
        "digest": digests.digest(lowered.source, lowered.function),
        "launch": digests.launch(entry, kernel.module.PASS_CONFIGS),
        **_sources(kernel),
        "entry": checksum(entry),
        "cubin": checksum(cubin),
    }
    return Built(jit.label(kernel.module, variant), entry, cubin, about)


def entry_of(lowered: jit.Lowered) -> bytes:
    """Returns the JSON of what a launch of a lowered variant needs."""
    return json.dumps(read_entry(lowered.prim_func, lowered.host, lowered.device)).encode()


def _sources(kernel: jit.Kernel) -> dict[str, str]:
    module = kernel.module.__name__
    return {"sources": sources.fingerprint(module), "code": sources.code(module)}


def checksum(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def set_of(ptxas: Path | None = None) -> str:
    """Returns the name of the set for this ptxas, or for nvcc; Unsupported if there is none.

    Drivers of CUDA 12 can read kernels of ptxas 12.9, but not those of ptxas 13.
    """
    tool, version = "nvcc", jit.nvcc_version()
    if ptxas is not None:
        tool, version = "ptxas", other_ptxas.version(ptxas)
    release = version.removeprefix("release ").partition(",")[0]
    name = release if release in prebuilt.SETS else release.partition(".")[0]
    if name not in prebuilt.SETS:
        needs, fix = " or ".join(prebuilt.SETS), "set CUDA_HOME to one of these, or --ptxas"
        raise Unsupported(need("build", f"{tool} {version}", needs, fix))
    return name


def versions(ptxas: Path | None = None) -> dict[str, str]:
    """Returns the versions of the build tools, for the manifest."""
    import tilelang

    tools = {"tilelang": tilelang.__version__, "nvcc": jit.nvcc_version()}
    return tools if ptxas is None else {**tools, "ptxas": other_ptxas.version(ptxas)}


def notices() -> str:
    """Returns the licences of TileLang's and CUTLASS's headers, from the installed files."""
    from tilelang.env import CUTLASS_INCLUDE_DIR

    files = importlib.metadata.files("tilelang") or []
    found = [str(file.locate()) for file in files if "licenses" in file.parts]
    texts = [Path(file).read_text() for file in found]
    if CUTLASS_INCLUDE_DIR:  # its licence is the comment at the top of each header
        header = Path(CUTLASS_INCLUDE_DIR, "cutlass", "cutlass.h").read_text()
        texts.append(header.partition("*/")[0].replace("/*", " *"))
    return "\n".join(texts)


def write(
    kernels: Iterable[Built],
    folder: Path,
    of_set: str,
    tools: dict[str, str],
    licences: str = "",
) -> Path:
    """Writes the file of one set; it appears under its name when it is complete."""
    kernels = sorted(kernels)
    manifest = {
        "format": prebuilt.FORMAT,
        "qla_kernels": __version__,
        **tools,
        "set": of_set,
        "kernels": {kernel.label: kernel.about for kernel in kernels},
    }
    path = folder / prebuilt.FILE.format(of_set)
    with (
        whole(path) as place,
        zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file,
    ):
        _add(file, prebuilt.MANIFEST, json.dumps(manifest, indent=1).encode())
        _add(file, "NOTICES", licences.encode())
        for kernel in kernels:
            _add(file, prebuilt.MEMBERS["entry"].format(kernel.label), kernel.entry)
            _add(file, prebuilt.MEMBERS["cubin"].format(kernel.label), kernel.cubin)
    return path


def _add(file: zipfile.ZipFile, name: str, contents: bytes) -> None:
    about = zipfile.ZipInfo(name, LONG_AGO)
    about.compress_type = zipfile.ZIP_DEFLATED
    file.writestr(about, contents)


def selected(names: Sequence[str]) -> list[tuple[jit.Kernel, Any]]:
    """Returns the variants of these kernels and families, or all variants without names."""
    known = {".".join(name) for name in jit.kernel_names()}
    for name in names:
        if name not in known | {kernel.partition(".")[0] for kernel in known}:
            fix = "see python -m qla_kernels warmup --list"
            raise ValueError(need("build", name, "a kernel or a family", fix))
    return [
        (kernel, variant)
        for kernel in jit.kernel_modules()
        if not names or {str(kernel), kernel.family} & set(names)
        for variant in kernel.module.VARIANTS
    ]


def kept(
    path: Path, found: Sequence[tuple[jit.Kernel, Any]], tools: dict[str, str]
) -> dict[str, Built]:
    """Returns the variants that a file already has, built from the same sources by `tools`."""
    try:
        file = prebuilt.opened(path)
        if {tool: file.manifest.get(tool) for tool in tools} != tools:
            return {}
        labels = {jit.label(kernel.module, variant): kernel for kernel, variant in found}
        return {
            label: Built(
                label,
                file.read(label, "entry"),
                file.read(label, "cubin"),
                file.kernels[label] | _sources(kernel),
            )
            for label, kernel in labels.items()
            if file.has(label)
        }
    except Unsupported:  # there is no such file, or it is damaged or of another format
        return {}


def build_all(
    found: list[tuple[jit.Kernel, Any]], workers: int | None, ptxas: Path | None = None
) -> list[Built]:
    """Builds variants in several processes; the first failure cancels those that have not begun.

    Threads would not help: lowering, half of the work, holds Python's lock.
    """
    from tqdm.auto import tqdm

    if not found:
        return []
    workers = min(workers or len(os.sched_getaffinity(0)), len(found))
    jobs = [(kernel.family, str(kernel), kernel.module.VARIANTS.index(v)) for kernel, v in found]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_build_named, *job, ptxas) for job in jobs]
        try:
            for future in tqdm(as_completed(futures), desc="build", total=len(futures)):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _build_named(family: str, name: str, number: int, ptxas: Path | None) -> Built:
    (kernel,) = (kernel for kernel in jit.kernel_modules(family) if str(kernel) == name)
    return build(kernel, kernel.module.VARIANTS[number], ptxas)


def launcher_in(folder: Path) -> Path:
    """Returns the folder's launcher; compiles it unless it is intact and of these sources."""
    path = folder / prebuilt.LAUNCHER
    try:
        if path.exists() and is_current(path):
            return path
    except Unsupported:  # it is damaged
        pass
    return compile_launcher(folder)


def check_recorded(found: Iterable[tuple[jit.Kernel, Any]]) -> None:
    """Raises Unsupported unless digests.json has digests for the sources of these variants."""
    labels = [(jit.label(kernel.module, variant), kernel) for kernel, variant in found]
    _refuse_others(
        label
        for label, kernel in labels
        if digests.recorded_for(label, _sources(kernel)["code"]) is None
    )


def check_digests(kernels: Iterable[Built]) -> None:
    """Raises Unsupported unless these kernels have the digests of digests.json."""
    _refuse_others(
        kernel.label
        for kernel in kernels
        if digests.recorded_for(kernel.label, kernel.about["code"])
        != (kernel.about["digest"], kernel.about["launch"])
    )


def _refuse_others(labels: Iterable[str]) -> None:
    if wrong := list(labels):
        got = f"digests.json is not of the sources of {len(wrong)} variants ({wrong[0]}, ..)"
        fix = "run `python -m qla_kernels digests --write` with the TileLang of the release"
        raise Unsupported(need("build --release", got, "their digests", fix))


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("build", __doc__)
    parser.add_argument("kernels", nargs="*", help="families or family.kernel; default: all")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="FOLDER")
    where.add_argument("--release", action="store_true", help="qla_kernels/prebuilt of a checkout")
    parser.add_argument("--ptxas", type=Path, metavar="PATH", help="instead of nvcc's own")
    parser.add_argument("--workers", type=int, help="parallel builds; default: one per core")
    options = parser.parse_args(arguments)
    if options.release and options.kernels:
        parser.error("names of kernels beside --release; a release has all of them")
    folder = prebuilt.INSIDE if options.release else options.out
    try:
        if options.release:
            command_line.need_checkout("build --release")
            check_recorded(selected([]))
        ptxas = options.ptxas and options.ptxas.resolve()
        of_set, found = set_of(ptxas), selected(options.kernels)
        folder.mkdir(parents=True, exist_ok=True)
        launcher_in(folder)
        tools = versions(ptxas)
        old = kept(folder / prebuilt.FILE.format(of_set), selected([]), tools)
        missing = [(kernel, v) for kernel, v in found if jit.label(kernel.module, v) not in old]
        kernels = [*old.values(), *build_all(missing, options.workers, ptxas)]
        if options.release:
            check_digests(kernels)
        path = write(kernels, folder, of_set, tools, notices())
        prebuilt.read_all(path)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    size = f"{path.stat().st_size / 2**20:.2f} MiB, {len(missing)} of them built now"
    sys.stdout.write(f"{len(kernels)} kernels in {path}, {size}\n")
    return 0
