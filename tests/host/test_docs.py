"""Pages for users: every link leads somewhere, every picture is described, nothing is left out."""

import re
from pathlib import Path

import pytest
import torch

from qla_kernels.gdn import refusal

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


def test_ratios_of_the_serving_page_are_those_of_the_record():
    """A rival's mean in CUDA graphs, as performance.md has it."""
    text = " ".join((DOCS / "serving.md").read_text().split())
    said = text.split("rival's time / ours: ")[1].split("These are means")[0]
    table = (DOCS / "performance.md").read_text().split("\n## Serving\n")[1]
    for what, rival in (
        ("a token of each sequence", "vLLM's Triton"),
        ("a token of each sequence", "FlashInfer, in the pool"),
        ("prefill from and into a pool", "FlashInfer, in the pool"),
        ("a layer's step, norm and gate included", "vLLM's Triton"),
    ):
        row = rf"^\| {what} +\| {rival} +\| +\d+ \| +(\d\.\d\d x)"
        (mean,) = re.findall(row, table, re.M)
        assert mean in said, (what, rival)
    assert len(re.findall(r"\d\.\d\d x", said)) == 4
    (span,) = re.findall(
        r"\(four shapes, (.*?)\)", said
    )  # the mean alone hid that the least is a loss
    assert re.search(
        rf"^\| a token of each sequence +\| vLLM's Triton .* x \({span}\)", table, re.M
    )


def test_ratios_of_drafts_of_the_serving_page_are_those_of_the_record():
    """Means in CUDA graphs and eager, and the least and the most of the graphs."""
    page = " ".join((DOCS / "serving.md").read_text().split())
    said = page.split("## Speculative drafts")[1].split("**What was measured**")[1]
    said = said.split("Not measured:")[0]
    table = (DOCS / "performance.md").read_text().split("\n## Serving\n")[1]
    want = []
    for rival in ("vLLM's Triton", "SGLang's Triton"):
        (row,) = re.findall(rf"^\| verification of drafts +\| {rival} .*$", table, re.M)
        want.append(re.findall(r"\d\.\d\d", row))
    (vllms, sglangs) = want
    found = re.findall(r"\d\.\d\d", said)
    order = [*vllms[:3], *sglangs[:3], vllms[3], sglangs[3]]
    assert found[:8] == order
    for number, drafts in zip(found[8:], (4, 2), strict=True):
        assert f"{drafts} drafts {number} times" in " ".join(table.split())


RIVALS = ("FlashInfer", "vLLM", "SGLang")


def test_ratios_by_heads_of_the_serving_page_are_those_of_the_record():
    """Of the fastest rival, in CUDA graphs and eager, in two columns of heads."""
    text = (DOCS / "serving.md").read_text().split("What a model gets depends on its heads.")[1]
    record = (DOCS / "records" / "gdn.md").read_text()
    for what, many, few in (
        ("prefill with checkpoints", "prefill with checkpoints", "prefill in a pool"),
        ("a token of each sequence", "decoding in a pool", "decoding in a pool"),
        ("drafts", "drafts", "drafts"),
        ("a layer's step", "a layer's step", "a layer's step"),
    ):
        (row,) = re.findall(rf"^\| {what} \|(.*)\|$", text, re.M)
        said = re.findall(r"\b\d\.\d\d (?=[FSv])[^|]+?(?= \|)", row + "|")
        for heads, section, numbers in (("16/32", many, said[:2]), ("2/8", few, said[2:])):
            table = record.split(f"\n## Serving: {section}\n")[1].split("\n## ")[0]
            (line,) = re.findall(rf"^\| {heads} .*$", table, re.M)
            times = times_of(table, heads)
            ratio = line.split(" | ")[-3]  # before the floor's share and the first call
            found = re.findall(r"\d\.\d\d", ratio)
            for place, number in enumerate(numbers):
                value, _, rival = number.partition(" ")
                assert value == found[place], (what, heads)
                others = [t[place] for name, t in times.items() if not name.startswith("ours")]
                assert times[rival][place] == min(others), (what, heads, rival)


def times_of(table: str, heads: str) -> dict[str, list[float]]:
    """By implementation: milliseconds of a row's graph replays and of eager calls."""
    (head,) = re.findall(r"^\| heads .*$", table, re.M)
    (line,) = re.findall(rf"^\| {heads} .*$", table, re.M)
    cells = dict(zip(*([c.strip() for c in x.split("|")] for x in (head, line)), strict=True))
    found = {name: re.findall(r"[\d.]+", cell) for name, cell in cells.items() if " / " in cell}
    return {
        name: [float(x) for x in numbers]
        for name, numbers in found.items()
        if name == "ours" or name.partition(",")[0].partition("'")[0] in RIVALS
    }


def test_ratios_of_gathers_of_the_serving_page_are_those_of_the_record():
    text = (DOCS / "serving.md").read_text()
    (row,) = re.findall(r"^\| the same, as vLLM does it \|(.*)\|$", text, re.M)
    said = [float(x) for x in re.findall(r"\b\d\.\d\d\b", row)]
    record, want = (DOCS / "records" / "gdn.md").read_text(), []
    for heads, section in (("16/32", "prefill with checkpoints"), ("2/8", "prefill in a pool")):
        table = record.split(f"\n## Serving: {section}\n")[1].split("\n## ")[0]
        times = times_of(table, heads)
        theirs = times["FlashInfer, gather and scatter"]
        want += [r / o for r, o in zip(theirs, times["ours"], strict=True)]
    assert said == pytest.approx(want, abs=0.0051)  # of rounded times


LINES = re.findall(r"^\[qla_kernels\] (.*)$", (DOCS / "serving.md").read_text(), re.M)


@pytest.mark.parametrize("line", LINES)
def test_the_serving_page_quotes_the_lines_of_the_log(line):
    """Their parts stand in the plug-ins; a format has %s in place of what differs."""
    module = ROOT / "qla_kernels" / "integrations" / f"{line.split(':')[0].lower()}.py"
    source = module.read_text()
    formats = re.findall(r"log\.info\(\"(.*?)\"", source)
    (found,) = [x for x in formats if "runs on qla_kernels" in x]
    assert re.fullmatch(re.escape(found).replace("%s", "(.*)"), line)
    for part in line.split("qla_kernels: ")[1].split(", "):
        assert part in source
    assert len(LINES) == 2
