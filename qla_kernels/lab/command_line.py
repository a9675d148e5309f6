"""Command-line parsers whose help is the docstring of a module."""

import argparse
from pathlib import Path

from qla_kernels.runtime.errors import Unsupported, need

PROGRAM = "python -m qla_kernels"
ROOT = Path(__file__).resolve().parents[2]


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that shows a docstring's first line above the options, the rest below."""
    first, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def need_checkout(what: str) -> None:
    """Raises Unsupported unless this package is imported from a checkout of the repository."""
    if not (ROOT / "pyproject.toml").exists():
        fix = "clone the repository, and run the command there"
        raise Unsupported(need(what, f"no pyproject.toml in {ROOT}", "a checkout", fix))
