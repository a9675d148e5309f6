"""The wheel: what is in it, and that it works where the checkout has never been."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.limits import HANG
from tests.readme import ROOT, snippets


def run(*command: object, cwd: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QLA_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("build", reason="needs the dev extra")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, ROOT, cwd=out)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
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
            if file.is_file() and "__pycache__" not in file.parts:
                package.remove(f"{target}/{file.relative_to(ROOT / source).as_posix()}")
    assert not package, "files that the checkout does not have"
    assert "qla_kernels/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_only_the_wheel_is_visible(installed, tmp_path):
    code = """
import importlib.util, pathlib, sys, qla_kernels
from qla_kernels.cpu import reference
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
    report = json.loads(run(installed, "-m", "qla_kernels.info", "--json", cwd=tmp_path))
    assert report["paths"]["CPU tensors"] == "qla_kernels.reference, chunked"
    assert Path(report["qla_kernels"]["folder"]).is_relative_to(installed.parents[1])


def test_fingerprint_is_that_of_the_checkout(installed, tmp_path):
    ask = ("-m", "qla_kernels.info", "--fingerprint")
    assert run(installed, *ask, cwd=tmp_path) == run(sys.executable, *ask, cwd=ROOT)
