"""Compiling ahead of time: the right variants, and a clean end whatever happens."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from qla_kernels.lab import warmup
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt, sources
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


def labels(models=()) -> list[str]:
    return [jit.label(*job) for job in warmup.jobs(models)]


def test_without_a_model_every_variant_is_compiled():
    every = [jit.label(k.module, v) for k in jit.kernel_modules() for v in k.module.VARIANTS]
    assert labels() == every


def test_families_can_be_named():
    """A page told to, and there was no such argument."""
    found = [jit.label(*job) for job in warmup.jobs((), ["dualkv"])]
    assert {label.partition(".")[0] for label in found} == {"attn", "dualkv", "head"}
    assert "dualkv.fwd-bf16-d128" in found
    found = [jit.label(*job) for job in warmup.jobs((), ["conv"])]
    assert {label.partition(".")[0] for label in found} == {"conv"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["dual"], "dual; need families of attn, conv"),
        (["conv", "--model", "qwen3-next"], "one of"),
    ],
)
def test_what_is_no_family_is_named(given, said, capsys):
    with pytest.raises(SystemExit):
        warmup.main([*given, "--list"])
    assert said in capsys.readouterr().err


def test_a_model_needs_its_own_dtype_and_head_size():
    found = labels([warmup.MODELS["qwen3-next"]])
    assert "gdn.kkt_solve-bf16-k128" in found
    assert not [label for label in found if "fp16" in label or "k64" in label]


def test_a_model_needs_what_shared_prompts_run():
    """Tables, trees, the convolution and attention were compiled in the first step once."""
    found = labels([warmup.MODELS["qwen3-next"]])
    for label in (
        "gdn.chunk_table-i32", "gdn.segment_plan-i32", "gdn.child_sums-fp32", "gdn.gate-fp32",
        "conv.fwd-bf16-w4", "conv.bwd-bf16-w4", "conv.join_parts-bf16", "conv.weight_sums-w4",
        "dualkv.fwd-bf16-d256", "dualkv.bwd_dq-bf16-d256", "dualkv.bwd_dkv_wide-bf16-d256",
        "dualkv.dkv_combine-bf16-wide", "attn.delta-bf16-wide",
    ):  # fmt: skip
        assert label in found
    assert len([label for label in found if label.startswith(("dualkv.", "attn."))]) == 5
    assert not [label for label in found if label.startswith("sparse_ring") or "w3" in label]


@pytest.mark.parametrize("name", warmup.MODELS)
def test_every_model_needs_something_and_shards(name):
    assert labels([warmup.MODELS[name]])
    half = warmup.sharded(name, 2)
    assert 2 * half.value_heads == warmup.MODELS[name].value_heads


def test_models_share_what_they_have_in_common():
    qwen = [model for name, model in warmup.MODELS.items() if name.startswith("qwen")]
    assert labels(qwen) == labels([warmup.MODELS["qwen3-next"]])


def test_list_compiles_nothing(monkeypatch, capsys):
    monkeypatch.setattr(warmup, "compile_all", lambda *_: pytest.fail("compiled"))
    assert warmup.main(["--in-process", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == labels()


@pytest.mark.parametrize("tp", ["0", "3", "32"])
def test_heads_that_do_not_divide_are_refused(tp, capsys):
    assert warmup.main(["--in-process", "--list", "--model", "qwen3-next", "--tp", tp]) == 1
    assert f"--tp {tp}; need whole key heads a GPU" in capsys.readouterr().err


def test_a_missing_compiler_is_said_in_one_line(monkeypatch, capsys):
    def compile_all(found, workers):
        raise Unsupported("qla_kernels.runtime.jit: no nvcc; need nvcc; install it")

    monkeypatch.setattr(warmup, "compile_all", compile_all)
    assert warmup.main(["--in-process"]) == 1
    assert capsys.readouterr().err == "qla_kernels.runtime.jit: no nvcc; need nvcc; install it\n"


def test_a_damaged_file_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernels-13.zip").write_bytes(b"cut off")
    (tmp_path / prebuilt.LAUNCHER).touch()
    monkeypatch.setenv("QLA_PREBUILT", str(tmp_path))
    assert warmup.main(["--in-process"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("qla_kernels: cannot read its manifest")
    assert said.count("\n") == 1


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_ctrl_c_ends_it_cleanly(tmp_path, seconds):
    """As a terminal does it: a signal to the process group, in the middle of a compile."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qla_kernels", "warmup", "--model", "qwen3-next"],
        cwd=ROOT,
        env=os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
        # what a shell runs in the background ignores it, and so would this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    said = process.stderr.read(1)  # the progress bar: compiling has begun
    time.sleep(seconds)
    finished = set(tmp_path.glob("**/kernels/*"))
    os.killpg(process.pid, signal.SIGINT)
    said += process.communicate(timeout=HANG)[1]
    assert process.returncode == warmup.INTERRUPTED, said.decode()
    assert f"stopped; finished kernels are in {tmp_path}" in said.decode()
    assert b"Traceback" not in said
    assert set(tmp_path.glob("**/kernels/*")) == finished  # nobody waited for a compiler


def test_a_time_limit_ends_compilers_too(monkeypatch, capsys):
    """SIGTERM once ended this process alone, and its compilers went on."""

    class Running:
        pid, waits = 12345, 0

        def wait(self) -> int:
            self.waits += 1
            if self.waits == 1:
                signal.raise_signal(signal.SIGTERM)
            return 0

    def unexpected(*_: object) -> None:
        raise AssertionError("SIGTERM went to whoever was there before")

    ended, before = [], signal.signal(signal.SIGTERM, unexpected)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: Running())
    monkeypatch.setattr(os, "killpg", lambda *args: ended.append(args))
    try:
        assert warmup.run_apart([]) == warmup.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [(12345, signal.SIGTERM)]
    assert "stopped; finished kernels are in" in capsys.readouterr().err


@pytest.fixture
def two_prebuilt(tmp_path, monkeypatch):
    """A kernel file of two variants, as `prebuilt.in_use` returns it; and what is compiled."""
    jobs = list(warmup.jobs())
    about = [
        {
            "digest": "",
            "launch": "",
            "sources": "edited",
            "code": sources.code(module.__name__) + "edited" * edited,
        }
        for (module, _), edited in zip(jobs, (0, 0, 1), strict=False)
    ]
    kernels = dict(zip(labels(), about, strict=False))
    with zipfile.ZipFile(tmp_path / "kernels.zip", "w") as contents:
        file = prebuilt.KernelFile(tmp_path / "kernels.zip", {"kernels": kernels}, contents)
    monkeypatch.setattr(prebuilt, "in_use", lambda: file)
    monkeypatch.setattr(prebuilt, "others", list)
    loaded, compiled = [], []
    monkeypatch.setattr(jit, "compile", lambda *job: loaded.append(jit.label(*job)))
    monkeypatch.setattr(warmup, "compile_all", lambda found, workers: compiled.extend(found))
    return loaded, compiled


def test_prebuilt_kernels_are_loaded_and_the_others_compiled(two_prebuilt, capsys):
    loaded, compiled = two_prebuilt
    assert warmup.main(["--in-process"]) == 0
    assert loaded == labels()[:2]
    assert [jit.label(*job) for job in compiled] == labels()[2:]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2 prebuilt kernels in ")
    assert said[0].endswith("kernels.zip")
    assert said[1].startswith(f"compiles {len(labels()) - 2} kernels, ")
    assert said[1].endswith(f" into {jit.cache_dir()}")
    assert said[2].startswith(f"{len(labels()) - 2} kernels compiled in ")


def test_the_list_marks_prebuilt_kernels(two_prebuilt, capsys):
    assert warmup.main(["--in-process", "--list"]) == 0
    marked = [f"{label} (prebuilt)" for label in labels()[:2]]
    assert capsys.readouterr().out.splitlines() == marked + labels()[2:]
    assert two_prebuilt == ([], [])
