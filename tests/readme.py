"""The Python snippets of the README: executed here by one test, and from a wheel by another."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def snippets() -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    if not found:
        raise AssertionError("README.md has no python snippet; the pattern or the README is wrong")
    return found
