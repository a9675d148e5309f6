"""What a caller says about the mask: a budget for lines to be found, lines as given, or all."""

import functools
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qla_kernels.errors import need

MAX_COLUMNS = 16384  # of a head

Lines = tuple[tuple[int, ...], ...]  # of each query head, or of all of them


@dataclass(frozen=True)
class VerticalSlash:
    """As few lines of each head as hold a share of the attention of the last complete block.

    Verticals are single columns, and slashes are diagonals of 64 x 64 blocks. The line that crosses
    a target is taken, and forced lines always are.
    """

    recall_v: float = 0.95  # the share for the verticals
    recall_s: float = 0.95  # the share for all lines; with "independent", for slashes alone
    max_v: int = 4096  # columns a head may have: what an index has room for
    max_s: int | None = None  # diagonals a head may have
    sink: int = 4  # the first columns are forced
    window: int = 2  # the first diagonals are forced
    estimator: Literal["residual", "independent"] = "residual"
    kappa: int = 8  # residual: a column stands out at kappa times its tile's other columns
    gap_close: int = 0  # holes of at most this many diagonals are filled: longer runs, faster

    def __post_init__(self) -> None:
        for name in ("max_v", "max_s", "sink", "window", "kappa", "gap_close"):
            x = getattr(self, name)
            if type(x) is not int and (name, x) != ("max_s", None):
                self._refuse(f"{name} is {x!r} of type {type(x).__name__}", "an int", "pass one")
        for name in ("recall_v", "recall_s"):
            x = getattr(self, name)
            if not isinstance(x, int | float):
                self._refuse(f"{name} is {x!r} of type {type(x).__name__}", "a share", "pass 0.95")
            if not 0 <= getattr(self, name) <= 1:
                self._refuse(f"{name} is {getattr(self, name)}", "a share from 0 to 1", "pass 0.95")
        if self.estimator not in ("residual", "independent"):
            fix = "leave it out for residual"
            self._refuse(f"estimator is {self.estimator!r}", "residual or independent", fix)
        for name in ("sink", "window", "kappa", "gap_close"):
            if getattr(self, name) < 0:
                self._refuse(f"{name} is {getattr(self, name)}", "at least 0", "pass 0 for none")
        if not max(1, self.sink) <= self.max_v <= MAX_COLUMNS:
            needs = f"at least 1, sink = {self.sink}, and at most {MAX_COLUMNS}"
            self._refuse(f"max_v is {self.max_v}", needs, "change max_v or sink")
        if self.max_s is not None and self.max_s < max(1, self.window):
            needs = f"at least 1 and window = {self.window}"
            self._refuse(f"max_s is {self.max_s}", needs, "raise max_s, or None for no limit")

    def _refuse(self, got: str, needs: str, fix: str) -> None:
        raise ValueError(need("VerticalSlash", got, needs, fix))


@dataclass(frozen=True)
class FixedVerticalSlash:
    """Lines as given: columns by token, diagonals by distance in blocks; diagonal 0 is always on.

    Each argument is one list for every query head, or a list of lists, one for each head; arrays
    and tensors are lists, too.
    """

    v_idx: Any
    d_idx: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_idx", _lines("v_idx", self.v_idx))
        object.__setattr__(self, "d_idx", _lines("d_idx", self.d_idx))

    @functools.cached_property
    def described(self) -> str:
        """For comparisons: as text the lines of 32 heads take megabytes, and milliseconds."""
        contents = hashlib.sha256()
        for lines in (self.v_idx, self.d_idx):
            for head in lines:
                contents.update(array("q", (len(head), *head)).tobytes())
        heads = f"columns of {len(self.v_idx)} heads, diagonals of {len(self.d_idx)}"
        return f"FixedVerticalSlash({heads}, contents {contents.hexdigest()})"


@dataclass(frozen=True)
class Dense:
    """Plain causal attention, by the same kernels: every diagonal and no column."""


Pattern = VerticalSlash | FixedVerticalSlash | Dense

# How the published system computes, for comparisons; ours are the defaults.
PAPER: dict[str, Any] = {
    "stripe": 64,
    "estimator": "independent",
    "schedule": "double_ring",
    "chunks_per_launch": 1,
}


def _lines(name: str, given: Sequence[Any]) -> Lines:
    try:
        by_head = any(getattr(x, "ndim", isinstance(x, Sequence)) for x in given)
        heads: Sequence[Any] = given if by_head else [given]
        lines = tuple(tuple(sorted({_whole(i) for i in head})) for head in heads)
    except (TypeError, ValueError) as error:
        got, fix = f"{name} with {error}", "name columns by token, diagonals by distance in blocks"
        needs = "ints in a list, or in a list for each head"
        raise ValueError(need("FixedVerticalSlash", got, needs, fix)) from None
    if any(i < 0 for head in lines for i in head):
        got = f"lines {min(i for head in lines for i in head)}"
        fix = "count tokens and block distances from 0"
        raise ValueError(need("FixedVerticalSlash", got, "at least 0", fix))
    return lines


def _whole(x: Any) -> int:
    """Tensors and arrays of floats that are whole are as good as ints."""
    whole = int(x)
    if isinstance(x, str) or whole != x:
        raise ValueError(f"{x!r}, which is no int")
    return whole
