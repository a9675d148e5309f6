"""Write docs/api.md from the docstrings of all public names; with --check, only compare.

Reads sources and imports nothing: it runs in a second, on any Python.
"""

import ast
import functools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "api.md"

# Modules whose public names are those of `__all__`, and what each is for.
PACKAGES = {
    "qla_kernels": "The functions that most programs need",
    "qla_kernels.gdn": "Gated delta net",
    "qla_kernels.dualkv": "Shared-prompt attention",
    "qla_kernels.hybrid": "Shared prompts of models with gated delta nets",
    "qla_kernels.conv": "Causal convolution",
    "qla_kernels.sparse_ring": "Sparse attention, on one GPU or a ring",
    "qla_kernels.emulator": "TileLang kernels of your own, on CPU tensors",
}
# Of modules without `__all__`: what a user calls. Names that one does not have yet are left out.
PARTS = {
    "tile.schedule": ("Schedule", "Role", "Named"),
    "tile.ring": ("Ring",),
    "tile.named_barriers": ("NamedBarrier",),
    "sparse_ring.measure": ("LineLog", "LayerLines"),
    "integrations.fla": ("register", "unregister", "status", "Status"),
    "integrations.transformers": ("swap", "restore", "status", "SwappedLayers"),
    "integrations.transformers_dualkv": ("prepare", "register", "select", "check", "router_loss"),
    "integrations.transformers_sparse_ring": ("SparseRingConfig", "prepare", "register", "check"),
    "integrations.trl": ("shared_prefix_trainer",),
    "integrations.trl_async": ("shared_prefix_async_trainer",),
    "integrations.verl": ("patch",),
    "integrations.vllm": ("register",),
    "integrations.sglang": ("register",),
}
PROGRAMS = (
    "info", "selftest", "warmup", "build", "sparse_ring.measure", "check", "inspect", "emulator",
)  # fmt: skip

HEADER = """\
# API

Generated from docstrings by `python scripts/api.py`; do not edit. `help(name)` prints the same.
Pages with examples: [index](README.md).
"""
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def source_of(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text())


def public(module: str) -> list[str]:
    """The names in a module's `__all__`."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{module} has no __all__")


def home_of(module: str, name: str) -> str | None:
    """The module that defines a name, through imports; none for a subpackage."""
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if any((alias.asname or alias.name) == name for alias in node.names):
            inside = source_of(f"{node.module}.{name}").exists()
            return None if inside else home_of(node.module, name)
    return module


def definition(module: str, name: str) -> Definition | None:
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if not overloaded(node):
                return node
            continue
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            return node
    return None


def overloaded(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def signature(node: ast.FunctionDef) -> str:
    """The line of `def`, or a line for each argument if that is long."""
    a, parts = node.args, []
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + [*a.defaults]
    for i, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        if arg.arg not in ("self", "cls"):
            parts.append(_argument(arg, default))
        if a.posonlyargs and i + 1 == len(a.posonlyargs):
            parts.append("/")
    if a.vararg:
        parts.append(f"*{_argument(a.vararg, None)}")
    elif a.kwonlyargs:
        parts.append("*")
    parts += [_argument(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        parts.append(f"**{_argument(a.kwarg, None)}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(parts)}){returns}"
    if len(line) <= 88:
        return line
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    said = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    if default is None:
        return f"{arg.arg}{said}"
    return f"{arg.arg}{said}{' = ' if said else '='}{ast.unparse(default)}"


def prose(doc: str) -> str:
    """A docstring as Markdown: sections become lists, indented lines stay code."""
    parts: list[str] = []
    for block in re.split(r"\n\n(?=\S)", doc):
        title, _, rest = block.partition("\n")
        if not re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", title):
            parts.append(block)
            continue
        lines = [line[4:] for line in rest.splitlines()]
        entries = "\n".join(lines)
        if title in ("Returns:", "Yields:"):
            parts += [f"**{title[:-1]}**", entries]
        else:
            parts += [f"**{title[:-1]}**", "\n".join(_entries(lines))]
    return "\n\n".join(parts)


def _entries(lines: list[str]) -> Iterator[str]:
    for line in lines:
        found = re.match(r"([\w*, ]+): (.*)", line)
        if found and not line.startswith(" "):
            yield f"- `{found[1]}`: {found[2]}"
        else:
            yield f"  {line.strip()}" if line.strip() else ""


def summary(doc: str) -> str:
    return " ".join(doc.partition("\n\n")[0].split())


def entry(module: str, name: str) -> tuple[str, str]:
    """What a name's section says, and its first sentence."""
    home = home_of(module, name)
    if home is None:
        doc = ast.get_docstring(tree_of(f"{module}.{name}")) or ""
        return "", summary(doc)
    node = definition(home, name)
    if node is None:
        raise ValueError(f"{home} does not define {name}")
    if isinstance(node, ast.ClassDef):
        return _class(node, source_of(home).read_text().splitlines()), summary(
            ast.get_docstring(node) or ""
        )
    if isinstance(node, ast.FunctionDef):
        doc = ast.get_docstring(node) or ""
        return f"```python\n{signature(node)}\n```\n\n{prose(doc)}", summary(doc)
    value = node.value
    if isinstance(value, ast.Name):
        return f"Another name of `{value.id}`.", f"Another name of `{value.id}`."
    code = ast.get_source_segment(source_of(home).read_text(), node)
    return f"```python\n{code}\n```", "A constant."


def _class(node: ast.ClassDef, lines_of_file: list[str]) -> str:
    """Fields with their comments, the docstring, and each public method with its docstring."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    methods = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            _, _, comment = lines_of_file[item.lineno - 1].partition("  # ")
            said = f"  # {comment}" if comment and item.lineno == item.end_lineno else ""
            lines.append(f"    {ast.unparse(item)}{said}")
        if isinstance(item, ast.FunctionDef) and not overloaded(item):
            if item.name == "__init__":
                lines[0] = signature(item).replace("__init__", f"class {node.name}", 1)
                lines[0] = lines[0].removesuffix(" -> None")
            elif not item.name.startswith("_"):
                methods.append(_method(item))
    parts = [f"```python\n{chr(10).join(lines)}\n```", prose(ast.get_docstring(node) or "")]
    return "\n\n".join(filter(None, [*parts, "\n".join(methods).rstrip()]))


def _method(node: ast.FunctionDef) -> str:
    doc = ast.get_docstring(node) or ""
    is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
    said = node.name if is_property else " ".join(signature(node).split())
    line = f"- `{said.replace('( ', '(').replace(', )', ')')}`" + (
        f": {summary(doc)}" if doc else ""
    )
    rest = prose(doc.partition("\n\n")[2])
    return line if not rest else f"{line}\n\n{textwrap.indent(rest, '  ')}\n"


def anchor(heading: str) -> str:
    """GitHub's, of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def document() -> str:
    sections, told = [], set()
    tables = []
    modules = [(name, title, public(name)) for name, title in PACKAGES.items()]
    for name, offered in PARTS.items():
        module = f"qla_kernels.{name}"
        known = [n for n in offered if home_of(module, n) != module or definition(module, n)]
        modules.append((module, "", known))
    for module, title, names in modules:
        rows, texts = [], []
        for name in names:
            text, first = entry(module, name)
            key = (home_of(module, name), name)
            if key[0] is None or key in told:  # a subpackage, or what stands above
                inside = (m for m, _, _ in modules if m.startswith(f"{module}.{name}"))
                target = next(inside) if key[0] is None else name
                rows.append(f"| [`{name}`](#{anchor(target)}) | {first} |")
                continue
            told.add(key)
            heading = f"{module}.{name}".split(".", module.count(".") or 1)[-1]
            rows.append(f"| [`{name}`](#{anchor(heading)}) | {first} |")
            texts.append(f"### {heading}\n\n{text}\n")
        said = title or summary(ast.get_docstring(tree_of(module)) or "")
        table = "\n".join(["| name | |", "|---|---|", *(r.replace("\n", " ") for r in rows)])
        tables.append(f"- [{module}](#{anchor(module)}): {said}")
        sections.append("\n".join([f"## {module}\n", f"{said}\n", f"{table}\n", *texts]))
    programs = ["## Programs\n", "| command | |", "|---|---|"]
    for name in PROGRAMS:
        module = f"qla_kernels.{name}"
        first = summary(ast.get_docstring(tree_of(module)) or "")
        programs.append(f"| `python -m {module}` | {first} |")
    tables.append("- [Programs](#programs): what `python -m` runs")
    return "\n".join([HEADER, "\n".join(tables) + "\n", *sections, "\n".join(programs) + "\n"])


if __name__ == "__main__":
    import generated  # beside this file

    sys.exit(generated.main(__doc__, DOCUMENT, "the docstrings", document))
