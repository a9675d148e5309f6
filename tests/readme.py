"""The code of README.md and of the pages of docs/.

A ```` ```python ```` block runs on a CPU; a ```` ```py ```` block is an excerpt that only compiles.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def snippets(document: str = "README.md", language: str = "python") -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, (ROOT / document).read_text(), re.M | re.S)


def run(document: str) -> dict[str, Any]:
    """Runs the blocks of a page from top to bottom; returns the names that they define."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in snippets(document):
        exec(compile(code, document, "exec"), names)
    return names
