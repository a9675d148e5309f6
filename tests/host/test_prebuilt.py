"""Prebuilt kernels are found, used without TileLang, and refused where they do not fit."""

import json
import logging
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from qla_kernels.gdn.kernels import gate, recurrent
from qla_kernels.lab import build, doctor, selftest, warmup
from qla_kernels.runtime import digests, jit, programs
from qla_kernels.runtime.compiler import INSTALL, NEEDS_TILELANG, WHEEL
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import launcher, prebuilt, sources
from tests.native import behaviour, standin
from tests.native.made_up import EDITED, LABEL, VARIANT, built, write

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """QLA_PREBUILT; what this process remembers of prebuilt kernels is forgotten after the test."""
    forget()
    shutil.copy(standin.built() / prebuilt.LAUNCHER, tmp_path)
    monkeypatch.setenv("QLA_PREBUILT", str(tmp_path))
    monkeypatch.delenv("QLA_DUMP", raising=False)
    monkeypatch.setattr(jit, "_compiled", lambda *_: "compiled")
    monkeypatch.setattr(jit, "_digests", {})
    yield tmp_path
    forget()


def forget() -> None:
    jit.compile.cache_clear()
    prebuilt._kernels.cache_clear()
    prebuilt._found.clear()
    prebuilt._native.cache_clear()
    prebuilt._edited.clear()


def test_a_prebuilt_kernel_is_used_and_says_which_it_is(folder: Path) -> None:
    write(folder)
    launch = jit.compile(gate, VARIANT)
    assert launch.__name__ == LABEL
    assert jit.compiled() == {LABEL: "0123456789abcdef"}
    assert jit.compile(gate, VARIANT) is launch
    other = recurrent.VARIANTS[0]
    assert jit.compile(recurrent, other) == "compiled"  # not in the file


def test_the_doctor_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = jit.label(recurrent, recurrent.VARIANTS[0])
    path = write(folder, built(), built(**EDITED)._replace(label=second))
    every = sum(len(kernel.module.VARIANTS) for kernel in jit.kernel_modules())
    monkeypatch.setattr(doctor, "_version", lambda name, *_: "2.13.0" if name == "torch" else None)
    report = doctor.report()
    assert report["versions"]["tested together"] == "yes"  # with those that built the file
    assert report["prebuilt kernels"] == {
        "file": str(path),
        "set": "13: tilelang 0.1.15, nvcc release 13.0, V13.0.88",
        "kernels": [
            f"1 of {every} variants are used",
            "1 were built from other sources: gdn.recurrent",
            f"{every - 2} are not in the file",
        ],
    }
    path.write_bytes(b"")
    prebuilt._kernels.cache_clear()
    assert "cannot read its manifest" in str(doctor.report()["prebuilt kernels"])
    monkeypatch.setenv("QLA_PREBUILT", "")
    assert doctor.report()["prebuilt kernels"] == {"file": "none: QLA_PREBUILT is empty"}


def test_the_selftest_reads_every_prebuilt_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed where QLA_PREBUILT named nothing, and where a file was damaged."""

    def said() -> selftest.Result:
        prebuilt._kernels.cache_clear()
        (result,) = (x for x in selftest.run() if x.name == "prebuilt kernels")
        return result

    path = write(folder)
    every = len(digests.recorded())
    some = f"1 of {every} variants, {path}; the others need {NEEDS_TILELANG}"
    assert said() == selftest.Result("prebuilt kernels", True, some)
    monkeypatch.setitem(sys.modules, "tilelang", None)
    assert said() == selftest.Result("prebuilt kernels", False, some)
    write(folder, *(built()._replace(label=label) for label in digests.recorded()))
    monkeypatch.setattr(prebuilt.KernelFile, "has", lambda *_: True)
    assert said() == selftest.Result(
        "prebuilt kernels", True, f"{every} of {every} variants, {path}"
    )
    write(folder, built(cubin="another"))
    assert (said().passed, said().note[:30]) == (False, "qla_kernels: cannot read gdn.g")
    monkeypatch.setenv("QLA_PREBUILT", str(folder / "nowhere"))
    assert said().passed is False
    assert "nowhere does not exist" in said().note
    assert selftest.main([]) == 1
    monkeypatch.setenv("QLA_PREBUILT", "")
    nothing = f"QLA_PREBUILT is empty; {prebuilt.NOTHING_TO_LAUNCH}"
    assert said() == selftest.Result("prebuilt kernels", None, nothing)
    monkeypatch.delitem(sys.modules, "tilelang")
    monkeypatch.setattr(prebuilt, "can_compile", lambda: True)
    assert said() == selftest.Result("prebuilt kernels", None, "QLA_PREBUILT is empty")


def test_a_file_may_be_named_instead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QLA_PREBUILT", str(write(folder)))
    assert jit.compile(gate, VARIANT).__name__ == LABEL


@pytest.mark.parametrize("value", ["", None])
def test_there_may_be_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    write(folder)
    monkeypatch.delenv("QLA_PREBUILT")
    if value is not None:
        monkeypatch.setenv("QLA_PREBUILT", value)
        monkeypatch.setattr(prebuilt, "INSIDE", folder)
    assert jit.compile(gate, VARIANT) == "compiled"


def test_those_inside_the_package_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder)
    monkeypatch.delenv("QLA_PREBUILT")
    monkeypatch.setattr(prebuilt, "INSIDE", folder)
    assert jit.compile(gate, VARIANT).__name__ == LABEL


def test_a_dump_asks_for_a_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder)
    monkeypatch.setenv("QLA_DUMP", str(folder))
    assert jit.compile(gate, VARIANT) == "compiled"


def test_edited_sources_are_compiled_and_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = jit.label(recurrent, recurrent.VARIANTS[0])
    path = write(folder, built(**EDITED), built(**EDITED)._replace(label=second))
    with caplog.at_level(logging.WARNING, logger="qla_kernels"):
        assert jit.compile(gate, VARIANT) == "compiled"
        assert jit.compile(recurrent, recurrent.VARIANTS[0]) == "compiled"
    assert caplog.messages == [
        f"{path} was built from other sources of gdn.gate: it is compiled, as are other"
        " edited kernels"
    ]


def recorded(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Makes digests.json have the digests of `built()` for today's sources, but for `changed`."""
    about = built().about | changed
    monkeypatch.setattr(digests, "recorded", lambda: {LABEL: about["digest"]})
    monkeypatch.setattr(digests, "launches", lambda: {LABEL: about["launch"]})
    monkeypatch.setattr(digests, "sources", lambda: {"gdn.gate": about["code"]})


def test_comments_do_not_make_a_kernel_old(folder: Path) -> None:
    write(folder, built(sources="other"))
    assert jit.compile(gate, VARIANT).__name__ == LABEL


def test_sources_that_generate_the_same_keep_a_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources were edited, lowered again, and gave the digests that the kernel has."""
    write(folder, built(**EDITED))
    recorded(monkeypatch)
    assert jit.compile(gate, VARIANT).__name__ == LABEL


@pytest.mark.parametrize("other", ["digest", "launch", "code"])
def test_sources_that_generate_something_else_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Other device code, another launch; or edited sources that nobody has lowered."""
    write(folder, built(**EDITED))
    recorded(monkeypatch, **{other: "another"})
    assert jit.compile(gate, VARIANT) == "compiled"


def test_a_variant_whose_launch_is_not_recorded_is_not_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, built(**EDITED))
    recorded(monkeypatch)
    monkeypatch.setattr(digests, "launches", dict)
    assert jit.compile(gate, VARIANT) == "compiled"


def test_a_launcher_of_other_c_sources_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder)
    monkeypatch.setattr(launcher, "sources", lambda: b"edited")
    assert jit.compile(gate, VARIANT) == "compiled"
    why = f"{folder / prebuilt.LAUNCHER} was compiled from other C sources than these"
    assert caplog.messages == [
        f"{why}; kernels are compiled; `python -m qla_kernels build` renews it"
    ]
    assert prebuilt.lacking(LABEL) == why
    with pytest.raises(Unsupported, match=r"other C sources; need the launcher of these sources"):
        prebuilt.checked(folder)


def test_a_build_renews_a_launcher_that_is_damaged_or_old(folder: Path) -> None:
    path = folder / prebuilt.LAUNCHER
    whole, before = path.read_bytes(), path.stat().st_mtime_ns
    assert build.launcher_in(folder) == path
    assert path.stat().st_mtime_ns == before
    library = whole[: whole.rindex(launcher.MARK)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "sources", lambda: bytes(launcher.DIGEST))
        old = launcher.sealed(library)
    for contents in (whole[:-1], old):
        path.write_bytes(contents)
        build.launcher_in(folder)
        assert path.read_bytes() == whole  # the same compiler gives the same bytes


TEXT = """
def f(x, *, y: int = 0):
    return f"{x:>{y}} {y!r}"
"""
SAME = """
# a comment
def f(
    x,
    *,
    y: int = 0,
):
    'A docstring.'

    return f'{x:>{y}} {y!r}'  # another
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (TEXT, SAME, True),
        (TEXT, f"'Of the module.'\n{TEXT}", True),
        ("y!r", "y!s", False),
        (">", "<", False),
        ("int = 0", "int = False", False),
        ("int = 0", "int = 0.0", False),
        ("*, ", "", False),
        ("    return", "    'A docstring.'; x\n    return", False),
        ("return", "yield", False),
        ("def", "async def", False),
    ],
)
def test_code_is_what_python_reads(old: str, new: str, same: bool) -> None:
    changed = TEXT.replace(old, new)
    assert changed != TEXT
    assert ([*sources.structure(changed)] == [*sources.structure(TEXT)]) is same


def test_code_is_the_same_in_every_python() -> None:
    """Versions differ in fields and texts that are empty. The number is from 3.10 to 3.13."""
    parts = "\n".join(sources.structure(TEXT + "x = [1, -2.5, ...]\n"))
    assert build.checksum(parts.encode())[:16] == "d5e96344737299c0"


def test_a_fingerprint_is_of_what_a_kernel_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [kernel.module.__name__ for kernel in jit.kernel_modules()]
    before = {name: sources.fingerprint(name) for name in every}
    source = sources.source

    def edited(module: str) -> tuple[str, list[str]]:
        digest, imports = source(module)
        return digest + "edited" * (module == "qla_kernels.gdn.kernels.recurrent"), imports

    sources.fingerprint.cache_clear()
    monkeypatch.setattr(sources, "source", edited)
    changed = [name for name in every if sources.fingerprint(name) != before[name]]
    sources.fingerprint.cache_clear()
    names = ("recurrent", "recurrent_norm", "verify")
    assert changed == [f"qla_kernels.gdn.kernels.{name}" for name in names]


def test_every_file_of_device_code_is_in_a_fingerprint() -> None:
    seen: set[str] = {"qla_kernels.tile.schedule"}
    pending = [kernel.module.__name__ for kernel in jit.kernel_modules()]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += sources.source(name)[1]
    files = {sources.path_of(name) for name in seen}
    package = sources.PACKAGE
    written = {*package.glob("*/kernels/**/*.py"), *package.glob("tile/*.py")}
    missing = {path for path in written - files if path.name != "__init__.py"}
    assert not missing
    for inline in package.glob("**/*.cuh"):  # a .cuh belongs to the .py beside it
        assert inline.with_suffix(".py") in files


DAMAGE = {
    "cut short": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "a wrong byte": lambda whole: whole.replace(whole[-400:-390], b"0123456789"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    path = write(folder)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(Unsupported, match=rf"cannot read .* in {path}.*; need a whole file; inst"):
        jit.compile(gate, VARIANT)


@pytest.mark.parametrize("name", ["entry", "cubin"])
def test_contents_other_than_the_manifests_are_refused(folder: Path, name: str) -> None:
    path = write(folder, built(**{name: "0" * 64}))
    suffix = {"entry": "json", "cubin": "cubin"}[name]
    with pytest.raises(Unsupported, match=rf"cannot read {LABEL}.{suffix} in {path}; need a whole"):
        jit.compile(gate, VARIANT)


def test_a_file_without_one_of_its_kernels_is_refused(folder: Path) -> None:
    path = write(folder)
    with zipfile.ZipFile(path) as file:
        manifest = file.read(prebuilt.MANIFEST)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(prebuilt.MANIFEST, manifest)
    with pytest.raises(Unsupported, match=rf"cannot read {LABEL}.json .* in {path}; need a whole"):
        jit.compile(gate, VARIANT)


def test_another_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prebuilt, "FORMAT", prebuilt.FORMAT + 1)
        path = write(folder)
    said = (
        rf"{path} is of format {prebuilt.FORMAT + 1}; need format {prebuilt.FORMAT}; run `python -m"
    )
    with pytest.raises(Unsupported, match=said):
        jit.compile(gate, VARIANT)


LAUNCHERS = {
    "no library": lambda whole: b"no library",
    "cut short": lambda whole: whole[:-500],
    "half": lambda whole: whole[: len(whole) // 2],
    "of another machine": lambda whole: whole[:18] + b"\0\1" + whole[20:],
}


@pytest.mark.parametrize("damage", LAUNCHERS)
def test_a_launcher_that_cannot_be_imported_is_named(folder: Path, damage: str) -> None:
    write(folder)
    launcher = folder / prebuilt.LAUNCHER
    launcher.write_bytes(LAUNCHERS[damage](launcher.read_bytes()))
    with pytest.raises(Unsupported, match=rf"cannot read the launcher .* in {launcher}; need a"):
        jit.compile(gate, VARIANT)


def test_a_place_that_is_not_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QLA_PREBUILT", str(folder / "nowhere"))
    with pytest.raises(Unsupported, match=r"QLA_PREBUILT: .*/nowhere does not exist; need a fol"):
        jit.compile(gate, VARIANT)


def test_a_place_without_kernels_or_launcher_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named, so that compiling instead would not be what was meant."""
    absent = f"no kernels-13.zip or kernels-12.9.zip in {folder}; need kernels, and launcher.abi3"
    with pytest.raises(Unsupported, match=re.escape(absent)):
        jit.compile(gate, VARIANT)
    write(folder)
    (folder / prebuilt.LAUNCHER).unlink()
    prebuilt._kernels.cache_clear()
    with pytest.raises(Unsupported, match=re.escape(f"no {folder / prebuilt.LAUNCHER}; need")):
        jit.compile(gate, VARIANT)


def test_cpu_tensors_need_no_prebuilt_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QLA_PREBUILT", str(folder / "nowhere"))
    assert programs._native() is None


def test_a_free_threaded_python_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder)
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(Unsupported, match=r"free-threaded, .*; need a Python with the GIL; use s"):
        jit.compile(gate, VARIANT)


def test_kernels_that_the_driver_cannot_read_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(folder)
    monkeypatch.setattr(prebuilt, "_driver_version", lambda _: 12080)
    assert jit.compile(gate, VARIANT) == "compiled"
    why = f"{path} needs a driver of CUDA 13 (R580 or newer), and this one is of CUDA 12.8"
    assert caplog.messages == [f"{why}; kernels are compiled"]
    assert prebuilt.lacking(LABEL) == why


@pytest.mark.parametrize(("version", "chosen"), [(12090, "12.9"), (13000, "13"), (0, "13")])
def test_the_set_is_chosen_by_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, chosen: str
) -> None:
    for of_set in prebuilt.SETS:
        write(folder, built(digest=of_set), of_set=of_set)
    monkeypatch.setattr(prebuilt, "_driver_version", lambda _: version)
    jit.compile(gate, VARIANT)
    assert jit.compiled() == {LABEL: chosen}


def test_without_a_driver_both_sets_are_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The set of CUDA 12.9 alone was read: a damaged kernels-13.zip passed."""
    job = gate, VARIANT
    monkeypatch.setattr(warmup, "jobs", lambda *_: [job])
    monkeypatch.setattr(prebuilt, "can_compile", lambda: False)
    monkeypatch.setattr(digests, "recorded", lambda: {LABEL: ""})
    monkeypatch.setattr(prebuilt, "_driver_version", lambda _: 0)
    monkeypatch.setattr(selftest, "run", lambda *_: [selftest._prebuilt()])

    def said(*arguments: str) -> str:
        forget()
        command, *options = arguments
        status = {"doctor": doctor, "selftest": selftest, "warmup": warmup}[command].main(options)
        heard = capsys.readouterr()
        return f"{status} {heard.out}{heard.err}"

    paths = {of_set: write(folder, of_set=of_set) for of_set in prebuilt.SETS}
    commands = ("selftest",), ("warmup", "--in-process")
    for command in (*commands, ("doctor",)):
        heard = said(*command)
        assert heard.startswith("0 ")
        assert all(str(path) in heard for path in paths.values())
    for of_set, path in paths.items():
        write(folder, built(cubin="another"), of_set=of_set)
        for command in commands:
            heard = said(*command)
            assert heard.startswith("1 ")
            assert f"cannot read {LABEL}.cubin in {path}" in heard
        write(folder, of_set=of_set)
    write(folder, built(**EDITED), of_set="12.9")
    assert said("selftest").startswith("1 FAIL  prebuilt kernels for other drivers: 0 of 1 var")
    assert f"{paths['12.9']} lacks 1 of 1 kernels ({LABEL}" in said("warmup", "--in-process")
    monkeypatch.setattr(prebuilt, "_driver_version", lambda _: prebuilt.DRIVER_OF_13)
    for command in commands:  # this driver has chosen
        assert said(*command).startswith("0 ")


@pytest.mark.parametrize("version", [12090, 13000])
@pytest.mark.parametrize("forced", prebuilt.SETS)
def test_a_file_that_is_named_is_the_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, forced: str
) -> None:
    """Both sets can be tested with one driver, as far as it can read them."""
    paths = {of_set: write(folder, built(digest=of_set), of_set=of_set) for of_set in prebuilt.SETS}
    monkeypatch.setenv("QLA_PREBUILT", str(paths[forced]))
    monkeypatch.setattr(prebuilt, "_driver_version", lambda _: version)
    readable = version >= prebuilt.DRIVER_OF_13 or forced == "12.9"
    assert (jit.compile(gate, VARIANT) == "compiled") == (not readable)
    assert jit.compiled() == ({LABEL: forced} if readable else {})


def test_the_same_kernels_give_the_same_file(folder: Path) -> None:
    first = write(folder).read_bytes()
    assert write(folder).read_bytes() == first
    assert [path.name for path in folder.glob("kernels*")] == ["kernels-13.zip"]  # no leftover


def test_without_tilelang_and_without_a_kernel_it_says_what_to_install(folder: Path) -> None:
    write(folder)
    code = """
import sys; sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
from qla_kernels.runtime import jit
from qla_kernels.gdn.kernels import gate, recurrent
print(jit.compile(gate, gate.VARIANTS[0]).__name__)
try:
    jit.compile(recurrent, recurrent.VARIANTS[0])
except ValueError as error:
    print(error)
"""
    said = standin.run("-c", code, QLA_PREBUILT=str(folder)).splitlines()
    assert said[0] == LABEL
    absent = jit.label(recurrent, recurrent.VARIANTS[0])
    assert said[1].startswith(
        f"{absent}: it is not in {folder}/kernels-13.zip, and tilelang cannot"
    )
    assert said[1].endswith(
        f"; need TileLang 0.1.13 or newer, or prebuilt kernels; {INSTALL}, or {WHEEL}"
    )


def test_a_forward_launches_without_tilelang(folder: Path) -> None:
    """The public function, as far as the driver; TileLang cannot be imported."""
    pytest.importorskip("tilelang", reason="lowers the kernels beforehand")
    labels = standin.run("-m", "tests.native.forward", "variants").split()
    assert [label.partition("-")[0] for label in labels] == [
        "gdn.l2norm", "gdn.l2norm", "gdn.fused_fwd",
    ]  # fmt: skip
    kernels = [
        without_machine_code(kernel, variant)
        for kernel in jit.kernel_modules("gdn")
        for variant in kernel.module.VARIANTS
        if jit.label(kernel.module, variant) in labels
    ]
    write(folder, *kernels)
    functions = [re.sub(r"\W", "_", label) + "_kernel" for label in labels]
    for how in ("launches", "by_python"):
        said = standin.run("-m", "tests.native.forward", how, QLA_PREBUILT=str(folder))
        assert said.split() == functions


def without_machine_code(kernel: jit.Kernel, variant: Any) -> build.Built:
    lowered = jit.lower(kernel, variant)
    return build.built(kernel, variant, lowered, behaviour.CUBIN)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the command has filled with two small kernels."""
    pytest.importorskip("tilelang", reason="lowers the kernels")
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))
    place = tmp_path_factory.mktemp("few") / "new"
    with redirect_stdout(StringIO()) as said:
        assert build.main(["dualkv.dq_cast", "--out", str(place), "--workers", "1"]) == 0
    assert said.getvalue().startswith("2 kernels in ")
    return place


def test_the_command(few: Path) -> None:
    (path,) = few.glob("kernels-*.zip")
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read(prebuilt.MANIFEST))
        label = "dualkv.dq_cast-bf16"
        cubin = file.read(f"{label}.cubin")
        licences = file.read("NOTICES")
    assert b"Tile-AI" in licences
    assert b"NVIDIA CORPORATION" in licences
    assert set(manifest["kernels"]) == {label, "dualkv.dq_cast-fp16"}
    if manifest["tilelang"] == digests.lowered_by():
        assert manifest["kernels"][label]["digest"] == digests.recorded()[label]
    assert cubin.startswith(b"\x7fELF")
    assert b"debug_line" not in cubin
    assert manifest["nvcc"] == jit.nvcc_version()
    assert (few / prebuilt.LAUNCHER).exists()


def test_kernels_of_a_file_stay(few: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(few, tmp_path / "more"))
    (path,) = place.glob("kernels-*.zip")
    with redirect_stdout(StringIO()) as said:
        assert build.main(["norm.weight_sums", "--out", str(place), "--workers", "1"]) == 0
    assert said.getvalue().startswith("3 kernels in ")
    assert said.getvalue().endswith(", 1 of them built now\n")
    assert prebuilt.opened(path).has("dualkv.dq_cast-bf16")
    with redirect_stdout(StringIO()) as said:
        assert build.main(["dualkv.dq_cast", "--out", str(place)]) == 0
    assert said.getvalue().endswith(", 0 of them built now\n")
    assert prebuilt.opened(path).has("norm.weight_sums-fp32")


def test_a_release_has_the_same_bytes_again(
    folder: Path, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two small kernels: built twice from nothing, and once from what is there."""
    of_both = build.selected(["dualkv.dq_cast"])
    monkeypatch.setattr(build, "selected", lambda _: of_both)

    def release(place: Path) -> dict[str, bytes]:
        monkeypatch.setattr(prebuilt, "INSIDE", place)
        assert build.main(["--release", "--workers", "1"]) == 0
        return {path.name: path.read_bytes() for path in place.iterdir()}

    written = release(folder / "inside")
    assert {*written} == {prebuilt.FILE.format(build.set_of()), prebuilt.LAUNCHER}
    assert {path.name: path.read_bytes() for path in few.iterdir()} == written
    monkeypatch.setattr(build, "build_all", lambda missing, *_: missing and pytest.fail("again"))
    assert release(folder / "inside") == written


def test_a_release_needs_the_digests_of_its_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prebuilt, "INSIDE", folder / "inside")
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sources", dict)
        assert build.main(["--release"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("build --release: digests.json is not of the sources of ")
    assert "; run `python -m qla_kernels digests --write` with the TileLang" in said
    assert not (folder / "inside").exists()
    (kernel,) = (kernel for kernel in jit.kernel_modules("gdn") if kernel.module is gate)
    recorded(monkeypatch)
    build.check_recorded([(kernel, VARIANT)])
    build.check_digests([built()])
    for name in ("digest", "launch"):
        with pytest.raises(Unsupported, match=r"not of the sources of 1 variants .gdn.gate"):
            build.check_digests([built(**{name: "another"})])
    with pytest.raises(SystemExit):
        build.main(["--release", "gdn.gate"])


def test_kernels_of_a_release_are_whole() -> None:
    """Those that this checkout has, if it has any."""
    *files, path = prebuilt.files_of(prebuilt.INSIDE)
    for file in files:
        launcher.is_current(path)  # raises if it is damaged
        kernels = prebuilt.opened(file)
        for label in kernels.kernels:
            for kind in prebuilt.MEMBERS:
                kernels.read(label, kind)


def test_a_build_keeps_kernels_of_the_same_sources_and_tools(folder: Path) -> None:
    path = write(folder)
    tools = {"tilelang": "0.1.15", "nvcc": "release 13.0, V13.0.88"}
    (kernel,) = (kernel for kernel in jit.kernel_modules("gdn") if kernel.module is gate)
    found = [(kernel, VARIANT), (kernel, gate.VARIANTS[1])]
    assert build.kept(path, found, tools) == {LABEL: built()}
    assert build.kept(path, found, tools | {"nvcc": "another"}) == {}
    assert build.kept(path, [], tools) == {}
    assert build.kept(path.with_name("none.zip"), found, tools) == {}
    write(folder, built(**EDITED))
    assert build.kept(path, found, tools) == {}
    path.write_bytes(path.read_bytes()[:-100])
    assert build.kept(path, found, tools) == {}


def test_unknown_kernels_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"gdn.nothing; need a kernel or a family; see python -m"):
        build.selected(["gdn.nothing"])


@pytest.mark.parametrize(
    ("version", "of_set"),
    [("release 13.0, V13.0.88", "13"), ("release 13.2, V1", "13"), ("release 12.9, V1", "12.9")],
)
def test_sets_go_by_nvcc(monkeypatch: pytest.MonkeyPatch, version: str, of_set: str) -> None:
    monkeypatch.setattr(jit, "nvcc_version", lambda: version)
    assert build.set_of() == of_set


def test_other_compilers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "nvcc_version", lambda: "release 12.4, V12.4.131")
    with pytest.raises(Unsupported, match=r"nvcc release 12.4.*; need 13 or 12.9; set CUDA_HOME"):
        build.set_of()
