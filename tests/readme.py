"""The Python snippets of the README and of pages of docs/, executed by tests."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def snippets(document: str = "README.md") -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    if not found:
        raise AssertionError(f"{document} has no python snippet; the pattern or the page is wrong")
    return found


def names_in(document: str) -> dict[str, Any]:
    """What its code defines, all of it run from top to bottom."""
    names: dict[str, Any] = {}
    for block in snippets(document):
        exec(compile(block, document, "exec"), names)
    return names
