"""The script behind the figures of docs/notes/gdn-segments.md, on short sequences."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.records import OK, Result, Row

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("gdn_segment_figures")


def test_windows_are_as_long_as_gates_make_them(figures):
    """12 / 0.02 is 600 tokens, and 10 chunks; 20 / 0.02 is 1000, and 16; never, for no decay."""
    g = torch.full((2048, 2), -0.02)
    g[:, 1] = 0
    assert figures.windows(g, -12.0) == [640, math.inf]
    assert figures.windows(g, -20.0) == [1024, math.inf]


def test_a_models_gates_are_between_keeping_all_and_forgetting_all(figures):
    mean = figures.initial_gates(512).mean(0)
    assert mean.max() > -0.01
    assert mean.min() < -0.5


def row(kind, heads="2/8", tokens=2048, **times):
    results = tuple(Result(name, OK, p50_ms=ms) for name, ms in times.items())
    name = f"{kind} {heads} {tokens}"
    return Row(name, "gdn", kind, heads, f"1x{tokens}", tokens, results=results)


def test_directions_may_come_from_different_runs_of_a_day(figures, monkeypatch):
    forward, backward = (row(kind, ours=1.0, ours_whole=2.0) for kind in ("fwd", "bwd"))
    slower = row("fwd", ours=1.5, ours_whole=2.0)

    def run(day, *rows, device="H200"):
        return SimpleNamespace(device=device, date=f"2026-11-{day}T02:17:33+00:00", rows=rows)

    old = [run(21, backward), run(22, backward, device="H100"), run(22, slower)]
    for newer, drawn in (
        ([run(22, forward), run(22, row("bwd", ours=1.0))], [forward]),
        ([run(22, forward), run(22, backward)], [backward, forward]),
        ([run(22, backward, forward)], [backward, forward]),
    ):
        monkeypatch.setattr(figures, "load", lambda runs=(*old, *newer): runs)
        assert sorted(figures.newest_rows(), key=lambda row: row.kind) == drawn


def test_figures_are_drawn(figures, tmp_path, monkeypatch):
    rows = [
        row(kind, heads, tokens, ours=1.0, ours_whole=whole)
        for kind, heads in (("fwd", "2/8"), ("fwd", "4/16"), ("bwd", "2/4"))
        for tokens, whole in ((2048, 1.0), (8192, 2.0))
    ]
    monkeypatch.setattr(figures, "newest_rows", lambda: rows)
    monkeypatch.setattr("sys.argv", ["", "--tokens", "1024", "--out", str(tmp_path)])
    assert figures.main() == 0
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(drawn) == {"gdn-segment-windows.svg", "gdn-segment-gain.svg"}
    assert all(heads in drawn["gdn-segment-gain.svg"] for heads in ("2/8", "4/16", "2/4"))


def test_a_figure_without_a_record_is_left_as_it_is(figures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "newest_rows", list)
    monkeypatch.setattr("sys.argv", ["", "--tokens", "1024", "--out", str(tmp_path)])
    figures.main()
    assert [file.name for file in tmp_path.iterdir()] == ["gdn-segment-windows.svg"]
    assert "ours_whole" in capsys.readouterr().err
