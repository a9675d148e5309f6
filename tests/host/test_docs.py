"""Pages for users: every link leads somewhere, every picture is described, nothing is left out."""

import re
from pathlib import Path

import pytest

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


@named([*PAGES, *sorted((DOCS / "notes").glob("*.md"))])
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
