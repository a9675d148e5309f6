"""A generated document: write it, or say that it is not what it is made from."""

import argparse
from collections.abc import Callable
from pathlib import Path


def main(doc: str | None, document: Path, made_from: str, text: Callable[[], str]) -> int:
    """Brings a document up to date, or with --check only says whether it is; the exit status."""
    parser = argparse.ArgumentParser(description=doc)
    said = f"exit 1 if {document.parent.name}/{document.name} is stale"
    parser.add_argument("--check", action="store_true", help=said)
    check, now = parser.parse_args().check, text()
    if document.exists() and document.read_text() == now:
        print(f"{document.name} is current")
        return 0
    if check:
        script = f"python scripts/{Path(parser.prog).name}"
        print(f"{document.name} differs from {made_from}; run {script}")
        return 1
    document.parent.mkdir(exist_ok=True)
    document.write_text(now)
    print(f"wrote {document.name}")
    return 0
