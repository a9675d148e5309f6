"""Which lines `VerticalSlash` means, from the documentation, by loops over one head's masses."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 64
UNIT = 1 << 30  # the masses of a window are this much together
SHARE = 1 << 20  # recall targets are multiples of 1 / SHARE


class Lines(NamedTuple):
    columns: list[int]
    diagonals: list[int]
    recall: float  # the window's mass that they hold


def window_masses(q: Tensor, k: Tensor, seqlen: int, scale: float) -> list[int]:
    """What the last complete block of queries looks at, of one head: an integer for each key.

    q and k are [T, D]; block 0 is observed if none is complete, with as many rows as there are.
    """
    first, rows = max(seqlen // BLOCK - 1, 0) * BLOCK, min(seqlen, BLOCK)
    S = scale * q[first : first + rows] @ k.mT
    seen = torch.arange(len(k)) <= first + torch.arange(rows)[:, None]
    P = torch.softmax(S.masked_fill(~seen, -math.inf), -1)
    return [round(x) for x in (P.sum(0) * (UNIT / rows)).tolist()]


def lines(masses: list[int], seqlen: int, pattern: Any) -> Lines:
    """The fewest columns, and then the fewest diagonals, that hold what is asked for."""
    T, blocks, total = len(masses), len(masses) // BLOCK, sum(masses)
    last = max(seqlen // BLOCK - 1, 0)
    tiles = [sum(masses[b * BLOCK : (b + 1) * BLOCK]) for b in range(blocks)]

    def stands_out(j: int) -> bool:
        if pattern.estimator == "independent":
            return masses[j] > 0
        others = tiles[j // BLOCK] - masses[j]
        return masses[j] > 0 and (BLOCK - 1) * masses[j] > pattern.kappa * others

    forced = [j for j in range(T) if j < pattern.sink]
    rest = [j for j in range(T) if j >= pattern.sink and stands_out(j)]
    order = forced + sorted(rest, key=lambda j: (-masses[j], j))
    count = crossing([masses[j] for j in order], 0, total, pattern.recall_v)
    count = max(len(forced), min(count, pattern.max_v, len(order)))
    columns = sorted(order[:count])

    left, held = list(tiles), 0
    if pattern.estimator == "residual":  # nothing is counted twice
        for j in columns:
            left[j // BLOCK] -= masses[j]
            held += masses[j]
    by_distance = [left[last - d] if d <= last else 0 for d in range(blocks)]
    near = [d for d in range(blocks) if d < pattern.window]
    far = [d for d in range(blocks) if d >= pattern.window]
    order = near + sorted(far, key=lambda d: (-by_distance[d], d))
    count = crossing([by_distance[d] for d in order], held, total, pattern.recall_s)
    count = max(count, pattern.window)
    if pattern.max_s is not None:
        count = min(count, pattern.max_s)
    diagonals = closed(sorted({0, *order[:count]}), pattern.gap_close)

    of_lines = sum(
        tiles[b]
        if last - b >= 0 and last - b in diagonals
        else sum(masses[j] for j in columns if j // BLOCK == b)
        for b in range(blocks)
    )
    return Lines(columns, diagonals, of_lines / max(total, 1))


def crossing(masses: list[int], held: int, total: int, recall: float) -> int:
    """How many of the first it takes to reach a share of the total; the one that crosses counts."""
    target = -(-total * round(recall * SHARE) // SHARE)
    for n, mass in enumerate(masses, 1):
        held += mass
        if held >= target:
            return n
    return len(masses) + 1


def closed(diagonals: list[int], gap: int) -> list[int]:
    """With holes of at most `gap` filled."""
    found = set(diagonals)
    for a, b in pairwise(diagonals):
        if b - a - 1 <= gap:
            found |= set(range(a, b))
    return sorted(found)
