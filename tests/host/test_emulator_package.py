"""The emulator as a part of the package: what it says where something is missing."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from qla_kernels import Unsupported
from qla_kernels.lab.emulator import EmulatedKernel, build, cache, lowering
from qla_kernels.lab.emulator import command as program
from qla_kernels.lab.emulator.command import main
from tests.host.test_import import WITHOUT_TILELANG, fresh

KERNEL = """
from typing import NamedTuple

class Variant(NamedTuple):
    dtype: str

VARIANTS = Variant("bfloat16"), Variant("float16")
"""
WHOLE = KERNEL + "def build(variant): raise AssertionError\ndef case(variant): ..."


def test_without_tilelang_it_says_what_is_missing(tmp_path):
    """And it imports neither tests nor the families' host code."""
    file = tmp_path / "mine.py"
    file.write_text(WHOLE)
    said = fresh(
        WITHOUT_TILELANG
        + f"""
from qla_kernels.lab.emulator.command import main
assert main([{str(file)!r}]) == 2
others = "pytest", "tests", "qla_kernels.gdn", "qla_kernels.lab.selftest"
assert not set(others) & set(sys.modules)
"""
    )
    assert said.startswith("qla_kernels.lab.emulator: tilelang cannot be imported (")
    assert said.endswith(
        "); need TileLang 0.1.13 or newer; pip install '.[compile]' in a checkout of qla-kernels\n"
    )


@pytest.mark.parametrize(
    ("platform", "compiler", "version", "said"),
    [
        ("darwin", "/bin/g++", "13.1.0", "found darwin; need Linux; "),
        ("linux", None, "", r"found no g\+\+; need g\+\+ 11 or newer; apt install"),
        (
            "linux",
            "/bin/g++",
            "9.4.0",
            r"found g\+\+ 9.4.0 at /bin/g\+\+; need g\+\+ 11 or",
        ),
    ],
)
def test_without_a_compiler_it_says_what_is_missing(platform, compiler, version, said, monkeypatch):
    monkeypatch.setattr(build, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(build.shutil, "which", lambda _: compiler)
    answer = subprocess.CompletedProcess([], 0, stdout=f"{version}\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(Unsupported, match=f"^emulator: {said}"):
        build._architecture.__wrapped__()


def test_what_is_no_primfunc_is_refused():
    with pytest.raises(TypeError, match=r"got function; need a PrimFunc; call get_tir\(\.\.\)"):
        EmulatedKernel(lambda x: x)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, [], "emulate: no file {}; need one; check the path"),
        (KERNEL, [], "emulate: {} without build and case; need VARIANTS, build and case; see"),
        (WHOLE, ["--variant", "k64"], "no variant matches; variants: bf16, fp16"),
    ],
)
def test_a_file_that_is_no_kernel_is_refused(tmp_path, capsys, text, arguments, said):
    file = tmp_path / "other.py"
    if text is not None:
        file.write_text(text)
    assert main([str(file), *arguments]) == 2
    assert capsys.readouterr().err.startswith(said.format(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module", "line 1: importing it raises ModuleNotFoundError: No module"),
        (WHOLE, "line 8: building other-bf16 raises AssertionError: "),
        (
            KERNEL + "def case(variant): ...\ndef build(variant):\n    variant.rows",
            "line 10: building other-bf16 raises AttributeError: 'Variant' object has no",
        ),
    ],
)
def test_a_file_whose_code_raises_is_named_with_its_line(tmp_path, capsys, monkeypatch, text, said):
    """It once ended in a traceback and 1, which means wrong numbers."""
    monkeypatch.setattr(lowering, "imported", lambda: None)
    file = tmp_path / "other.py"
    file.write_text(text)
    assert main([str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"emulate: {file}, {said}")
    assert message.endswith("; need code that runs; mend the file\n")


def test_a_case_that_raises_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "emulated", lambda *_: None)
    file = tmp_path / "other.py"
    file.write_text(KERNEL + "def build(variant): ...\ndef case(variant):\n    raise OSError")
    assert main([str(file)]) == 2
    said = f"emulate: {file}, line 10: case of other-bf16 raises OSError: ; need"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("error", "said"), [(0.0, "exact"), (1e-3, "largest relative error 1.0e-03")]
)
def test_the_error_is_said(tmp_path, capsys, monkeypatch, error, said):
    """Numbers without any once had `largest relative error 0.0e+00`."""
    monkeypatch.setattr(lowering, "imported", lambda: None)
    monkeypatch.setattr(program, "emulated", lambda *_: None)
    monkeypatch.setattr(program, "check", lambda *_: error)
    file = tmp_path / "other.py"
    file.write_text(WHOLE)
    assert main([str(file), "--variant", "bf16"]) == 0
    assert capsys.readouterr().out == f"ok    other-bf16: 6 seeds, {said}\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EMU_CACHE", str(tmp_path / "file" / "inside"))
    with pytest.raises(Unsupported, match=r"file/inside'\); need a folder that it can write; set"):
        cache.write(cache.folder() / "x", "")


def test_what_is_compiled_is_kept_in_the_checkout_or_in_the_user_s_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("EMU_CACHE", raising=False)
    assert cache.folder() == Path(cache.__file__).parents[3] / "build" / "emulator"
    monkeypatch.setattr(cache, "ROOT", tmp_path)  # as site-packages: no pyproject.toml
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == Path.home() / ".cache" / "qla_kernels" / "emulator"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == Path("/caches/qla_kernels/emulator")
    monkeypatch.setenv("EMU_CACHE", "/chosen")
    assert cache.folder() == Path("/chosen")
