"""The mask patterns: VerticalSlash, FixedVerticalSlash and Dense.

VerticalSlash has a budget and estimates the lines; FixedVerticalSlash lists the lines; Dense has
every diagonal.
"""

import functools
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qla_kernels.runtime.arguments import described
from qla_kernels.runtime.errors import need

MAX_COLUMNS = 16384  # upper limit of VerticalSlash.max_v, columns of one head
LARGEST = 2**30  # upper limit of numbers that kernels get as int32

Lines = tuple[tuple[int, ...], ...]  # one tuple for each query head, or one for all heads


@dataclass(frozen=True)
class VerticalSlash:
    """A pattern that chooses the mask of each head by the attention of its last 64 queries.

    A mask consists of columns (keys that all later queries see) and diagonals (distances between
    64-token blocks). The exact attention of the last complete block of 64 queries is computed.
    Those columns and diagonals that get most of it are chosen, until they hold a target share of
    it.

    Attributes:
        recall_v: share of the attention that the columns should hold.
        recall_s: share that columns and diagonals together should hold; with the estimator
            "independent", the diagonals alone.
        max_v: the most columns of a head.
        max_s: the most diagonals of a head; None for no limit.
        sink: the first `sink` tokens are always columns.
        window: the first `window` diagonals are always in the mask.
        estimator: "residual": only keys that stand out can be columns, and diagonals are chosen by
            the attention that columns leave. "independent": any key can be a column, and diagonals
            are chosen by the whole attention.
        kappa: for "residual": a key stands out if its attention is more than kappa times the mean
            of the other keys of its 64-token block.
        gap_close: gaps of at most this many diagonals are filled, because runs of consecutive
            diagonals are faster.
    """

    recall_v: float = 0.95
    recall_s: float = 0.95
    max_v: int = 4096
    max_s: int | None = None
    sink: int = 4
    window: int = 2
    estimator: Literal["residual", "independent"] = "residual"
    kappa: int = 8
    gap_close: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError if a field has a wrong type or is out of range."""
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
        """Raises a ValueError in the name of this class; the arguments are those of `need`."""
        raise ValueError(need("VerticalSlash", got, needs, fix))


@dataclass(frozen=True)
class FixedVerticalSlash:
    """A pattern whose mask the caller lists, as columns and diagonals.

    Args:
        v_idx: columns: indices of the tokens that all later tokens see.
        d_idx: diagonals: distances in blocks of 64 tokens; block i of the queries sees block i - d
            of the keys. Diagonal 0 is always part of the mask.

    Each argument is one list for all query heads, or a list for each head. Arrays and tensors are
    accepted too.
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

        The lines themselves would be too long: those of 32 heads take megabytes.
        """
        contents = hashlib.sha256()
        for lines in (self.v_idx, self.d_idx):
            for head in lines:
                contents.update(array("q", (len(head), *head)).tobytes())
        heads = f"columns of {len(self.v_idx)} heads, diagonals of {len(self.d_idx)}"
        return f"FixedVerticalSlash({heads}, contents {contents.hexdigest()})"


@dataclass(frozen=True)
class Dense:
    """The pattern of full causal attention: a mask that has every diagonal."""


Pattern = VerticalSlash | FixedVerticalSlash | Dense

# Settings of the published system, for comparisons. The defaults above are this package's own.
PAPER: dict[str, Any] = {
    "stripe": 64,
    "estimator": "independent",
    "schedule": "double_ring",
    "chunks_per_launch": 1,
}


def _lines(name: str, numbers: Sequence[Any]) -> Lines:
    """Returns lines as sorted tuples without repetitions, one for each head or one for all.

    `numbers` is a sequence of numbers, or of sequences of numbers. Raises ValueError if it has
    another form, or if a line is negative.
    """
    try:
        by_head = any(getattr(x, "ndim", isinstance(x, Sequence)) for x in numbers)
        heads: Sequence[Any] = numbers if by_head else [numbers]
        lines = tuple(tuple(sorted({_integer(i) for i in head})) for head in heads)
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


def _integer(x: Any) -> int:
    """Returns x as an int; ValueError for text and for numbers that are not integers.

    Accepts floats with an integer value, because arrays and tensors of floats contain them.
    """
    integer = int(x)
    if isinstance(x, str) or integer != x:
        raise ValueError(f"{x!r} is no integer")
    return integer
