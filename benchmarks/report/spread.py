"""How much faster, over several shapes."""

from collections.abc import Sequence
from typing import NamedTuple

from ..harness.records import Row
from . import tables


class Spread(NamedTuple):
    """Ratios of rivals' times to ours: their number, geometric mean, least and most."""

    shapes: int
    mean: float
    worst: float
    best: float

    @property
    def at_least(self) -> str:
        return f"{self.mean:.2f} x (worst {self.worst:.2f})"

    @property
    def said(self) -> str:
        if self.shapes == 1:
            return f"{self.mean:.2f} x"
        return f"{self.mean:.2f} x ({self.worst:.2f} to {self.best:.2f})"


def spread(ratios: Sequence[float | None]) -> Spread | None:
    found = [r for r in ratios if r is not None]
    mean = tables.geometric_mean(found)
    return None if mean is None else Spread(len(found), mean, min(found), max(found))


def beside(rows: Sequence[Row], name: str, eager: bool = False) -> Spread | None:
    """One implementation's times over ours."""
    pairs = [(row.time_ms(name, eager), row.time_ms("ours", eager)) for row in rows]
    return spread([theirs / mine for theirs, mine in pairs if theirs and mine])
