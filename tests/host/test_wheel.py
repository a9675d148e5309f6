"""Wheels, without kernels and with them: contents, tags, and use where there is no checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from qla_kernels.lab.emulator import cache
from qla_kernels.runtime import digests
from qla_kernels.runtime.native import prebuilt
from tests.limits import HANG
from tests.native import made_up, standin
from tests.readme import ROOT, snippets

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run(*command: object, cwd: Path, fails: bool = False, stderr: bool = False, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QLA_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr * (fails or stderr)


BUILD = (sys.executable, "-m", "build", "--wheel", "--no-isolation", ROOT, "-o")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("build", reason="needs the dev extra")
    run(*BUILD, out, cwd=out, QLA_PREBUILT="")
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Path:
    """A folder with both sets of kernels, which are all one, and the launcher."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copy(standin.built() / prebuilt.LAUNCHER, folder)
    for of_set in prebuilt.SETS:
        made_up.write(folder, *made_up.built_all(), of_set=of_set)
    return folder


@pytest.fixture(scope="module")
def wheel_with_kernels(kernels, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("build", reason="needs the dev extra")
    said = run(*BUILD, out, cwd=out, stderr=True, QLA_PREBUILT=str(kernels))
    for of_set in prebuilt.SETS:
        assert f"set {of_set}, all {len(digests.recorded())} variants" in said
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return environment(wheel, tmp_path_factory)


def environment(wheel: Path, tmp_path_factory) -> Path:
    """The Python of an empty environment with the wheel; dependencies are lent, not downloaded.

    A path file lends this environment's packages. It does not lend their path files, so an editable
    installation of the checkout stays invisible.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=folder)
    own = Path(run(python, "-c", PURELIB, cwd=folder).strip())
    lenders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    own.joinpath("lent.pth").write_text("\n".join(sorted(lenders)) + "\n")
    return python


PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qla_kernels"}
    package = {name for name in names if name.startswith("qla_kernels/")}
    for source, target in (("qla_kernels", "qla_kernels"), ("reference", "qla_kernels/reference")):
        for file in (ROOT / source).rglob("*"):
            if file.is_file() and not {"__pycache__", "prebuilt"} & {*file.parts}:
                package.remove(f"{target}/{file.relative_to(ROOT / source).as_posix()}")
    assert not package, "files that the checkout does not have"
    assert "qla_kernels/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_emulator_s_headers_are_in_it(wheel):
    inside = {info.filename: info for info in zipfile.ZipFile(wheel).infolist()}
    emulator = ROOT / "qla_kernels" / "lab" / "emulator"
    files = [*emulator.glob("device/*.h"), *emulator.glob("runtime/*")]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    assert len(names) > 20
    assert sum(inside[name].compress_size for name in names) < 100_000


def metadata(wheel: Path, name: str) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (path,) = (path for path in file.namelist() if path.endswith(f".dist-info/{name}"))
        return message_from_bytes(file.read(path))


def test_without_kernels_it_fits_every_machine(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert metadata(wheel, "WHEEL")["Root-Is-Purelib"] == "true"
    assert metadata(wheel, "METADATA")["Metadata-Version"] == "2.4"  # what uploaders take
    assert "Typing :: Typed" in metadata(wheel, "METADATA").get_all("Classifier")


@needs_cc
def test_with_kernels_it_is_of_a_machine_and_of_any_python(wheel_with_kernels, wheel, kernels):
    assert wheel_with_kernels.name.endswith("-cp310-abi3-manylinux_2_28_x86_64.whl")
    assert metadata(wheel_with_kernels, "WHEEL")["Root-Is-Purelib"] == "false"
    both = zipfile.ZipFile(wheel_with_kernels), zipfile.ZipFile(wheel)
    added = {*both[0].namelist()} - {*both[1].namelist()}
    assert added == {f"qla_kernels/prebuilt/{path.name}" for path in kernels.iterdir()}
    assert len(added) == 3
    for name in added:
        assert both[0].read(name) == (kernels / Path(name).name).read_bytes()


@needs_cc
def test_both_need_torch_numpy_and_einops_alone(wheel_with_kernels, wheel):
    for each in (wheel_with_kernels, wheel):
        needed = metadata(each, "METADATA").get_all("Requires-Dist")
        plain = {line.partition(">")[0] for line in needed if "extra ==" not in line}
        assert plain == {"torch", "numpy", "einops"}
        compiles = [line for line in needed if "extra == 'compile'" in line]
        assert any(line.startswith("tilelang") for line in compiles)


@needs_cc
@pytest.mark.parametrize("old", ["2.17", "2.28", "2.39"])
def test_the_tag_has_the_glibc_that_the_launcher_needs(kernels, old):
    launcher = (kernels / prebuilt.LAUNCHER).read_bytes()
    hook = run(sys.executable, "-c", TAG, kernels / prebuilt.LAUNCHER, old, cwd=ROOT)
    assert b"GLIBC_2.34" not in launcher, "launcher.c asks for old versions of dlopen and dlsym"
    expected = {"2.17": "2_28", "2.28": "2_28", "2.39": "2_39"}[old]
    assert hook.strip() == f"cp310-abi3-manylinux_{expected}_x86_64"


TAG = """
import pathlib, sys, hatch_build
file, glibc = sys.argv[1:]
contents = pathlib.Path(file).read_bytes() + b"\\0GLIBC_" + glibc.encode() + b"\\0"
print(hatch_build.tag(contents))
"""


@needs_cc
def test_kernels_of_other_sources_do_not_get_into_a_wheel(kernels, tmp_path):
    pytest.importorskip("build", reason="needs the dev extra")
    shutil.copy(kernels / prebuilt.LAUNCHER, tmp_path)
    made_up.write(tmp_path, made_up.built(**made_up.EDITED))
    said = run(*BUILD, tmp_path, cwd=tmp_path, fails=True, QLA_PREBUILT=str(tmp_path))
    assert "was built from other sources of 1 kernels (gdn.gate-" in said
    said = run(*BUILD, tmp_path, cwd=tmp_path, fails=True, QLA_PREBUILT=str(tmp_path / "no"))
    assert f"QLA_PREBUILT: no kernels in {tmp_path / 'no'}; need a built folder; run" in said
    assert "Traceback" not in said
    assert not [*tmp_path.glob("*.whl")]


@needs_cc
def test_a_part_of_the_kernels_makes_no_wheel(kernels, tmp_path):
    """It made one of the same name and version as all of them do."""
    pytest.importorskip("build", reason="needs the dev extra")
    shutil.copy(kernels / prebuilt.LAUNCHER, tmp_path)
    file, every = made_up.write(tmp_path), len(digests.recorded())
    said = run(*BUILD, tmp_path, cwd=tmp_path, fails=True, QLA_PREBUILT=str(tmp_path))
    assert f"QLA_PREBUILT: {file} lacks {every - 1} of {every} variants (attn.delta-" in said
    assert "Traceback" not in said
    assert not [*tmp_path.glob("*.whl")]


@pytest.fixture(scope="module")
def release(kernels, tmp_path_factory) -> Path:
    """A checkout with both sets of kernels, as `build --release` leaves them."""
    pytest.importorskip("build", reason="needs the dev extra")
    root = tmp_path_factory.mktemp("release") / "checkout"
    skip = shutil.ignore_patterns("__pycache__", "prebuilt")
    for name in ("qla_kernels", "reference"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(kernels, root / "qla_kernels" / "prebuilt")
    return root


def built_in(checkout: Path, out: Path, *how: str) -> tuple[Path, str]:
    """Builds a wheel, or an sdist, of a checkout; returns its file and what was said."""
    command = sys.executable, "-m", "build", *(how or ("--wheel",)), "--no-isolation", "-o", out
    said = run(*command, checkout, cwd=out, stderr=True)
    (found,) = (path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    return found, said


def inside(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


USED = """
import sys
from qla_kernels.runtime.native import prebuilt
file = prebuilt.opened(prebuilt.files_of(prebuilt.INSIDE)[0])
print(sum(map(file.has, file.kernels)), file.has("gdn.gate-bf16"))
print(prebuilt.launcher_file.is_current(prebuilt.INSIDE / prebuilt.LAUNCHER))
"""


def used(folder: Path) -> list[str]:
    return run(sys.executable, "-c", USED, cwd=folder, PYTHONPATH=str(folder)).split()


@needs_cc
def test_a_wheel_of_a_release_has_its_kernels(release, kernels, wheel_with_kernels, tmp_path):
    """`pip install .`, also from a source distribution; an editable install is the checkout."""
    every = len(digests.recorded())
    assert used(release) == [str(every), "True", "True"]
    wheel, said = built_in(release, tmp_path)
    assert f"set 13, all {every} variants" in said
    assert wheel.name == wheel_with_kernels.name
    names = sorted(zipfile.ZipFile(wheel).namelist())
    assert names == sorted(zipfile.ZipFile(wheel_with_kernels).namelist())
    folder = inside(wheel, tmp_path / "inside")
    for path in kernels.iterdir():
        assert (folder / "qla_kernels" / "prebuilt" / path.name).read_bytes() == path.read_bytes()
    assert used(folder) == [str(every), "True", "True"]
    archive, _ = built_in(release, tmp_path / "inside", "--sdist")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert {f"qla_kernels/prebuilt/{path.name}" for path in kernels.iterdir()} <= packed


@needs_cc
def test_kernels_of_an_edited_release_are_used_if_they_are_the_same(release, tmp_path):
    """A docstring and C sources were edited, and a kernel's code, of which nobody knows digests."""
    edited = shutil.copytree(release, tmp_path / "edited")
    package = edited / "qla_kernels"
    for path, text in (
        (package / "conv" / "kernels" / "fwd.py", "# a comment\n"),
        (package / "gdn" / "kernels" / "gate.py", "EDITED = True\n"),
        (package / "runtime" / "native" / "launcher.c", "/* a comment */\n"),
    ):
        path.write_text(path.read_text() + text)
    (tmp_path / "out").mkdir()
    wheel, said = built_in(edited, tmp_path / "out")
    few = sum(label.startswith("gdn.gate-") for label in digests.recorded())
    every = len(digests.recorded())
    assert f"set 13, {every - few} of {every} variants" in said
    assert f"set 13: {few} were built from other sources and are not used" in said
    assert used(edited) == [str(every - few), "False", "False"]
    folder = inside(wheel, tmp_path / "inside")
    assert used(folder) == [str(every - few), "False", "True"]  # the launcher was compiled


@needs_cc
def test_without_a_compiler_an_old_launcher_makes_no_wheel_with_kernels(release, tmp_path):
    edited = shutil.copytree(release, tmp_path / "edited")
    with (edited / "qla_kernels" / "runtime" / "native" / "launcher.c").open("a") as file:
        file.write("/* a comment */\n")
    command = [*BUILD[:-2], edited, "-o", tmp_path]
    said = run(*command, cwd=tmp_path, stderr=True, CC="no-compiler")
    assert "this wheel has no kernels: the launcher: " in said
    assert "need a C compiler; install gcc" in said
    (found,) = tmp_path.glob("*.whl")
    assert found.name.endswith("-py3-none-any.whl")
    assert not any("/prebuilt/" in name for name in zipfile.ZipFile(found).namelist())
    (edited / "qla_kernels" / "prebuilt" / "kernels-13.zip").write_bytes(b"cut")
    said = run(*command, cwd=tmp_path, fails=True)
    assert "cannot read its manifest" in said
    assert "Traceback" not in said


def test_the_hook_needs_no_torch(tmp_path):
    """pip builds in an environment of its own, which has hatchling alone."""
    code = """
import sys
sys.modules.update(torch=None, numpy=None, einops=None, tilelang=None)
from qla_kernels.runtime.native import launcher, prebuilt
print(prebuilt.files_of(prebuilt.INSIDE)[-1].name)
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == prebuilt.LAUNCHER


@needs_cc
def test_kernels_of_an_installed_wheel_are_launched(wheel_with_kernels, tmp_path_factory, tmp_path):
    python = environment(wheel_with_kernels, tmp_path_factory)
    said = run(python, "-m", "tests.native.every", cwd=ROOT)  # TileLang cannot be imported there
    assert said.startswith("{0} of {0} ".format(len(digests.recorded())))
    inside = Path(said.split(" launched from ")[1].splitlines()[0])
    assert inside.is_relative_to(python.parents[1])
    assert inside.name == "kernels-13.zip"  # the stand-in is a driver of CUDA 13


def test_only_the_wheel_is_visible(installed, tmp_path):
    code = """
import importlib.util, pathlib, sys, qla_kernels
from qla_kernels.runtime.cpu import reference
assert pathlib.Path(qla_kernels.__file__).is_relative_to(sys.prefix), qla_kernels.__file__
assert reference().__name__ == "qla_kernels.reference"
for name in ("reference", "benchmarks", "tests"):
    assert importlib.util.find_spec(name) is None, name
"""
    run(installed, "-c", code, cwd=tmp_path)


@pytest.mark.parametrize("code", snippets(), ids=lambda code: code.splitlines()[0])
def test_readme_snippet_runs(installed, tmp_path, code):
    run(installed, "-c", code, cwd=tmp_path)


def test_doctor_runs(installed, tmp_path):
    report = json.loads(run(installed, "-m", "qla_kernels", "doctor", "--json", cwd=tmp_path))
    assert report["paths"]["CPU tensors"] == "qla_kernels.reference, chunked"
    assert Path(report["qla_kernels"]["folder"]).is_relative_to(installed.parents[1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_kernel_of_one_s_own_is_emulated(installed, tmp_path):
    pytest.importorskip("tilelang", reason="lowers a kernel")
    file = shutil.copy(ROOT / "examples" / "own_kernel.py", tmp_path)
    command = ("-m", "qla_kernels", "emulate", file, "--variant", "bf16", "--seeds", "1")
    said = run(installed, *command, cwd=tmp_path, EMU_CACHE=str(cache.folder()))
    assert said.startswith("ok    own_kernel-bf16: 1 seeds, largest relative error ")


def test_fingerprint_is_that_of_the_checkout(installed, tmp_path):
    ask = ("-m", "qla_kernels", "doctor", "--fingerprint")
    assert run(installed, *ask, cwd=tmp_path) == run(sys.executable, *ask, cwd=ROOT)
