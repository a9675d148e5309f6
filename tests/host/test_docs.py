"""Pages for users: every link leads somewhere, every picture is described, nothing is left out."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from qla_kernels.gdn import refusal
from qla_kernels.integrations import engines

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "records").glob("*.md"))]


def named(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda p: p.relative_to(ROOT).as_posix())


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.M):
        words = re.sub(r"[^\w\- ]", "", heading.lower().strip())
        found.add(words.replace(" ", "-"))
    return found


INSIDE = [ROOT / "CONTRIBUTING.md", ROOT / "qla_kernels" / "emulator" / "README.md"]


@named([*PAGES, *INSIDE, *sorted((DOCS / "notes").glob("*.md"))])
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@named(PAGES)
def test_every_picture_is_described(page):
    """An alternative text is a sentence, no file name."""
    for said in re.findall(r"!\[(.*?)\]\(", page.read_text()):
        assert len(said.split()) >= 6, said


def test_headings_become_anchors(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n## What is equal, and what is not\n### `swap(model)`\n")
    assert anchors(page) == {"a-page", "what-is-equal-and-what-is-not", "swapmodel"}


def test_pictures_follow_the_reader_s_light_or_dark_page():
    for file in (DOCS / "figures").glob("*.svg"):
        assert "prefers-color-scheme: dark" in file.read_text(), file.name


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
    for example in (ROOT / "examples").glob("*.py"):
        assert f"(../examples/{example.name})" in index, example.name


FAQ = (DOCS / "faq.md").read_text()
MESSAGES = re.findall(r"^\| `([^`|]+)` \|", FAQ.split("## Messages")[1], re.M)


def bf16(K=128, dtype=torch.bfloat16):
    return torch.zeros(1, 64, 2, K, dtype=dtype)


def refusals() -> dict[str, str | None]:
    """By what a message of the FAQ begins with: what the package says."""
    odd = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16).expand(1, 64, 2, 128)
    x, wide, single = bf16(), bf16(192), bf16(dtype=torch.float32)
    return {
        "device capability": refusal(x, x, x, capability=(8, 0)),
        "head dimension": refusal(wide, wide, x, capability=(9, 0)),
        "q, k and v are": refusal(single, single, single, capability=(9, 0)),
        "need a last stride": refusal(odd, x, x, capability=(9, 0)),
    }


@pytest.mark.parametrize("message", MESSAGES)
def test_the_faq_quotes_messages_as_they_are(message):
    """Parts around an ellipsis stand in a refusal, or in a text of the sources."""
    for start, said in refusals().items():
        if message.startswith(start):
            assert message in said
            return
    files = [f for f in (ROOT / "qla_kernels").rglob("*") if f.suffix in (".py", ".c")]
    sources = "".join(file.read_text() for file in files)
    for part in re.split(r" ?\.\.,? ?|; need | \(| by |: | 0\.33\.0", message):
        assert part.strip("()") in sources, part
    assert len(MESSAGES) > 12


def test_gains_of_the_serving_page_are_those_of_the_record():
    """Times and ratios of 16/32 heads on one GPU, and what they make in all layers."""
    page = (DOCS / "serving.md").read_text()
    (layers,) = re.findall(r"Qwen3-Next has (\d+), on one H100 16/32 heads", page)
    table = page.split("vLLM / ours | 36 layers |")[1].split("\n\n")[0]
    rows = re.findall(
        r"^\| ([^|]*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ms (less|more) \|$", table, re.M
    )
    shared = (DOCS / "performance.md").read_text().split("| heads of the layer |")[1]
    (line,) = re.findall(r"^\| 16/32 +\| +1 \|.*$", shared, re.M)
    cells = [cell.strip(" ▼") for cell in line.split("|")[4:-1]]
    record = (DOCS / "records" / "gdn.md").read_text()
    kept = record.split("\n## Serving: prefill with checkpoints\n")[1].split("\n## ")[0]
    (kept,) = re.findall(r"^\| 16/32 \| 2048x8 +\|(.*)$", kept, re.M)
    ours, theirs = (cell.split(" / ")[0].strip() for cell in kept.split("|")[:2])
    checkpoints = ours, f"{float(theirs) / float(ours):.2f}"
    want = [tuple(cells[:2]), checkpoints, tuple(cells[3:5]), tuple(cells[7:9])]
    assert [row[1:3] for row in rows] == want
    for what, ms, ratio, total, sign in rows:
        gain = float(ms) * (float(ratio) - 1) * int(layers)
        assert float(total) == pytest.approx(abs(gain), abs=0.06), what
        assert (gain > 0) == (sign == "less"), what


def test_the_serving_page_names_ratios_in_one_place():
    """Repeated elsewhere, means of other shapes read as contradictions."""
    page = (DOCS / "serving.md").read_text()
    others = re.sub(r"\*\*How much\?\*\*.*?\n\n[^|]", "", page, flags=re.S)
    assert not re.findall(r"\b\d\.\d\d? x\b|\b\d+ %", others)


LINES = re.findall(r"^\[qla_kernels\] (.*)$", (DOCS / "serving.md").read_text(), re.M)


@pytest.mark.parametrize("line", LINES)
def test_the_serving_page_quotes_the_lines_of_the_log(line):
    """Their parts stand in the plug-ins; a format has %s in place of what differs."""
    engine, _, said = line.partition(": ")
    module = ROOT / "qla_kernels" / "integrations" / f"{engine.lower()}.py"
    source = module.read_text()
    if first := re.fullmatch(r"the first (.*) went to qla_kernels, on cuda:0", said):
        assert f'say_ran("{engine}", "{first[1]}", ' in source
        assert "%s: the first %s went to qla_kernels, on %s" in inspect.getsource(engines)
        return
    formats = re.findall(r"log\.info\(\"(.*?)\"", source)
    (found,) = [x for x in formats if "runs on qla_kernels" in x]
    assert re.fullmatch(re.escape(found).replace("%s", "(.*)"), line)
    for part in said.split("qla_kernels: ")[1].split(", "):
        assert part in source


def test_the_serving_page_quotes_a_line_of_each_kind():
    assert len([line for line in LINES if "runs on" in line]) == 2
    first = [line for line in LINES if "the first" in line]
    kinds = {kind for line in first for kind in re.findall(r"first (.*) went", line)}
    assert kinds == {"prefill", "decode", "verification of drafts"}
