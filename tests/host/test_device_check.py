"""device_check's verdicts, on a machine that has no GPU to check."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qla_kernels.runtime import device
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """scripts/device_check.py as a module, with its logs and records in a folder of the test's."""
    spec = importlib.util.spec_from_file_location("device_check", ROOT / "scripts/device_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "device_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "CHECKS", tmp_path / "results" / "checks.jsonl")
    module.LOGS.mkdir()
    return module


def prints(check, output: str, code: int = 0, **fields):
    """A step that prints this and ends with this exit code."""
    command = [sys.executable, "-c", f"print({output!r}); raise SystemExit({code})"]
    counts = fields.pop("counts", lambda said: check.found_in(said, r"(?P<things>\d+) things"))
    return check.Step("some step", HANG, command, counts, **fields)


def test_a_step_that_did_its_work_is_ok(check):
    outcome = check.run(prints(check, "did 3 things"), remaining=HANG)
    assert (outcome.status, outcome.counts, outcome.detail) == ("ok", {"things": 3}, "")
    assert "3 things" in str(outcome)


def test_an_exit_code_a_bad_count_or_no_count_fail(check):
    for step in (
        prints(check, "did 3 things", code=1),
        prints(check, "did 3 things", passed=lambda counts: counts["things"] > 3),
        prints(check, "did nothing"),
    ):
        outcome = check.run(step, remaining=HANG)
        assert outcome.status == "FAILED"
        assert outcome.detail.endswith("see logs/some_step.log")


def test_a_step_that_hangs_is_a_timeout(check):
    log = check.LOGS / "log"
    step = prints(check, "did 3 things")
    status, _, counts, _ = check.verdict(step, 124, "did 3 things", 1.0, log)
    assert (status, counts) == ("TIMEOUT", {"things": 3})


def test_a_tool_that_is_missing_or_cannot_work_here_is_not_a_failure(check):
    absent = check.Step("x", HANG, ["no-such-sanitizer"], lambda _: None)
    assert check.run(absent, HANG).status == "not run"
    refuses = prints(check, "Error: Device not supported", code=1)
    assert check.run(refuses, HANG).status == "not run"


def test_no_step_starts_without_time(check):
    assert check.run(prints(check, "did 3 things"), remaining=3).detail == "no time left"


def test_sanitizer_summaries_are_understood(check):
    memcheck, racecheck = (
        next(s for s in check.steps("gdn") if s.name == name) for name in ("memcheck", "racecheck")
    )
    clean, dirty = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 1 error"
    assert memcheck.passed(memcheck.counts(clean))
    assert not memcheck.passed(memcheck.counts(dirty))
    said = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    assert racecheck.counts(said) == {"hazards": 2}
    assert not racecheck.passed({"hazards": 2})


def test_test_counts_come_from_pytest(check, tmp_path):
    code = (
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\n"
    )
    (tmp_path / "test_it.py").write_text(code)
    junit = tmp_path / "tests.xml"
    assert check.test_counts(junit) is None
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
    ]
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    subprocess.run(
        [*command, "test_it.py"], cwd=tmp_path, env=own, capture_output=True, check=False
    )
    counts = check.test_counts(junit)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert not check.all_passed(counts)
    assert not check.all_passed({"passed": 0, "failed": 0, "skipped": 9})


def test_a_wrong_result_fails_the_benchmark(check, tmp_path):
    rows = [{"results": [{"status": "ok"}]}, {"results": [{"status": "wrong"}]}]
    file = tmp_path / "gdn.json"
    file.write_text(json.dumps({"rows": rows}))
    counts = check.benchmark_counts(file)
    assert counts == {"ok": 1, "wrong": 1}
    assert not check.all_timed(counts)
    assert check.all_timed({"ok": 1, "not applicable": 5})
    outcome = check.Outcome("benchmark", "FAILED", 1.0, counts)
    assert check.asdict(outcome)["counts"] == counts, "the record could not be written"


def test_every_family_has_device_tests(check, monkeypatch):
    monkeypatch.setattr(check, "ROOT", ROOT)
    for family in check.families():
        tests = next(step for step in check.steps(family) if step.name == "device tests")
        assert any(part.startswith(f"tests/device/test_{family}") for part in tests.command)


def test_without_a_hopper_gpu_it_says_what_it_needs(check, monkeypatch):
    monkeypatch.setattr(device, "available", lambda: False)
    assert check.no_hopper().startswith("device_check: torch sees no GPU; need an SM90 GPU")
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(device, "name", lambda _: "A100")
    monkeypatch.setattr(device, "capability", lambda _: (8, 0))
    assert "A100 has capability 8.0" in check.no_hopper()
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    assert check.no_hopper() is None


def test_the_whole_check_appends_a_record_and_fails_when_a_step_does(check, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["device_check.py", "gdn"])
    monkeypatch.setattr(check, "no_hopper", lambda: None)
    monkeypatch.setattr(check.records, "device_name", lambda _: "H200")
    monkeypatch.setattr(check.records, "device_environment", lambda _: {"driver": "580"})
    good, bad = prints(check, "did 3 things"), prints(check, "did nothing")
    monkeypatch.setattr(check, "steps", lambda _: [good])
    assert check.main() == 0
    monkeypatch.setattr(check, "steps", lambda _: [good, bad])
    assert check.main() == 1
    table = capsys.readouterr().out.splitlines()[-3:-1]
    assert [line.split()[2] for line in table] == ["ok", "FAILED"]
    first, second = map(json.loads, check.CHECKS.read_text().splitlines())
    assert (first["kind"], first["family"], first["device"]) == ("check", "gdn", "H200")
    assert first["fingerprint"] == second["fingerprint"]
    assert [step["status"] for step in second["steps"]] == ["ok", "FAILED"]


def test_a_check_that_is_ended_from_outside_keeps_its_steps(check, monkeypatch, capsys):
    """It lost them: a step at the end took longer than the machine was had for."""
    monkeypatch.setattr(sys, "argv", ["device_check.py", "gdn"])
    monkeypatch.setattr(check, "no_hopper", lambda: None)
    monkeypatch.setattr(check.records, "device_name", lambda _: "H200")
    monkeypatch.setattr(check.records, "device_environment", lambda _: {})
    before = signal.getsignal(signal.SIGTERM)
    good, last = prints(check, "did 3 things"), prints(check, "did 3 things")
    found = [good, dataclasses.replace(last, name="last"), dataclasses.replace(last, name="never")]
    monkeypatch.setattr(check, "steps", lambda _: found)
    run = check.run

    def ended(step, remaining):
        if step.name == "last":
            signal.raise_signal(signal.SIGTERM)
        return run(step, remaining)

    monkeypatch.setattr(check, "run", ended)
    try:
        with pytest.raises(SystemExit):
            check.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    (kept,) = map(json.loads, check.CHECKS.read_text().splitlines())
    assert [step["status"] for step in kept["steps"]] == ["ok", "TIMEOUT", "TIMEOUT"]
    assert "ended from outside" in capsys.readouterr().out
