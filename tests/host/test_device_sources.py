"""Sources of kernels: what makes results repeat, where parities are computed, what imports what."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "qla_kernels"
KERNELS = [file for file in PACKAGE.rglob("*.py") if "kernels" in file.parent.parts]
DEVICE = [*KERNELS, *(PACKAGE / "tile").glob("*.py"), *PACKAGE.rglob("*.cuh")]

# Float atomics add in any order, so a result would not repeat bit for bit.
FLOAT_ATOMICS = {"dualkv/kernels/bwd.py"}  # a caller can choose two passes without them
INTEGER_ATOMICS = {"dualkv/kernels/items.py", "sparse_ring/kernels/select_lines.py"}
# Parities of barriers that belong to no ring.
PARITIES = {
    "dualkv/kernels/walk.py",  # the front of a run: the warp that fills it waits for it
    "gdn/kernels/chain/transfer.py",  # the tail of a sequence, likewise
    "gdn/kernels/chunk_grads/layout.py",
    "gdn/kernels/wide_grads/layout.py",
    "sparse_ring/kernels/window_mass.py",  # turns of the warpgroups
    "tile/ring.py",
}


def code(file: Path) -> str:
    """Returns a source without comments and docstrings."""
    if file.suffix != ".py":
        return re.sub(r"//.*", "", file.read_text())
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def files_with(pattern: str) -> set[str]:
    matching = (file for file in DEVICE if re.search(pattern, code(file)))
    return {file.relative_to(PACKAGE).as_posix() for file in matching}


def test_atomics_are_where_they_are_known_to_be():
    pattern = r"\batomic_\w+|\batomic[A-Z]\w+|tma_store_(add|reduce)|\bred\.|\bcp\.reduce"
    assert files_with(pattern) == FLOAT_ATOMICS | INTEGER_ATOMICS


def test_parities_come_from_rings():
    """A barrier that completes once is waited for with a number."""
    assert files_with(r"(?m)barrier_wait\((?!.*, \d\)$)") == PARITIES


def imports(file: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("reference", {"qla_kernels", "benchmarks", "tests", "tilelang"}),  # the definition
        ("qla_kernels", {"benchmarks", "tests", "scripts"}),  # a wheel has none of them
    ],
)
def test_a_package_stands_alone(folder, forbidden):
    for file in (ROOT / folder).rglob("*.py"):
        assert not {name.partition(".")[0] for name in imports(file)} & forbidden, file
