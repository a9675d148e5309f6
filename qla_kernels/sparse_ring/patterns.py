"""Defines the mask patterns a caller may pass: VerticalSlash, FixedVerticalSlash and Dense.

VerticalSlash is a budget, from which lines are estimated; FixedVerticalSlash names the lines; Dense
takes every diagonal.
"""

import functools
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qla_kernels.arguments import described
from qla_kernels.errors import need

MAX_COLUMNS = 16384  # upper limit of VerticalSlash.max_v, columns of one head
LARGEST = 2**30  # upper limit of numbers that kernels get as int32

Lines = tuple[tuple[int, ...], ...]  # one tuple for each query head, or one for all heads


@dataclass(frozen=True)
class VerticalSlash:
    """Pattern whose lines are estimated, for each head, from the last complete block of queries.

    Each head gets the fewest lines that hold a target share of that block's attention, in order of
    falling attention; the line at which the target is reached is included. Verticals are single key
    columns, slashes are diagonals of 64 x 64 blocks. Forced lines are taken in any case.
    """

    recall_v: float = 0.95  # target share of the verticals
    recall_s: float = 0.95  # target share of all lines; with "independent", of the slashes alone
    max_v: int = 4096  # most columns of a head: an index has room for this many
    max_s: int | None = None  # most diagonals of a head; None for no limit
    sink: int = 4  # the first `sink` columns are forced
    window: int = 2  # the first `window` diagonals are forced
    estimator: Literal["residual", "independent"] = "residual"
    kappa: int = 8  # residual: a column qualifies above kappa times the mean of its tile's others
    gap_close: int = 0  # holes of at most this many diagonals are filled: longer runs, faster

    def __post_init__(self) -> None:
        """Raises ValueError if a field has another type or is out of range."""
        for name in ("max_v", "max_s", "sink", "window", "kappa", "gap_close"):
            x = getattr(self, name)
            if type(x) is not int and (name, x) != ("max_s", None):
                self._refuse(described(name, x), "an int", f"pass int({name})")
        for name in ("recall_v", "recall_s"):
            x, fix = getattr(self, name), "pass a share, such as 0.95"
            if not isinstance(x, int | float):
                self._refuse(described(name, x), "a number from 0 to 1", fix)
            if not 0 <= x <= 1:
                self._refuse(f"{name} is {x}", "a number from 0 to 1", fix)
        if self.estimator not in ("residual", "independent"):
            fix = "leave it out for residual"
            self._refuse(f"estimator is {self.estimator!r}", "residual or independent", fix)
        for name in ("sink", "window", "kappa", "gap_close", "max_s"):
            x = getattr(self, name)
            if x is not None and not 0 <= x <= LARGEST:
                fix = "pass 0 for none" if x < 0 else "pass a smaller number"
                self._refuse(f"{name} is {x}", f"0 to {LARGEST}", fix)
        if not max(1, self.sink) <= self.max_v <= MAX_COLUMNS:
            needs = f"at least 1, at least sink = {self.sink}, and at most {MAX_COLUMNS}"
            self._refuse(f"max_v is {self.max_v}", needs, "change max_v or sink")
        if self.max_s is not None and self.max_s < max(1, self.window):
            needs = f"at least 1, and at least window = {self.window}"
            self._refuse(f"max_s is {self.max_s}", needs, "raise it, or pass None for no limit")

    def _refuse(self, got: str, needs: str, fix: str) -> None:
        """Raises a ValueError that names this class; `got` says which field has which value."""
        raise ValueError(need("VerticalSlash", got, needs, fix))


@dataclass(frozen=True)
class FixedVerticalSlash:
    """Pattern of given lines: columns by token, diagonals by distance in 64-token blocks.

    Each argument is one list for all query heads, or a list of lists, one for each head. Arrays and
    tensors are accepted in place of lists. Diagonal 0 is always part of the mask.
    """

    v_idx: Any
    d_idx: Any

    def __post_init__(self) -> None:
        """Stores the lines as sorted tuples of ints; ValueError if they are no lines."""
        object.__setattr__(self, "v_idx", _lines("v_idx", self.v_idx))
        object.__setattr__(self, "d_idx", _lines("d_idx", self.d_idx))

    @functools.cached_property
    def described(self) -> str:
        """A short text that ranks compare: the numbers of heads, and a SHA-256 of all lines.

        The lines of 32 heads written out would take megabytes, and milliseconds to write.
        """
        contents = hashlib.sha256()
        for lines in (self.v_idx, self.d_idx):
            for head in lines:
                contents.update(array("q", (len(head), *head)).tobytes())
        heads = f"columns of {len(self.v_idx)} heads, diagonals of {len(self.d_idx)}"
        return f"FixedVerticalSlash({heads}, contents {contents.hexdigest()})"


@dataclass(frozen=True)
class Dense:
    """Pattern of plain causal attention, run by the same kernels: every diagonal, no column."""


Pattern = VerticalSlash | FixedVerticalSlash | Dense

# Settings of the published system, for comparisons. The defaults above are this package's own.
PAPER: dict[str, Any] = {
    "stripe": 64,
    "estimator": "independent",
    "schedule": "double_ring",
    "chunks_per_launch": 1,
}


def _lines(name: str, given: Sequence[Any]) -> Lines:
    """Returns lines as sorted tuples without repetitions, one for each head or one for all.

    `given` is a sequence of numbers, or of sequences of numbers. Raises ValueError if it has
    another form, or if a line is negative.
    """
    try:
        by_head = any(getattr(x, "ndim", isinstance(x, Sequence)) for x in given)
        heads: Sequence[Any] = given if by_head else [given]
        lines = tuple(tuple(sorted({_whole(i) for i in head})) for head in heads)
    except (TypeError, ValueError) as error:
        got = f"{name} cannot be read ({error})"
        fix = "pass columns as tokens, diagonals as distances in blocks of 64 tokens"
        needs = "a list of integers, or a list of them for each head"
        raise ValueError(need("FixedVerticalSlash", got, needs, fix)) from None
    if any(i < 0 for head in lines for i in head):
        got = f"{name} has the line {min(i for head in lines for i in head)}"
        fix = "count tokens and distances of blocks from 0"
        raise ValueError(need("FixedVerticalSlash", got, "lines from 0 on", fix))
    return lines


def _whole(x: Any) -> int:
    """Returns x as an int. Raises ValueError for text and for numbers that are not whole.

    Floats with a whole value are accepted, because arrays and tensors of floats hold such numbers.
    """
    whole = int(x)
    if isinstance(x, str) or whole != x:
        raise ValueError(f"{x!r} is no integer")
    return whole
