"""Rules of CONTRIBUTING.md that a program can check: sizes, imports, names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    file
    for folder in ("qla_kernels", "reference", "benchmarks", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)
KERNELS = [file for file in SOURCES if file.parent.name == "kernels"]


def named(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda f: f.relative_to(ROOT).as_posix())


def imports(file: Path) -> Iterator[str]:
    """The modules a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def packages(file: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(file)}


@named(SOURCES)
def test_a_file_can_be_read_in_one_sitting(file):
    lines = len(file.read_text().splitlines())
    assert lines <= (450 if file in KERNELS else 300)


@named(SOURCES)
def test_a_file_is_named_after_a_concept(file):
    assert not {file.stem, *file.relative_to(ROOT).parts} & {"utils", "common", "base", "core"}


@named([file for file in SOURCES if "reference" in file.parts])
def test_the_reference_stands_alone(file):
    assert not packages(file) & {"qla_kernels", "benchmarks", "tests", "tilelang"}


@named([file for file in SOURCES if "qla_kernels" in file.parts])
def test_the_package_imports_neither_tests_nor_benchmarks(file):
    assert not packages(file) & {"benchmarks", "tests", "scripts"}


@named([*KERNELS, *(file for file in SOURCES if file.parent.name == "tile")])
def test_device_code_knows_no_torch_and_no_host_code(file):
    assert "torch" not in packages(file)
    ours = {module for module in imports(file) if module.startswith("qla_kernels.")}
    hosts = ("api", "ops", "launch", "validate", "cpu", "jit", "device", "varlen")
    assert not {module for module in ours if module.rpartition(".")[2] in hosts}


@named([file for file in SOURCES if "qla_kernels" in file.parts])
def test_families_do_not_import_each_other(file):
    families = {folder.parent.name for folder in (ROOT / "qla_kernels").glob("*/kernels")}
    own = file.relative_to(ROOT / "qla_kernels").parts[0]
    if own in families:
        used = {module.split(".")[1] for module in imports(file) if "qla_kernels." in module}
        assert not used & (families - {own, "attn"})  # what attention families share
