"""Implements the index's launches of shard.Launches for CPU tensors, in torch."""

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor

from qla_kernels.sparse_ring import select as selection
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.select import Candidates
from qla_kernels.sparse_ring.shapes import BLOCK, UNIT
from qla_kernels.sparse_ring.shard import wide

KEYS_AT_ONCE = 8192  # keys whose scores with the observed queries are held at a time


def window_lse(q_obs: Tensor, k: Tensor, block: Tensor, last: int, scale: float) -> Tensor:
    """Returns LSEs of the observed queries over parts of the local keys, [parts, B, H, rows]."""
    return torch.stack([S.logsumexp(-1) for S in _window(q_obs, k, block, last, scale)])


def window_mass(
    q_obs: Tensor, k: Tensor, block: Tensor, last: int, lse: Tensor, scale: float
) -> Tensor:
    """Returns the observed attention of each local key as integers, int32 [B, H, L]."""
    unit, lse = (1 << UNIT) / q_obs.shape[1], lse.logsumexp(0)
    parts = [
        (S - lse[..., None]).exp().sum(2).mul(unit).round().int()
        for S in _window(q_obs, k, block, last, scale)
    ]
    return torch.cat(parts, -1)


def cut(mass: Tensor, block: Tensor, T: int, pattern: VerticalSlash) -> tuple[Candidates, Tensor]:
    """Returns this rank's best columns, and the mass of each of its blocks."""
    tile = mass.view(*mass.shape[:2], -1, BLOCK).sum(-1, dtype=torch.int32)
    return selection.cut(mass, _tokens(block), tile, T, pattern), tile


def select(
    candidates: Candidates, tile: Tensor, seqlen: int, T: int, pattern: VerticalSlash
) -> VSIndex:
    """Returns the index of the lines that the pattern's targets and limits give."""
    return selection.select(candidates, tile, seqlen, T, pattern)


def _window(q_obs: Tensor, k: Tensor, block: Tensor, last: int, scale: float) -> Iterator[Tensor]:
    """Yields scores of the observed queries, [B, H, rows, keys], for KEYS_AT_ONCE keys at a time.

    A score is -inf if its query does not see the key.
    """
    query = last * BLOCK + torch.arange(q_obs.shape[1], device="cpu")[:, None]
    parts = zip(
        torch.split(k, KEYS_AT_ONCE, 1), torch.split(_tokens(block), KEYS_AT_ONCE), strict=True
    )
    for keys, token in parts:
        yield scores(q_obs, keys, scale).masked_fill(token > query, -torch.inf)


def _tokens(block: Tensor) -> Tensor:
    return (block[:, None] * BLOCK + torch.arange(BLOCK, device="cpu")).flatten()


def scores(q: Tensor, k: Tensor, scale: float, grouped: bool = True) -> Tensor:
    """Returns scale q k^T, [B, H, queries, keys]; serves for dO v^T as well."""
    dtype = wide(q)
    if not grouped:
        return scale * einsum(q.to(dtype), k.to(dtype), "b i h d, b h j d -> b h i j")
    per_group = rearrange(q.to(dtype), "b i (n g) d -> b n g i d", n=k.shape[2])
    S = einsum(per_group, k.to(dtype), "b n g i d, b j n d -> b n g i j")
    return scale * rearrange(S, "b n g i j -> b (n g) i j")
