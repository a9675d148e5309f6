"""Whole steps of trainers: what the script prints, and that ours finds the numbers of theirs."""

import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.harness import records

SCRIPT = Path(__file__).parents[2] / "scripts" / "trainer_steps.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("trainer_steps", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer_steps"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trainer_steps"]


def test_the_table_has_medians_ratios_and_how_far_losses_differ(script):
    ours = script.Steps("ours", [9.0, 8.0, 1.0, 3.0, 2.0], [5.0, 4.0], peak=3_000_000_000)
    theirs = script.Steps("theirs", [9.0, 9.0, 4.0], [5.0, 4.4])
    broken = script.Steps("broken", why="ImportError: no module")
    header, *lines = script.table([ours, theirs, broken]).splitlines()
    assert "a step, s" in header
    assert lines[0].split() == ["ours", "2.0000", "1.00", "3.0", "0.0e+00"]
    assert lines[1].split() == ["theirs", "4.0000", "2.00", "0.0", "1.0e-01"]
    assert lines[2].split(maxsplit=1) == ["broken", "ImportError: no module"]


def test_a_way_that_fails_says_why_and_the_others_go_on(script, capsys):
    def fails(found):
        raise ImportError("no module\nmore")

    found = script.timed(script.Steps("x"), fails)
    assert (found.why, found.median) == ("ImportError: no module", None)
    assert "x: [] s, ImportError: no module" in capsys.readouterr().out


def test_a_few_steps_of_a_small_model_have_the_same_losses(script, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers", minversion="5.15")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")  # the script sets it for the process
    known, record = [], script.record
    monkeypatch.setattr(script, "record", lambda x, found: known.extend(found) or record(x, found))
    options = ["finetune", "--tiny", "--steps", "3", "--ways", "ours,PyTorch"]
    assert script.main([*options, "--out", str(tmp_path / "it.json")]) == 0
    capsys.readouterr()
    run = records.read(tmp_path / "it.json")
    (row,) = run.rows
    assert (run.family, row.name) == ("trainer", "trainer-finetune-tiny-64x1")
    ours, theirs = row.results
    assert [x.status for x in row.results] == ["ok", "ok"]
    assert ours.eager_ms > 0
    assert ours.eager_samples == 1
    assert theirs.errors["loss"] < 1e-4
    assert known[0].losses == pytest.approx(known[1].losses, rel=1e-4)
    assert known[0].losses[0] != known[0].losses[-1]
    assert "### step of the Trainer" in tables.page(run)
