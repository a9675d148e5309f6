"""Options of a command line for the settings of VerticalSlash, besides --recall."""

import argparse
from collections.abc import Callable
from typing import Any

from qla_kernels.sparse_ring.patterns import VerticalSlash

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "recall_v": (float, "share that columns may take; left out: --recall"),
    "max_v": (int, "most columns of a head"),
    "max_s": (int, "most diagonals of a head, in blocks of 64 tokens: bounds the time of a step"),
    "sink": (int, "first columns, always taken"),
    "window": (int, "first diagonals, in blocks of 64 tokens, always taken"),
    "estimator": (str, "residual or independent"),
    "kappa": (int, "a column qualifies above this many means of its block"),
    "gap_close": (int, "gaps between diagonals to fill"),
}


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting but recall_s; defaults are those of VerticalSlash."""
    for name, (kind, says) in OPTIONS.items():
        default = None if name == "recall_v" else getattr(VerticalSlash, name)
        said = says if default is None else f"{says}; left out: %(default)s"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=said)


def mask(options: argparse.Namespace, recall: float) -> VerticalSlash:
    """Returns the mask of the options, for a target `recall`.

    Raises ValueError for settings out of range.
    """
    given = {name: getattr(options, name) for name in OPTIONS}
    if given["recall_v"] is None:
        given["recall_v"] = recall
    return VerticalSlash(recall_s=recall, **given)
