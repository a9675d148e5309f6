"""The README keeps its promises: snippets run, files and names that it mentions exist."""

import re

import pytest

from tests.readme import ROOT, snippets

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", snippets(), ids=lambda code: code.splitlines()[0])
def test_snippet_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_first_snippet_is_short():
    assert len(snippets()[0].splitlines()) <= 12


def test_every_file_it_names_exists():
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    commands = re.findall(r"(?:bash|python) ((?:scripts|docs)/[\w./]+)", README)
    assert linked
    assert commands
    for name in (*linked, *commands):
        assert (ROOT / name).exists(), name


def test_environment_variables_are_those_the_code_reads():
    files = [f for f in (ROOT / "qla_kernels").rglob("*") if f.suffix in (".py", ".c")]
    code = "".join(file.read_text() for file in files)
    read = set(re.findall(r"\"(QLA_\w+)\"", code))
    assert set(re.findall(r"^\| `(QLA_\w+)`", README, re.M)) == read


def test_performance_section_has_its_markers():
    start, end = "<!-- performance:start -->", "<!-- performance:end -->"
    assert README.count(start) == README.count(end) == 1
    assert README.index(start) < README.index(end)
