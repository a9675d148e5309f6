"""README.md, CONTRIBUTING.md, docs/: links resolve, code runs, commands parse, size is bounded."""

import ast
import contextlib
import functools
import importlib
import io
import re
import runpy
import shlex
import sys
from collections import Counter
from typing import NamedTuple

import pytest

from tests.readme import ROOT, run, snippets

PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))
OURS = ("qla_kernels", "benchmarks", "tests", "examples", "scripts")  # what holds programs
EVERY_PAGE = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (
        *ROOT.glob("*.md"),
        *(f for d in ("docs", *OURS) for f in (ROOT / d).rglob("*.md")),
    )
)


def read(page: str) -> str:
    return (ROOT / page).read_text()


# Size.


def test_the_readme_is_short():
    text = read("README.md")
    assert len(text.splitlines()) <= 120
    assert len(text.encode()) <= 7 * 1024


def test_the_documentation_is_read_in_an_evening():
    pages = [file.read_text() for file in (ROOT / "docs").rglob("*.md")]
    assert sum(len(text.split()) for text in pages) <= 45_000
    assert sum(len(text.splitlines()) for text in pages) <= 4_500


# Links.


FENCED = re.compile(r"^ *```(\w*).*?\n(.*?)^ *```$", re.M | re.S)


def without_code(text: str) -> str:
    return FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes from headings, and those that are written as HTML."""
    headings = re.findall(r"^#+ (.+?) *$", without_code(text), re.M)
    names = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in names]
    repeated = {f"{x}-{n}" for x, count in Counter(names).items() for n in range(1, count)}
    return {*names, *repeated, *re.findall(r"<a (?:name|id)=\"(.*?)\"", text)}


def links(text: str) -> list[str]:
    """Returns the targets of Markdown and HTML links and pictures, other sites left out."""
    text = re.sub(r"`[^`\n]*`", "", without_code(text))
    targets = re.findall(r"\]\(<?([^)\s>]+)>?(?: \".*?\")?\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)", text, re.M)
    targets += re.findall(r"\b(?:src|srcset|href)=\"([^\"]+)\"", text)
    return [target for target in targets if not re.match(r"https?:|mailto:", target)]


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_links_resolve(page):
    for target in links(read(page)):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), target


def test_headings_become_anchors():
    text = "# A page\n## Equal, and not\n### `swap(model)` of [x](y.md)\n## A page\n"
    text += "```bash\n# a comment\n```\n"
    assert anchors(text) == {"a-page", "equal-and-not", "swapmodel-of-x", "a-page-1"}


def test_links_of_every_form_are_seen():
    text = (
        '[a](b.md#c) `[no](no.md)` ![x](d.svg "title") <img src="e.svg"> [f](https://g)\n[h]: i\n'
    )
    assert links(text) == ["b.md#c", "d.svg", "i", "e.svg"]


# Python blocks.


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def unresolved(code: str) -> list[str]:
    """Returns the names of this repository that a block imports and that do not exist."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    missing = []
    for node in imports:
        if node.module.partition(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    with contextlib.suppress(ModuleNotFoundError):
                        importlib.import_module(f"{node.module}.{alias.name}")
                        continue
                    missing.append(f"{node.module}.{alias.name}")
    return missing


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "py")])
def test_excerpts_compile_and_import_what_exists(page):
    for code in snippets(page, "py"):
        compile(code, page, "exec")
        assert unresolved(code) == []


def test_a_missing_name_is_seen():
    code = "from qla_kernels import pack_padded, no_such_name\nfrom qla_kernels.gdn import refusal"
    assert unresolved(code) == ["qla_kernels.no_such_name"]


# Commands.


class Command(NamedTuple):
    """A program of this repository, and the words after it."""

    kind: str  # module, file, shell
    target: str
    words: list[str]


STARTERS = r"(?:python3?|torchrun|pytest|bash|qla-kernels|compute-sanitizer|timeout|\.venv/bin/\w+)"
START = re.compile(rf"(?:[A-Z_]+=\S+ )*{STARTERS} ")
SHELL = ("", "bash", "sh", "shell", "console", "dockerfile")


def lines_of(text: str) -> list[str]:
    """Returns the lines of shell blocks, and code in sentences that begins as a command does."""
    shell = "".join(block for language, block in FENCED.findall(text) if language in SHELL)
    spans = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_code(text))]
    return [*shell.replace("\\\n", " ").splitlines(), *filter(START.match, spans)]


def words_of(line: str) -> list[str]:
    """Splits a line, without a prompt and a comment; a line that is no shell has no words."""
    try:
        return shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:
        return []


def command_of(line: str) -> Command | None:
    """Returns the program of this repository that a line starts, if it starts one."""
    words = words_of(line)
    ends = [i for i, word in enumerate(words) if word in ("&&", "||", "|", ";", ">", ">>", "2>&1")]
    words = words[: ends[0]] if ends else words
    for i, word in enumerate(words):
        program, rest = word.rpartition("/")[2], words[i + 1 :]
        if program == "qla-kernels":
            return Command("module", "qla_kernels", rest)
        if program == "pytest":
            return Command("pytest", program, rest)
        if word == "-m" and rest and rest[0].partition(".")[0] in (*OURS, "pytest"):
            kind = "pytest" if rest[0] == "pytest" else "module"
            return Command(kind, rest[0], rest[1:])
        if word.partition("/")[0] in OURS and word.endswith((".py", ".sh")):
            return Command("shell" if word.endswith(".sh") else "file", word, rest)
    return None


def exists(command: Command) -> bool:
    if command.kind == "pytest":
        paths = [word.partition("::")[0] for word in command.words if word.startswith("tests/")]
        return all((ROOT / path).exists() for path in paths)
    if command.kind != "module":
        return (ROOT / command.target).exists()
    path = ROOT / command.target.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@functools.cache
def usage(kind: str, target: str, *subcommand: str) -> str:
    """Returns what a program prints for --help."""
    if kind == "shell":
        return read(target)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [target, *subcommand, "--help"])
        patch.syspath_prepend((ROOT / target).parent)  # as for `python FILE`
        start = runpy.run_module if kind == "module" else runpy.run_path
        with pytest.raises(SystemExit) as end:
            start(target if kind == "module" else str(ROOT / target), run_name="__main__")
    assert end.value.code in (0, None), f"{target} {' '.join(subcommand)} --help fails"
    return printed.getvalue()


def faults(command: Command) -> list[str]:
    """Returns what is wrong with a command: its program, its subcommand, its options."""
    if not exists(command):
        return [f"no {command.target}"]
    options = [word.partition("=")[0] for word in command.words if re.match(r"--?[a-z]", word)]
    options = [option for option in options if option not in ("-h", "--help")]
    if command.kind == "pytest" or command.target == "qla_kernels.integrations.fla":
        return []  # the words belong to another program
    program, subcommand = (command.kind, command.target), command.words[:1]
    if command.target != "qla_kernels" or not re.fullmatch(r"[a-z]+", "".join(subcommand)):
        subcommand = []
    elif not re.search(rf"\b{subcommand[0]}\b", usage(*program)):
        return [f"no subcommand {subcommand[0]} of {command.target}"]
    text = usage(*program, *subcommand) if options or subcommand else ""
    missing = [x for x in options if not re.search(rf"(?<![\w-]){x}\b", text)]
    return [f"{command.target} has no {option}" for option in missing]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("page", [page for page in EVERY_PAGE if page != "CHANGELOG.md"])
def test_commands_parse(page):
    commands = filter(None, map(command_of, lines_of(read(page))))
    assert [fault for command in commands for fault in faults(command)] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("python -m qla_kernels.no_such_module", "no qla_kernels.no_such_module"),
        (
            "QLA_LOG=info .venv/bin/python -m benchmarks.sm90 gdn --haeds 1/2",
            "benchmarks.sm90 has no --haeds",
        ),
        ("torchrun --nproc-per-node 2 examples/no_such_file.py --x", "no examples/no_such_file.py"),
        ("$ bash scripts/setup_env.sh --rival", "scripts/setup_env.sh has no --rival"),
        ("python -m qla_kernels frobnicate", "no subcommand frobnicate of qla_kernels"),
        ("timeout 300 python -m pytest tests/no_such_tier", "no pytest"),
        ("python -m benchmarks.sm90 gdn --quick > table  # --later", None),
        ("python train.py --anything", None),
        ("it's no shell", None),
    ],
)
def test_wrong_commands_are_seen(line, fault):
    command = command_of(line)
    assert (faults(command) if command else []) == ([fault] if fault else [])


def test_commands_are_taken_from_blocks_and_sentences():
    text = "```python\n```\nRun `python -m a.b c`.\n"
    text += "```bash\npython x.py \\\n  --y\n```\nNot `python`.\n"
    assert lines_of(text) == ["python x.py    --y", "python -m a.b c"]
