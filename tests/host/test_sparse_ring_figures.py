"""The scripts behind docs/sparse_ring.md, on short heads; and that the document is theirs."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from qla_kernels.sparse_ring import VerticalSlash
from qla_kernels.sparse_ring.shapes import BLOCK

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "sparse_ring.md").read_text()


@pytest.fixture
def source(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("sparse_ring_heads")


@pytest.fixture
def figures(source):
    pytest.importorskip("matplotlib")
    return importlib.import_module("sparse_ring_figures")


def test_lines_of_a_head_hold_what_was_asked_of_the_window(source):
    elsewhere = []
    for head in source.heads(8192, random_rows=32):
        index = source.index_of(head, VerticalSlash(0.9, 0.9))
        window = source.recall(head, index, slice(0, BLOCK))
        assert window >= 0.9 - 1e-3
        assert window == pytest.approx(float(index.window_recall), abs=1e-3)
        elsewhere.append(source.recall(head, index, slice(BLOCK, None)))
    assert sum(elsewhere) / len(elsewhere) > 0.6  # one window sees the last rows only


def test_scores_depend_on_the_distance_and_on_outliers(source):
    """The mean of a head makes slashes: scores of pairs at one distance differ by noise alone."""
    rows = torch.tensor([2000, 4000])
    head = source.synthetic(4096, 0, 2.0, rows, outliers=0)
    S = head.scores(slice(None))
    near = torch.stack([S[n, row - 1000 : row + 1] for n, row in enumerate(rows.tolist())])
    assert torch.corrcoef(near)[0, 1] > 0.5


def test_lines_are_kept_as_they_were_chosen(source, tmp_path):
    lines = {"a": ([1, 5], [0, 3]), "b, 1.0": ([], [0])}
    source.save(tmp_path / "kept.npz", 640, lines)
    assert source.load(tmp_path / "kept.npz") == (640, lines)


def test_figures_of_a_dump(figures, source, tmp_path, monkeypatch, capsys):
    saved = {"q": torch.randn(4100, 2, 16), "k": torch.randn(4100, 1, 16)}
    torch.save(saved, tmp_path / "heads.pt")
    before = DOCUMENT
    monkeypatch.setattr(figures, "WORLDS", (4, 8, 16))
    monkeypatch.setattr(figures, "trade", figures.mask_picture)  # heads of 32K tokens
    arguments = ["-", "--dump", str(tmp_path / "heads.pt"), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert figures.main() == 0
    assert {f.stem for f in tmp_path.glob("*.svg")} == set(re.findall(r"sparse-ring-\w+", before))
    assert capsys.readouterr().out.count("| head ") == 2
    assert (ROOT / "docs" / "sparse_ring.md").read_text() == before


def test_the_documents_tables_are_current(figures, monkeypatch):
    """Imbalance of the committed lines for 4 to 128 ranks, and the published arithmetic."""
    monkeypatch.setattr("sys.argv", ["-", "--check"])
    assert figures.main() == 0
    assert "| forward | 34.10 | 19.53 | 42.7% |" in DOCUMENT


def test_a_stale_table_is_exchanged(figures):
    tables = {"links": figures.links()[1]}
    stale = DOCUMENT.replace("| 34.10 |", "| 34.11 |")
    assert figures.replaced(stale, tables) == DOCUMENT != stale


def test_the_documents_figures_and_code_exist():
    for name in re.findall(r"\(figures/([\w.-]+)\)", DOCUMENT):
        assert (ROOT / "docs" / "figures" / name).exists(), name
    for code in re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.M | re.S):
        compile(code, "docs/sparse_ring.md", "exec")
