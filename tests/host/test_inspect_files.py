"""`python -m qla_kernels inspect my_kernel.py`: kernels that are not of this package."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qla_kernels.lab.inspect import Facts, RoleFacts, check
from qla_kernels.lab.inspect import command as inspector
from qla_kernels.runtime.compiler import INSTALL
from qla_kernels.tile.schedule import Role, Schedule

KERNEL = """
from typing import NamedTuple
from qla_kernels.tile.schedule import Role, Schedule

class Variant(NamedTuple):
    dtype: str
    N: int

VARIANTS = Variant("bfloat16", 64), Variant("float16", 128)

def schedule(variant):
    return Schedule(roles=(Role("add", warps=8, regs=32, computes="y"),))
"""


def test_a_file_with_a_kernel_is_inspected(tmp_path, monkeypatch, capsys):
    """It once said `no variant matches`, with a list of this package's kernels."""
    file = tmp_path / "my_gemm.py"
    file.write_text(KERNEL + "def build(variant): raise AssertionError")
    seen = []

    def facts(kernel: Any, variant: Any, keep: Path | None) -> Any:
        seen.append((str(kernel), kernel.module.PASS_CONFIGS, variant.N))
        return SimpleNamespace()

    monkeypatch.setattr(inspector, "facts", facts)
    monkeypatch.setattr(inspector, "check", lambda found, schedule: [f"{len(schedule.roles)} role"])
    monkeypatch.setattr(inspector, "asdict", lambda found: {})
    monkeypatch.setattr(inspector, "_report", lambda name, *_: [name])
    assert inspector.main([str(file)]) == 1
    assert seen == [("my_gemm", {}, 64), ("my_gemm", {}, 128)]
    assert capsys.readouterr().out == "my_gemm-bf16-n64\nmy_gemm-fp16-n128\n"
    assert inspector.main([str(file), "--variant", "n128"]) == 1
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no file {}; need one; check the path"),
        (KERNEL, "{} without build; need VARIANTS, schedule and build; see python -m"),
    ],
)
def test_a_file_that_is_no_kernel_is_refused(tmp_path, capsys, text, said):
    file = tmp_path / "other.py"
    if text is not None:
        file.write_text(text)
    assert inspector.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith("inspect: " + said.format(file))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            "def build(variant):\n    return variant.rows",
            "line 14: building my_gemm-bf16-n64 raises AttributeError: 'Variant' object has no",
        ),
        ("VARIANTS = 1 // 0", "line 13: importing it raises ZeroDivisionError: "),
    ],
)
def test_a_file_whose_code_raises_is_named_with_its_line(
    tmp_path, capsys, monkeypatch, build, said
):
    monkeypatch.setattr(inspector, "facts", lambda kernel, v, keep: kernel.module.build(v))
    file = tmp_path / "my_gemm.py"
    file.write_text(KERNEL + build)
    assert inspector.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"inspect: {file}, {said}")


def test_a_schedule_that_cannot_run_is_said(tmp_path, capsys):
    file = tmp_path / "my_gemm.py"
    file.write_text(KERNEL.replace("warps=8", "warps=0") + "def build(variant): ...")
    assert inspector.main([str(file)]) == 2
    assert "raises ValueError: role add: 0 warps; need at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", ["gdn.l2norm", "my_gemm.py"])
def test_without_tilelang_it_says_what_is_missing(kernel, tmp_path, monkeypatch, capsys):
    """It was a traceback for kernels of this package, and a mistake of the file for others."""
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.chdir(tmp_path)
    Path("my_gemm.py").write_text(KERNEL + "def build(variant): import tilelang")
    assert inspector.main([kernel]) == 2
    said = capsys.readouterr().err
    assert said.startswith("qla_kernels.lab.inspect: tilelang cannot be imported (")
    assert said.endswith(f"; need TileLang 0.1.13 or newer; {INSTALL}\n")


def test_barriers_of_other_names_are_one_violation():
    """They were a dozen, none of which said that a variable's name counts."""
    roles = (
        Role("take", warps=1, regs=32, waits=("x_full",), signals=("x_free",)),
        Role("load", warps=1, regs=32, waits=("x_free",), signals=("x_full",)),
    )
    plan = Schedule(roles=roles, rings={"x": 2})

    def said(full, free):
        found = {
            "take": RoleFacts({full: 32}, {free: 32}, []),
            "load": RoleFacts({free: 32}, {full: 32}, []),
        }
        barriers = {full: [32, 32], free: [32, 32]}
        sizes = (64, 32, 0, 0, 0, 0, 0)  # threads, registers, stack, spills, shared memory
        return check(Facts("mine", "mine", *sizes, barriers, found, {}, {}, [], [], []), plan)

    assert said("x_full", "x_free") == []
    (one,) = said("full", "free")
    assert one.startswith("barriers: the code has free, full, the schedule x_full, x_free; the var")
    (one,) = said("x_full", "empty")
    assert one.startswith("barriers: the code has empty, the schedule x_free; the variable that")
