"""Layouts: which tokens of a batch each rank holds, as stretches of equal length.

    contiguous   as many stretches as ranks; rank r of W holds stretch r
    zigzag       2 * W stretches; rank r holds stretches r and 2 * W - 1 - r, one after the other

Stretches are numbered in the order of tokens. A sequence may begin and end in any stretch. Only the
first sequence of a stretch may begin before it, and only the last one may continue after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
STRETCHES = {CONTIGUOUS: 1, ZIGZAG: 2}  # of a rank
LAYOUTS = tuple(STRETCHES)


class Stretch(NamedTuple):
    """A stretch on the rank that holds it, and the sequences with tokens in it.

    Two stretches of a rank are never in the same of its sequences, even if they are neighbours.
    """

    first: int  # number of its first sequence among the rank's sequences
    end: int  # one past its last sequence
    before: int  # number of stretches before this one that hold a part of its first sequence
    after: int  # number of stretches after this one that hold a part of its last sequence

    @property
    def through(self) -> bool:
        """True if it holds one sequence, which enters from a stretch and leaves to another.

        Only then does the state that leaves the stretch depend on the state that enters it.
        """
        return self.end - self.first == 1 and self.before > 0 and self.after > 0


def stretches(
    before: Sequence[int], after: Sequence[int], front: int, num_sequences: int
) -> list[Stretch]:
    """Returns a rank's stretches.

    Args:
        before, after: of each stretch, as in Stretch.
        front: the number of sequences of the first of two stretches.
        num_sequences: of the rank.
    """
    cuts = (0, num_sequences) if len(before) == 1 else (0, front, num_sequences)
    return [Stretch(*fields) for fields in zip(cuts, cuts[1:], before, after, strict=False)]


def held_by(rank: int, world: int, each: int) -> tuple[int, ...]:
    """Returns the numbers of the stretches of a rank, which holds `each` of them."""
    return (rank, 2 * world - 1 - rank)[:each]


def holder(number: int, world: int) -> tuple[int, int]:
    """Returns the rank that holds a stretch, and which of its stretches it is."""
    return (number, 0) if number < world else (2 * world - 1 - number, 1)


def local_bounds(number: int, bounds: Sequence[int], size: int) -> tuple[list[int], int, int]:
    """Returns the part of a batch in a stretch of `size` tokens.

    The results are the bounds of the sequences that have tokens in the stretch, counted from its
    first token, and `before` and `after` of Stretch.
    """
    if not size:
        return [0], 0, 0
    begin, end = number * size, (number + 1) * size
    inside = sorted({x for x in bounds if begin < x < end})
    before = number - max(x for x in bounds if x <= begin) // size
    after = (min(x for x in bounds if x >= end) - 1) // size - number
    return [0, *(x - begin for x in inside), size], before, after


class ShardPlace(NamedTuple):
    """The place of this rank's stretches in the sequences that are cut over ranks."""

    group: str  # name of the process group
    before: list[int]  # of each stretch, as in Stretch
    after: list[int]
    front: int  # number of sequences in the first of two stretches

    def stretches(self, num_sequences: int) -> list[Stretch]:
        return stretches(self.before, self.after, self.front, num_sequences)
