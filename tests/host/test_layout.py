"""Rules of CONTRIBUTING.md that a program can check: sizes, imports, names."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    file
    for folder in ("qla_kernels", "reference", "benchmarks", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)
PACKAGE = ROOT / "qla_kernels"
KERNELS = [file for file in SOURCES if "kernels" in file.parent.parts]  # and what they share
TILE = [file for file in SOURCES if file.parent == PACKAGE / "tile"]
# what knows TileLang besides: how it compiles, and the tools around that
COMPILING = {"jit.py", "build.py", "warmup.py", "info.py", "inspect", "check.py", "emulator"}
COMPILING |= {"shared_memory.py"}


def named(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda f: f.relative_to(ROOT).as_posix())


@cache
def imports(file: Path) -> list[str]:
    """The modules a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module)
    return found


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def packages(file: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(file)}


@named(SOURCES)
def test_a_file_can_be_read_in_one_sitting(file):
    """Docstrings do not count: none is to be cut for its length."""
    text = file.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in ast.walk(parsed(file)) if isinstance(node, documented))
    docstrings = (ast.get_docstring(node, clean=False) or "" for node in nodes)
    lines = len(text.splitlines()) - sum(doc.count("\n") for doc in docstrings)
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


@named([*KERNELS, *TILE])
def test_device_code_knows_no_torch_and_no_host_code(file):
    """It imports device code, and sizes that it shares with the host: nothing that knows torch."""
    assert not packages(file) & {"torch", "numpy", "einops"}
    ours = {module for module in imports(file) if module.startswith("qla_kernels")}
    device = re.compile(r"qla_kernels\.(tile|\w+\.kernels|\w+\.shapes)(\.|$)")
    assert not {module for module in ours if not device.match(module)}


@named([file for file in SOURCES if file.name == "shapes.py"])
def test_shared_sizes_import_nothing(file):
    assert not set(imports(file))


@named([file for file in SOURCES if PACKAGE in file.parents])
def test_tilelang_is_imported_by_what_compiles(file):
    """Kernel files have it by tile/language.py, when they are traced."""
    if file.relative_to(PACKAGE).parts[0] not in COMPILING:
        assert not packages(file) & {"tilelang", "tvm", "tvm_ffi"}


def test_only_device_code_is_exempt_from_lint_and_types():
    """A list of file names once hid dualkv/tables.py, which shared its name with a device file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    overrides = settings["mypy"]["overrides"]
    exempt = [m for o in overrides if o.get("ignore_errors") for m in o["module"]]
    assert exempt == ["qla_kernels.*.kernels.*", "qla_kernels.tile.*"]
    lint = [p for p in settings["ruff"]["lint"]["per-file-ignores"] if p.startswith("qla_kernels")]
    assert lint == ["qla_kernels/*/kernels/**", "qla_kernels/tile/*"]


@named([file for file in SOURCES if "qla_kernels" in file.parts])
def test_families_do_not_import_each_other(file):
    families = {folder.parent.name for folder in (ROOT / "qla_kernels").glob("*/kernels")}
    own = file.relative_to(ROOT / "qla_kernels").parts[0]
    if own in families:
        used = {module.split(".")[1] for module in imports(file) if "qla_kernels." in module}
        assert not used & (families - {own, "attn"})  # what attention families share


MAP = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms\n")[1].split("\n## ")[0]
FOLDERS = re.split(r"\*\*`([\w/]+)/`\*\*", MAP)[1:]


@pytest.mark.parametrize(("folder", "said"), list(zip(FOLDERS[::2], FOLDERS[1::2], strict=True)))
def test_the_map_names_every_file_once(folder, said):
    """docs/architecture.md, section Rooms."""
    suffixes = {".py", ".cuh", ".json", ".typed"}
    here = [file.name for file in (ROOT / folder).iterdir() if file.suffix in suffixes]
    assert sorted(re.findall(r"`(\w+\.\w+)`", said)) == sorted({*here} - {"__init__.py"})


def test_the_map_has_every_folder_that_host_code_lies_in():
    families = {folder.parent for folder in PACKAGE.glob("*/kernels")}
    inside = {f.parent for family in families for f in family.rglob("*.py")}
    rooms = {PACKAGE, PACKAGE / "tile", PACKAGE / "hybrid", *inside} - {f.parent for f in KERNELS}
    assert {ROOT / folder for folder in FOLDERS[::2]} == rooms


def test_the_map_names_the_parts_of_each_kernel():
    """docs/architecture.md, device code of gdn: the files of the family that a kernel imports."""
    table = MAP.split("**Device code of gdn.**")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.M)
    said = {kernel: set(re.findall(r"`([\w/]+)`", parts)) for kernel, parts in rows}
    device, found = PACKAGE / "gdn" / "kernels", {}
    for file in device.rglob("*.py"):
        if "\ndef build(" in file.read_text():
            folder = file.parent if file.stem == "__init__" else None
            kernel, files = (folder.name, {*folder.glob("*.py")}) if folder else (file.stem, {file})
            used = {m for f in files for m in imports(f) if m.startswith("qla_kernels.gdn.kernels")}
            parts = {"/".join(module.split(".")[3:]) for module in used}
            parts |= {f"{kernel}/{f.stem}" for f in files - {file}}
            found[kernel] = parts - {kernel}
    assert said == found


# Sums of floats in an order that is not fixed; docs/dualkv.md says how a caller avoids it.
FLOAT_ATOMICS = {"dualkv/kernels/bwd.py"}
INTEGER_ATOMICS = {"dualkv/kernels/items.py", "sparse_ring/kernels/select_lines.py"}
# Barriers that are no ring's: the code beside each says why.
PARITIES = {
    "dualkv/kernels/bwd.py",  # dQ, a single buffer between two roles
    "dualkv/kernels/walk.py",  # the front of a run: the warp that fills it waits for it
    "gdn/kernels/chain/transfer.py",  # the tail of a sequence, likewise
    "gdn/kernels/chunk_grads/layout.py",
    "gdn/kernels/wide_grads/layout.py",
    "sparse_ring/kernels/window_mass.py",  # turns of the warpgroups
    "tile/ring.py",
}


def code(file: Path) -> str:
    """Without comments and docstrings, but with the texts that calls are given."""
    if file.suffix != ".py":
        return re.sub(r"//.*", "", file.read_text())
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def device_sources(pattern: str) -> set[str]:
    """The files of device code in which a pattern occurs."""
    inline = {file for folder in PACKAGE.glob("*") for file in folder.rglob("*.cuh")}
    found = (file for file in {*KERNELS, *TILE, *inline} if re.search(pattern, code(file)))
    return {file.relative_to(PACKAGE).as_posix() for file in found}


def test_atomics_are_where_they_are_known_to_be():
    pattern = r"\batomic_\w+|\batomic[A-Z]\w+|tma_store_(add|reduce)|\bred\.|\bcp\.reduce"
    assert device_sources(pattern) == FLOAT_ATOMICS | INTEGER_ATOMICS


def test_parities_come_from_rings():
    """A barrier that completes once is waited for with a number."""
    assert device_sources(r"(?m)barrier_wait\((?!.*, \d\)$)") == PARITIES


@named([file for file in KERNELS if "\ndef build(" in file.read_text()])
def test_build_allocates_and_dispatches(file):
    """What a role does is in a macro, however long the signature and the allocation are."""
    (build,) = (
        node
        for node in parsed(file).body
        if isinstance(node, ast.FunctionDef) and node.name == "build"
    )
    calls = {
        node.func.attr
        for node in ast.walk(build)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not calls & {"wgmma_gemm", "tma_copy", "barrier_wait", "barrier_arrive"}


def test_a_class_has_a_name_of_its_own():
    """Only a kernel's Variant may share its name: every kernel file has one."""
    named: dict[str, list[str]] = {}
    for file in SOURCES:
        if PACKAGE in file.parents:
            for node in parsed(file).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    named.setdefault(node.name, []).append(file.relative_to(PACKAGE).as_posix())
    twice = {name: files for name, files in named.items() if len(files) > 1 and name != "Variant"}
    assert not twice


# Each module of a kind has its own, under the name that other code asks every such module for.
ASKED_OF_EVERY_MODULE = {
    "VARIANTS",  # of a kernel: jit.KernelModule
    "PASS_CONFIGS",  # of a kernel, likewise
    "SOURCE",  # CUDA that belongs to a module of macros
    "OP",  # the public function that the module's errors name
    "SCHEMAS",  # of the operators that the module registers
}
FAMILIES = sorted({file.relative_to(PACKAGE).parts[0] for file in KERNELS})


def constants(body: list[ast.stmt]) -> Iterator[str]:
    """The upper-case names that statements of a module or class assign, but for private ones."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from constants(node.body)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) and node.value else targets
        names = (name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name))
        yield from (name for name in names if name.isupper() and not name.startswith("_"))


def owners(files: list[Path]) -> dict[str, list[str]]:
    """The files that assign each constant, once for each assignment."""
    found: dict[str, list[str]] = {}
    for file in files:
        for name in constants(parsed(file).body):
            found.setdefault(name, []).append(file.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_constant_has_one_value_in_a_family(family):
    """And in what families share: who reads SLOTS in two files may take it for one number."""
    files = [file for file in SOURCES if PACKAGE / family in file.parents]
    found = owners([*files, *TILE])
    twice = {name: where for name, where in found.items() if len(where) > 1}
    assert not {name: twice[name] for name in twice.keys() - ASKED_OF_EVERY_MODULE}


def test_constants_of_modules_and_classes_are_found():
    code = "A = B, _C = 1, 2\nE: int = 3\nclass F:\n  G: int = 4\n  H: int\nI, j = range(2)\n"
    assert [*constants(ast.parse(code).body)] == ["A", "B", "E", "G", "I"]
