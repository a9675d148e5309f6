"""One command checks one kernel."""

import re

import pytest
import torch

from qla_kernels.lab import check, selftest
from qla_kernels.lab.selftest.cases import checked
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime import jit
from tests import launched


def test_every_kernel_has_cases() -> None:
    """In the one table that self-test, emulated tier and device tier run."""
    covered = {kernel for cases in selftest.CASES for kernel in cases.kernels}
    assert covered == {".".join(names) for names in jit.kernel_names()}


def test_some_variant_of_every_case_is_emulated() -> None:
    for cases in selftest.CASES:
        ids = {jit.variant_id(variant) for variant in cases.variants()}
        assert set(ids if cases.emulated is None else cases.emulated) & ids, cases.kernels
        assert set(cases.emulated or ()) <= ids, cases.kernels


def test_parts_of_a_family_are_the_whole_family_and_others_are_refused():
    whole = selftest._chosen("gdn", "")
    parts = [launch for n in range(1, 5) for launch in selftest._chosen("gdn", f"{n}/4")]
    assert len(parts) == len(whole)
    assert all(launch in whole for launch in parts)
    assert {cases.kernels[0].partition(".")[0] for cases, _ in whole} == {"gdn"}
    for name, which in (("gdn", "5/4"), ("gdn", "0/4"), ("gdn", "half"), ("gdm", "")):
        with pytest.raises(
            ValueError, match=rf"{name} ?{which} has no cases; need a family of gdn"
        ):
            selftest.run(name, which)


def test_a_wrong_case_fails_and_a_right_one_passes() -> None:
    def check(limit: float, given: float) -> None:
        assert_close("x", torch.tensor([given]), torch.tensor([1.0]), limit)

    assert checked("right", check, 1e-3, 1.0) == selftest.Result("right", True)
    for wrong in (1.1, float("nan")):
        result = checked("wrong", check, 1e-3, wrong)
        assert result.passed is False
        assert result.note.startswith("x: ")


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
    status = check.main(["gdn.chunk_table", "--variant", "i32", "--budget", "4"])
    said = capsys.readouterr().out
    assert status == 0, said
    *_, inspect, emulated, own = said.splitlines()
    assert re.match(r"ok +inspect gdn.chunk_table i32, \d+ s", inspect)
    assert re.match(r"ok +pytest tests/emulated --kernel=gdn.chunk_table --variant=i32, ", emulated)
    ran = torch.cuda.is_available()
    assert re.match(rf"{'ok' if ran else 'NOT RUN'} +selftest gdn.chunk_table i32, ", own)


def test_a_failure_is_its_exit_status(monkeypatch, capsys) -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    failed = check.Outcome("pytest tests/emulated", 1, 2.0, "assert 1 == 2")
    monkeypatch.setattr(check, "check", lambda *_: [failed])
    assert check.main(["gdn.gate"]) == 1
    assert capsys.readouterr().out.endswith("FAILED  pytest tests/emulated, 2 s\n")


def test_what_is_past_the_budget_is_named(capsys) -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    status = check.main(["gdn.chunk_table", "--variant", "i32", "--budget", "0"])
    said = capsys.readouterr().out
    assert status == 0, said
    names = re.findall(r"^LEFT OUT tests/emulated/(\S+)", said, re.MULTILINE)
    assert "test_cases.py::test_case[gdn.chunk_table-i32]" in names
    assert re.search(rf"^ok +pytest .*, {len(names)} tests left out, \d+ s$", said, re.MULTILINE)


def test_every_kernel_has_emulated_tests_on_record() -> None:
    found = {kernel for row in launched.on_record().values() for kernel in row.kernels}
    assert found >= {".".join(names) for names in jit.kernel_names()}
    tests = [name for name, row in launched.on_record().items() if "gdn.fused_fwd" in row.kernels]
    assert any(name.startswith("test_gdn_forward.py::test_interleavings") for name in tests)
