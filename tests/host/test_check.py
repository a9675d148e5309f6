"""One command checks one kernel."""

import re
from pathlib import Path

import pytest
import torch

from qla_kernels import check, jit, selftest

EMULATED = Path(__file__).parents[1] / "emulated"


def test_every_kernel_has_emulated_cases_and_a_selftest() -> None:
    texts = "".join(file.read_text() for file in EMULATED.glob("test_*.py"))
    marks = re.findall(r"mark\.kernels\(([^)]*)\)", texts)
    marked = {name for mark in marks for name in re.findall(r'"([\w.]+)"', mark)}
    known = {".".join(names) for names in jit.kernel_names()}
    assert marked == known
    assert set(selftest.KERNELS) == known


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gdn.fused"], r"no kernel 'gdn.fused'; need one of attn.delta"),
        (
            ["gdn.gate", "--variant", "k64"],
            r"no variant 'k64'; need one of \['fp32', 'bf16', 'fp16'\]",
        ),
    ],
)
def test_what_is_not_there_is_named(arguments, said, capsys) -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    assert check.main(arguments) == 2
    assert re.search(said, capsys.readouterr().err)


def test_it_says_what_it_ran(capsys) -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    status = check.main(["gdn.chunk_table", "--variant", "i32"])
    said = capsys.readouterr().out
    assert status == 0, said
    *_, inspect, emulated, own = said.splitlines()
    assert re.match(r"ok +inspect gdn.chunk_table i32, \d+ s", inspect)
    assert re.match(r"ok +pytest tests/emulated --kernel=gdn.chunk_table --variant=i32, ", emulated)
    ran = torch.cuda.is_available()
    assert re.match(rf"{'ok' if ran else 'NOT RUN'} +selftest gdn.chunk_table, ", own)


def test_a_failure_is_its_exit_status(monkeypatch, capsys) -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    failed = check.Outcome("pytest tests/emulated", 1, 2.0, "assert 1 == 2")
    monkeypatch.setattr(check, "check", lambda *_: [failed])
    assert check.main(["gdn.gate"]) == 1
    assert capsys.readouterr().out.endswith("FAILED  pytest tests/emulated, 2 s\n")
