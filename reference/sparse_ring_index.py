"""Which lines of a mask are worth computing, from the attention of the last complete block.

    1. P = softmax over the observed block's queries, causal.
    2. m[j], int: the sum of P's column j, of which a block's 64 rows together have 2^30.
    3. Verticals: the fewest columns that hold a share `recall_v` of the mass.
    4. Slashes: the fewest block diagonals that hold a share `recall_s`; with `residual` of what the
       verticals leave over, with `independent` of everything.

Masses are integers, so their sums do not depend on the order of summation, and everybody who has
the same masses chooses the same lines. The block is 64 tokens and aligned, so the mass of its tile
d blocks back is exactly what computing diagonal d recovers.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from .sparse_ring import BLOCK, Index, scores

UNIT = 30  # the window's mass is 2^UNIT
SHARE = 20  # recall targets are integers of 2^-SHARE


@dataclass(frozen=True)
class Budget:
    """How many lines a head gets. A line that crosses a target is taken; forced ones always are."""

    recall_v: float = 0.95
    recall_s: float = 0.95
    max_v: int = 4096
    max_s: int | None = None
    sink: int = 4  # the first columns are forced
    window: int = 2  # the first diagonals are forced
    estimator: Literal["residual", "independent"] = "residual"
    kappa: int = 8  # residual: a column stands out at kappa times its tile's other columns
    gap_close: int = 0  # holes of at most this many diagonals are filled


def observed(seqlen: int) -> range:
    """The last complete block, or the tokens there are."""
    last = max(seqlen // BLOCK - 1, 0)
    return range(last * BLOCK, min(seqlen, (last + 1) * BLOCK))


def masses(q: Tensor, k: Tensor, seqlen: int | None = None, scale: float | None = None) -> Tensor:
    """m[j] = rint(2^30 mean_rows P[:, j]), int64 [B, H, T]."""
    rows = observed(q.shape[1] if seqlen is None else seqlen)
    token = torch.arange(k.shape[1], device=k.device)
    later = token > token[rows.start : rows.stop, None]
    S = scores(q[:, rows.start : rows.stop], k, scale).masked_fill(later, -torch.inf)
    share: Tensor = S.softmax(-1).mean(2)
    return (share * (1 << UNIT)).round().long()


def select(m: Tensor, seqlen: int, budget: Budget) -> Index:
    """The lines that `budget` buys, of masses [B, H, T]."""
    heads = [_select_head(head.tolist(), seqlen, budget) for head in m.flatten(0, 1)]
    T = m.shape[-1]
    index = Index(torch.zeros(len(heads), T).bool(), torch.zeros(len(heads), T // BLOCK).bool())
    for h, (columns, diagonals) in enumerate(heads):
        index.columns[h, columns] = True
        index.diagonals[h, diagonals] = True
    return Index(*(x.view(*m.shape[:2], -1).to(m.device) for x in index))


def _select_head(m: list[int], seqlen: int, budget: Budget) -> tuple[list[int], list[int]]:
    """Returns the columns and the diagonals of one head, ascending."""
    blocks, last = len(m) // BLOCK, observed(seqlen).start // BLOCK
    tile = [sum(m[b * BLOCK : (b + 1) * BLOCK]) for b in range(blocks)]
    residual = budget.estimator == "residual"

    def candidate(j: int) -> bool:
        if residual:  # m > kappa times the mean of the 63 others
            return (BLOCK - 1 + budget.kappa) * m[j] > budget.kappa * tile[j // BLOCK]
        return m[j] > 0

    forced = list(range(min(budget.sink, len(m))))
    others = [j for j in range(len(m)) if j >= budget.sink and candidate(j)]
    target = need(sum(tile), budget.recall_v)
    columns = _fewest(forced, others, dict(enumerate(m)), target, budget.max_v)

    left = tile.copy()
    if residual:
        for j in columns:
            left[j // BLOCK] -= m[j]
    mass = {d: left[last - d] if d <= last else 0 for d in range(blocks)}
    forced = list(range(min(budget.window, blocks)))
    others = [d for d in range(blocks) if d >= budget.window]
    target = need(sum(tile), budget.recall_s) - (sum(m[j] for j in columns) if residual else 0)
    found = {0, *_fewest(forced, others, mass, target, budget.max_s or blocks)}
    for a, b in pairwise(sorted(found)):
        if b - a - 1 <= budget.gap_close:
            found.update(range(a, b))
    return columns, sorted(found)


def need(total: int, recall: float) -> int:
    """The mass that a share `recall` of `total` asks for, rounded up."""
    share = round(recall * (1 << SHARE))
    return -(-total * share >> SHARE)


def _fewest(
    forced: list[int], others: list[int], mass: dict[int, int], target: int, limit: int
) -> list[int]:
    """The forced lines, then the heaviest until `target` is reached; ties go to the lower index."""
    ordered = forced + sorted(others, key=lambda line: (-mass[line], line))
    held, n = 0, 0
    while n < len(ordered) and (n == 0 or held < target):
        held += mass[ordered[n]]
        n += 1
    return sorted(ordered[: max(len(forced), min(n, limit))])
