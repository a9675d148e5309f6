"""The Python blocks of README.md and of the pages of docs/.

A block that a CPU cannot run has a line `<!-- not run: REASON -->` above its fence.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n+)?```python\n(?P<code>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    code: str
    why_not: str | None  # None: the block runs on a CPU


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    return [Block(match["code"], match["why"]) for match in BLOCK.finditer(text)]


def snippets(document: str = "README.md") -> list[str]:
    """The blocks of a page that a CPU runs."""
    return [block.code for block in blocks(document) if block.why_not is None]


def run(document: str) -> dict[str, Any]:
    """Runs the blocks of a page from top to bottom; returns the names that they define."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in snippets(document):
        exec(compile(code, document, "exec"), names)
    return names
