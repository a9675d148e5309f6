"""Parsers of command lines whose help is a module's docstring."""

import argparse


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the docstring's first line before the options, the rest behind them."""
    first, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=program,
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
