"""Finding, lowering and compiling kernels on a machine without a GPU."""

import errno
import logging
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qla_kernels.lab import warmup
from qla_kernels.runtime import jit
from qla_kernels.runtime.dump import dump
from qla_kernels.runtime.errors import Unsupported
from tests import zygote

ROOT = Path(__file__).parents[2]


class Variant(NamedTuple):
    dtype: str = "bfloat16"
    K: int = 128


def module(name: str = "qla_kernels.gdn.kernels.kkt_solve") -> Any:
    return types.ModuleType(name)


def run(code: str, **environment: str) -> str:
    """Output of a fresh interpreter, from the repository's root."""
    done = zygote.run(code, cwd=ROOT, path=str(ROOT), env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_known_without_tilelang() -> None:
    said = run(
        "import sys; from qla_kernels.runtime import jit; names = list(jit.kernel_names());"
        "print(('gdn', 'kkt_solve') in names, 'tilelang' in sys.modules)"
    )
    assert said == "True False\n"
    assert list(jit.kernel_names("no_such_family")) == []


def test_label() -> None:
    assert jit.label(module(), Variant()) == "gdn.kkt_solve-bf16-k128"
    assert jit.label(module("sample"), Variant()) == "sample-bf16-k128"
    assert jit.function_name(module(), Variant()) == "gdn_kkt_solve_bf16_k128"


def test_variant_ids() -> None:
    class Many(NamedTuple):
        dtype: str = "float16"
        K: int = 64
        tile_v: int = 128
        solves: bool = True
        state: str = "float32"

    assert jit.variant_id(Many()) == "fp16-k64-v128-solves-fp32"
    assert jit.variant_id(Many(solves=False)) == "fp16-k64-v128-fp32"
    assert jit.variant_id(NamedTuple("Empty", [])()) == ""


def test_cache_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    assert jit.cache_dir() == tmp_path / "cache"
    assert jit.cache_size() == 0
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / "a").write_bytes(b"12345")
    assert jit.cache_size() == 5


def test_refuses_without_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", None)
    with pytest.raises(Unsupported, match=r"tilelang cannot be imported.*need TileLang.*pip"):
        jit.compile(module(), Variant())


def test_a_home_that_cannot_be_written_names_the_setting() -> None:
    """TileLang makes its cache folder on import: out of a first GPU call, and of warm-up."""
    pytest.importorskip("tilelang", reason="its cache folder")
    folder = r"need a writable cache folder \(/proc/x/.tilelang/cache\)"
    named = rf"'/proc/x'\); {folder}.*TILELANG_CACHE_DIR"
    home = {key: value for key, value in os.environ.items() if key != "TILELANG_CACHE_DIR"}
    for code in (
        "from qla_kernels.runtime import jit; from qla_kernels.attn.kernels import delta; "
        "jit.compile(delta, delta.VARIANTS[0])",
        "from qla_kernels.lab import warmup; exit(warmup.main(['--model', 'qwen3-next']))",
    ):
        done = zygote.run(code, cwd=ROOT, path=str(ROOT), env=home | {"HOME": "/proc/x"})
        assert done.returncode == 1
        assert re.search(named, done.stderr.splitlines()[-1]), done.stderr


def test_a_full_disk_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "tilelang", types.SimpleNamespace(compile=full))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "nvcc", lambda: None)
    fake = module()
    fake.PASS_CONFIGS = {}
    monkeypatch.setattr(jit, "trace", lambda *_: None)
    with pytest.raises(Unsupported, match=rf"No space left.*{tmp_path}.*TILELANG_CACHE_DIR"):
        jit.compile(fake, Variant(K=1))


def test_a_dump_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "function_name", lambda *_: "sample")
    for _ in range(2):
        dump(Path("/proc/x"), module(), Variant(), "")
    (line,) = caplog.messages
    assert line.startswith("QLA_DUMP: [Errno 2] No such file or directory: '/proc/x")
    assert "; need /proc/x to be writable; set QLA_DUMP to" in line


def test_compile_all_keeps_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile(kernel: Any, variant: Variant) -> int:
        time.sleep(0.05 if variant.K == 1 else 0)  # the first to start is the last to finish
        return variant.K

    monkeypatch.setattr(jit, "compile", compile)
    jobs = [(module(), Variant(K=k)) for k in (1, 2, 3)]
    assert warmup.compile_all(jobs, workers=2) == [1, 2, 3]
    assert "3/3" in capsys.readouterr().err
    assert warmup.compile_all(jobs, progress=False) == [1, 2, 3]
    assert capsys.readouterr().err == ""
    assert warmup.compile_all([]) == []


def test_compile_all_stops_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def compile(kernel: Any, variant: Variant) -> None:
        started.append(variant.K)
        time.sleep(0.2 * bool(variant.K))  # 50 of them give a busy machine 10 s to notice
        raise RuntimeError("does not compile")

    monkeypatch.setattr(jit, "compile", compile)
    with pytest.raises(RuntimeError, match="does not compile"):
        warmup.compile_all([(module(), Variant(K=k)) for k in range(50)], workers=1, progress=False)
    assert len(started) < 50


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("tilelang", reason="compiles")
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("compiler")
def test_nvcc_flags_follow_pass_configs() -> None:
    plain = jit.nvcc_flags({})
    assert "-arch=sm_90a" in plain
    assert "--use_fast_math" not in plain
    configs = {
        "tl.enable_fast_math": True,
        "tl.ptxas_register_usage_level": 8,
        "tl.device_compile_flags": ["-DONE=1 -DTWO=2"],
    }
    added = set(jit.nvcc_flags(configs)) - set(plain)
    level = "--ptxas-options=--register-usage-level=8"
    assert added == {"--use_fast_math", level, "-DONE=1", "-DTWO=2"}


@pytest.mark.usefixtures("compiler")
def test_refuses_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jit.nvcc.cache_clear()
    monkeypatch.setattr(sys.modules["tilelang.env"], "CUDA_HOME", str(tmp_path))
    with pytest.raises(Unsupported, match=r"no nvcc at .*; need CUDA 12 or later; install the"):
        jit.nvcc()


def test_without_nvcc_all_its_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "tilelang_for", lambda _: None)
    nowhere = types.SimpleNamespace(CUDA_HOME="/nowhere")
    monkeypatch.setitem(sys.modules, "tilelang", types.ModuleType("tilelang"))
    monkeypatch.setitem(sys.modules, "tilelang.env", nowhere)
    with pytest.raises(Unsupported) as refused:
        jit.nvcc.__wrapped__()
    said, command = str(refused.value), 'pip install "nvidia-cuda-nvcc==13.0.*" "nvidia-'
    command = said[said.index(command) :]
    assert command.count("==13.0.*") == 5


@pytest.mark.usefixtures("compiler")
def test_assemble_reports_what_nvcc_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nvcc --cubin[\s\S]*no_such_type"):
        jit.assemble("no_such_type x;", {}, tmp_path)


COMPILE = """
import logging, sys, time
logging.basicConfig(stream=sys.stdout, format="%(name)s %(message)s")
logging.getLogger("qla_kernels").setLevel("INFO")
from qla_kernels.lab import warmup
from qla_kernels.runtime import jit
from tests.static import broken
kernel = broken.kernel()
(variant,) = kernel.module.VARIANTS
launch = jit.compile(kernel.module, variant)
assert launch is jit.compile(kernel.module, variant)
assert callable(launch)
"""


@pytest.mark.usefixtures("compiler")
def test_a_cache_filled_here_is_hit_elsewhere(tmp_path: Path) -> None:
    """The second process has another default target and no compilers, like a GPU machine's."""
    cache = str(tmp_path / "cache")
    dump = tmp_path / "dump"
    said = run(COMPILE, TILELANG_CACHE_DIR=cache, QLA_DUMP=str(dump))
    assert said.startswith("qla_kernels compiled broken in ")
    assert said.count("\n") == 1
    kept = {file.name for file in (dump / "broken").iterdir()}
    assert kept == {"schedule.md", "ptxas.txt", "kernel.cu", "kernel.cubin"}
    assert "registers" in (dump / "broken" / "ptxas.txt").read_text()
    assert "| upper | 0-3 |" in (dump / "broken" / "schedule.md").read_text()
    kernels = sorted(tmp_path.glob("cache/**/kernels/*"))
    assert len(kernels) == 1

    nowhere = str(tmp_path / "nowhere")
    elsewhere = {"TILELANG_DEFAULT_TARGET": "auto", "CUDA_HOME": nowhere, "PATH": nowhere}
    run(COMPILE, TILELANG_CACHE_DIR=cache, **elsewhere)
    assert sorted(tmp_path.glob("cache/**/kernels/*")) == kernels

    refused = "try:\n  " + COMPILE.strip().replace("\n", "\n  ")
    refused += "\nexcept ValueError as error:\n  print(type(error).__name__, error)"
    said = run(refused, TILELANG_CACHE_DIR=str(tmp_path / "empty"), **elsewhere)
    assert "Unsupported kernels: no nvcc at " in said


@pytest.mark.usefixtures("compiler")
def test_lower() -> None:
    from tests.static import broken

    kernel = broken.kernel()
    lowered = jit.lower(kernel, broken.Variant())
    assert lowered.function == "broken_kernel"
    assert lowered.threads == 384
    assert lowered.dyn_smem == 81_920
    assert "wgmma" in lowered.source


def test_log_line_names_the_variant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per compile, none for a kernel that is already there."""
    given: list[object] = []
    library = types.SimpleNamespace(get_function=lambda name, query_imports: given.append)
    adapter = types.SimpleNamespace(get_exportable_executable=lambda: library)
    tilelang = types.SimpleNamespace(
        compile=lambda *_, **__: types.SimpleNamespace(adapter=adapter, get_kernel_source=str)
    )
    monkeypatch.setitem(sys.modules, "tilelang", tilelang)
    monkeypatch.delenv("QLA_DUMP", raising=False)
    fake = module()
    prim_func = types.SimpleNamespace(params=[], buffer_map={})
    fake.PASS_CONFIGS = {}
    monkeypatch.setattr(jit, "trace", lambda *_: prim_func)
    with caplog.at_level(logging.INFO, logger="qla_kernels"):
        launch = jit.compile(fake, Variant())
        assert jit.compile(fake, Variant()) is launch
    launch("x")
    assert given == ["x"]
    (line,) = caplog.messages
    assert line.startswith("compiled gdn.kkt_solve-bf16-k128 in ")
