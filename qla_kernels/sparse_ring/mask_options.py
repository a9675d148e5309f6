"""Command-line options for the settings of VerticalSlash, besides --recall."""

import argparse
from collections.abc import Callable
from typing import Any

from qla_kernels.sparse_ring.patterns import VerticalSlash

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "recall_v": (float, "target share of the columns; default: --recall"),
    "max_v": (int, "most columns of a head"),
    "max_s": (int, "most diagonals (of 64-token blocks) of a head: limits the time of a step"),
    "sink": (int, "number of first columns that are always included"),
    "window": (int, "number of first diagonals that are always included"),
    "estimator": (str, "residual or independent"),
    "kappa": (int, "a column qualifies above this multiple of the mean of its block's others"),
    "gap_close": (int, "fill gaps of at most this many diagonals"),
}


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting but recall_s; defaults are those of VerticalSlash."""
    for name, (kind, text) in OPTIONS.items():
        default = None if name == "recall_v" else getattr(VerticalSlash, name)
        text = text if default is None else f"{text}; default: %(default)s"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)


def mask(options: argparse.Namespace, recall: float) -> VerticalSlash:
    """Returns the VerticalSlash of the options, with a target `recall`.

    Raises ValueError for settings out of range.
    """
    settings = {name: getattr(options, name) for name in OPTIONS}
    if settings["recall_v"] is None:
        settings["recall_v"] = recall
    return VerticalSlash(recall_s=recall, **settings)
