"""Selects lines from attention masses by sorts and sums of integers, without a host sync.

The functions run on tensors of any device. Integer sums do not depend on their order, so ranks with
the same masses choose exactly the same lines. Masses are below 2^31. A sort key holds a mass and,
to break ties, an index.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.plan import pack
from qla_kernels.sparse_ring.shapes import BLOCK, OBSERVED, SHARE

INDEX_BITS = 31
ABOVE_EVERY_MASS = 1 << 31  # a key above every mass


class Candidates(NamedTuple):
    """Holds the columns from which each head's verticals are chosen, and the columns' masses.

    The columns of a head are in any order.
    """

    column: Tensor  # int32 [B, H, n]; T where there is none
    mass: Tensor  # int32 [B, H, n]; 0 where there is none


def last_block(seqlen: int) -> int:
    """Returns the number of the observed block: the last complete block, or else block 0."""
    return max(seqlen // BLOCK - 1, 0)


def observed_rows(seqlen: int) -> int:
    """Returns how many queries an index is estimated from."""
    return min(seqlen, OBSERVED)


def cut(mass: Tensor, position: Tensor, tile: Tensor, T: int, pattern: VerticalSlash) -> Candidates:
    """Returns, as Candidates, each head's columns of this rank that can be among the best of all.

    These are the best max_v of the local keys that qualify: first forced ones, which are those of
    tokens below pattern.sink, then the others by falling mass. Every forced key qualifies. Another
    one qualifies, with the estimator "residual", if its mass is above kappa times the mean mass of
    the 63 other keys of its block, and with "independent" if its mass is above 0. The result is
    [B, H, min(L, max_v)], with column T and mass 0 where no key is left.

    Args:
        mass: int32 [B, H, L], the mass of each local key.
        position: [L], the token of each local key.
        tile: int32 [B, H, L / 64], the sum of `mass` over each block.
        T: tokens of the sequence, with padding.
        pattern: gives sink, estimator, kappa and max_v.
    """
    m, around = mass.long(), tile.long().repeat_interleave(BLOCK, -1)
    forced = position < pattern.sink
    stands_out = m > 0
    if pattern.estimator == "residual":
        stands_out = (BLOCK - 1 + pattern.kappa) * m > pattern.kappa * around
    index = torch.where(forced | stands_out, position.int(), T)
    candidates = Candidates(index, torch.where(index < T, mass, 0))
    best = _best_first(candidates, T, pattern)[..., : pattern.max_v]
    return Candidates(*(x.gather(-1, best) for x in candidates))


def select(
    candidates: Candidates, tile: Tensor, seqlen: int, T: int, pattern: VerticalSlash
) -> VSIndex:
    """Returns the index of the lines that the pattern's targets and limits give.

    Args:
        candidates: the candidates of all ranks.
        tile: int32 [B, H, T / 64], the mass of each block, in the order of the sequence.
        seqlen, T: tokens without and with padding.
        pattern: the targets and limits.
    """
    tile = tile.long()
    total = tile.sum(-1, keepdim=True)
    order = _best_first(candidates, T, pattern)
    index, mass = (x.gather(-1, order) for x in candidates)
    mass = mass.long()
    real = (index < T).sum(-1, keepdim=True)
    forced = (index < pattern.sink).sum(-1, keepdim=True)
    count = _fewest(mass, 0, _need(total, pattern.recall_v))
    count = count.clamp(max=pattern.max_v).minimum(real).maximum(forced)
    chosen = torch.arange(index.shape[-1], device=index.device) < count
    column_mass = torch.where(chosen, mass, 0)
    capacity = min(pattern.max_v, T)
    v_idx = torch.where(chosen, index, T).sort(-1).values[..., :capacity]
    v_idx = torch.nn.functional.pad(v_idx, (0, capacity - v_idx.shape[-1]), value=T)

    block = torch.where(chosen, index // BLOCK, 0).long()
    in_columns = torch.zeros_like(tile).scatter_add(-1, block, column_mass)
    left, start = tile, torch.zeros_like(total)
    if pattern.estimator == "residual":
        left, start = tile - in_columns, column_mass.sum(-1, keepdim=True)
    active = _diagonals(left, start, _need(total, pattern.recall_s), seqlen, pattern)
    held = torch.where(_by_distance(active, seqlen), tile, in_columns).sum(-1)
    recall = (held.double() / total[..., 0].clamp(min=1)).float()
    return VSIndex(v_idx, count[..., 0].int(), pack(active), recall, T)


def _diagonals(
    left: Tensor, start: Tensor, need: Tensor, seqlen: int, pattern: VerticalSlash
) -> Tensor:
    """Returns the active diagonals, bool [B, H, blocks]: the fewest that reach the target.

    `left` is the mass of each block that a diagonal may claim, `start` the mass that columns hold
    already, and `need` the target. Limits, forced diagonals and closed gaps are applied.
    """
    distance = torch.arange(left.shape[-1], device=left.device)
    last = last_block(seqlen)
    mass = torch.where(distance <= last, left[..., (last - distance).clamp(min=0)], 0)
    key = torch.where(distance < pattern.window, ABOVE_EVERY_MASS, mass)
    order = _descending(key, distance)
    count = _fewest(mass.gather(-1, order), start, need)
    count = count.clamp(pattern.window, pattern.max_s)
    active = torch.zeros_like(key, dtype=torch.bool).scatter(-1, order, distance < count)
    active[..., 0] = True
    if pattern.gap_close:
        far = 2 * len(distance) + pattern.gap_close  # no line: the hole never counts as closed
        before = torch.where(active, distance, -far).cummax(-1).values
        after = torch.where(active, distance, far).flip(-1).cummin(-1).values.flip(-1)
        active |= after - before - 1 <= pattern.gap_close
    return active


def _by_distance(active: Tensor, seqlen: int) -> Tensor:
    """Returns for each block of keys whether the observed block sees it by an active diagonal."""
    back = last_block(seqlen) - torch.arange(active.shape[-1], device=active.device)
    return active[..., back.clamp(min=0)] & (back >= 0)


def share(recall: float) -> int:
    """Returns a recall target as an integer, in units of 2^-SHARE."""
    return round(recall * (1 << SHARE))


def _need(total: Tensor, recall: float) -> Tensor:
    """Returns the share `recall` of a total mass, rounded up to an integer."""
    return (total * share(recall) + (1 << SHARE) - 1) >> SHARE


def _fewest(mass: Tensor, start: Tensor | int, need: Tensor) -> Tensor:
    """Returns the least n >= 1 such that start + the sum of the first n masses reaches `need`."""
    return (mass.cumsum(-1) + start < need).sum(-1, keepdim=True) + 1


def _best_first(candidates: Candidates, T: int, pattern: VerticalSlash) -> Tensor:
    """Returns the order of candidates: forced columns by index, then columns by falling mass.

    Equal masses are ordered by index. Places without a column come last.
    """
    key = torch.where(candidates.column < pattern.sink, ABOVE_EVERY_MASS, candidates.mass.long())
    return _descending(torch.where(candidates.column < T, key, -1), candidates.column)


def _descending(key: Tensor, index: Tensor) -> Tensor:
    """Returns the order by falling key, and by rising index if keys are equal; keys are < 2^32."""
    ties = (1 << INDEX_BITS) - 1 - index.long()
    return (key << INDEX_BITS | ties).argsort(-1, descending=True)
