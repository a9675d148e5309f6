"""Implements the launches of shard.Launches for CPU tensors, in torch.

The functions walk the table tile by tile, as the kernels do. A tile is 128 query rows, or 128 keys
in the passes for dK and dV. A block that no head of a tile sees is skipped. Any other block is
computed for all heads, and masked.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from qla_kernels.sparse_ring.cpu_index import cut, scores, select, window_lse, window_mass
from qla_kernels.sparse_ring.plan import Visit, diagonals, key_walk, query_walk, table
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.sparse_ring.shard import Columns, Partial, Saved, Shard, wide

__all__ = [
    "backward_columns",
    "backward_keys",
    "backward_queries",
    "compact",
    "cut",
    "forward",
    "rounded",
    "saved",
    "scatter",
    "select",
    "table",
    "window_lse",
    "window_mass",
]


def compact(shard: Shard, k: Tensor, v: Tensor, visited: list[Visit], columns: Columns) -> None:
    """Copies rows of the visited chunks to `columns`; zeroes unused places."""
    for owner, slot in dict.fromkeys((visit.owner, visit.slot) for visit in visited):
        mine, row = _rows_of(shard, owner)
        for rows, chunk in zip(columns, (k[slot], v[slot]), strict=True):
            here = _per_head(chunk, shard).gather(2, repeat(row, "b h n -> b h n d", d=k.shape[-1]))
            rows.copy_(torch.where(mine[..., None], here, rows))
            rows.masked_fill_((shard.v_idx == shard.T)[..., None], 0)


def forward(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visited: list[Visit],
    partial: Partial,
    first: bool,
    columns: Columns | None,
    out: Tensor | None,
) -> None:
    """Merges attention to the visited slashes, and to `columns`, into `partial`; writes `out`."""
    o, lse = partial
    if o is None:
        o = torch.empty(q.shape, dtype=wide(q), device=q.device)
    if first:
        o.zero_()
        lse.fill_(-torch.inf)
    for tile in _query_tiles(shard):
        query = q[:, tile.rows]
        for part in _seen_by(shard, tile, k, v, visited, columns):
            S = scores(query, part.k, shard.scale, part.grouped)
            S = S.masked_fill(~part.seen, -torch.inf)
            new = S.logsumexp(-1)
            P = (S - new.masked_fill(new == -torch.inf, 0)[..., None]).exp()
            o_new = _weighted(P, part.v, part.grouped)
            old = lse[..., tile.rows]
            both = torch.logaddexp(old, new)
            safe = both.masked_fill(both == -torch.inf, 0)  # e^-inf for both, not e^nan
            a, b = (rearrange((x - safe).exp(), "b h t -> b t h 1") for x in (old, new))
            o[:, tile.rows] = a * o[:, tile.rows] + b * o_new
            lse[..., tile.rows] = both
    if out is not None:
        out.copy_(o)


def saved(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Saved:
    """Returns the LSE, with +inf for rows that see nothing, delta, and dO."""
    delta = einsum(o.to(wide(o)), do.to(wide(o)), "b t h d, b t h d -> b h t")
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing: P = 0
    return Saved(lse, delta if dlse is None else delta - dlse, do)


def backward_queries(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    visited: list[Visit],
    dq: Tensor | None,
    first: bool,
    columns: Columns | None,
    out: Tensor | None,
) -> None:
    """Adds dQ of the visited slashes, and of `columns`, to dq; writes `out`."""
    if dq is None:
        dq = torch.empty(q.shape, dtype=wide(q), device=q.device)
    if first:
        dq.zero_()
    for tile in _query_tiles(shard):
        query = q[:, tile.rows]
        for part in _seen_by(shard, tile, k, v, visited, columns):
            _, dS = _gradients(shard, query, saved, tile.rows, part)
            dq[:, tile.rows] += shard.scale * _weighted(dS, part.k, part.grouped)
    if out is not None:
        out.copy_(dq)


def backward_keys(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    met: list[Chunk],
    dkv: Tensor,
    first: bool,
) -> None:
    """Adds this rank's part of dK and dV of the chunks `met` to dkv."""
    if first:
        dkv.zero_()
    for chunk, total in zip(met, dkv, strict=True):
        _keys_of(shard, q, k[chunk.slot], v[chunk.slot], saved, chunk.owner, total)


def _keys_of(
    shard: Shard, q: Tensor, k: Tensor, v: Tensor, saved: Saved, owner: int, dkv: Tensor
) -> None:
    """Adds this rank's part of dK and dV of one chunk to dkv, [2, B, L, Hk, D]."""
    queries, keys = shard.positions(shard.rank), shard.positions(owner)
    for t, j0 in enumerate(shard.first_blocks(owner)):
        rows = slice(t * TILE, (t + 1) * TILE)
        walks = (key_walk(shard.table, visit, j0, shard.blocks) for visit in shard.returns(owner))
        blocks = torch.stack(list(walks)).any(0).mT  # [B, H, query blocks, 2]
        near = blocks.flatten(0, 1).any(0).any(-1).repeat_interleave(BLOCK).nonzero()[:, 0]
        seen = _elements(blocks)[..., near, :] & (keys[rows] <= queries[near, None])
        seen &= (queries < shard.seqlen)[near, None]
        part = VisibleKeys(k[:, rows], v[:, rows], seen, True)
        query, upstream = q[:, near], saved.do[:, near]
        P, dS = _gradients(shard, query, saved, near, part)
        dkv[0, :, rows] += shard.scale * _group_sum(_transposed(dS, query), k.shape[-2])
        dkv[1, :, rows] += _group_sum(_transposed(P, upstream), k.shape[-2])


def backward_columns(shard: Shard, q: Tensor, saved: Saved, columns: Columns) -> Columns:
    """Returns this rank's part of dK and dV of every vertical, [B, H, max_v, D]."""
    dk, dv = (torch.zeros_like(x, dtype=wide(q)) for x in columns)
    for tile in _query_tiles(shard):
        query, upstream = q[:, tile.rows], saved.do[:, tile.rows]
        part = _columns_seen_by(shard, tile, columns)
        P, dS = _gradients(shard, query, saved, tile.rows, part)
        n = P.shape[-1]
        dk[:, :, :n] += shard.scale * rearrange(_transposed(dS, query), "b n h d -> b h n d")
        dv[:, :, :n] += rearrange(_transposed(P, upstream), "b n h d -> b h n d")
    return Columns(dk, dv)


def scatter(shard: Shard, column_grads: Columns, owners: list[int], dkv: Tensor) -> None:
    """Adds gradients of verticals to dkv, the gradients of the chunks they lie in."""
    for owner, chunk_grads in zip(owners, dkv, strict=True):
        mine, row = (x[..., None] for x in _rows_of(shard, owner))
        for total, part in zip(chunk_grads, column_grads, strict=True):
            spread = part.new_zeros(*part.shape[:2], shard.rows, part.shape[-1])
            spread.scatter_add_(2, row.expand_as(part), torch.where(mine, part, 0))
            total += _group_sum(rearrange(spread, "b h l d -> b l h d"), total.shape[-2])


def rounded(sums: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns dK and dV of a chunk in dtype, as new tensors."""
    return [x.to(dtype, copy=True) for x in sums]


class _Tile(NamedTuple):
    rows: slice
    i0: int  # its first block in the sequence
    token: Tensor  # [128]


class VisibleKeys(NamedTuple):
    """Keys and values for the queries of a tile, and the mask between them."""

    k: Tensor  # [B, n, Hk, D], or [B, H, n, D] for the columns
    v: Tensor
    seen: Tensor  # bool [B, H, queries, n]
    grouped: bool  # heads of a group share k and v


def _query_tiles(shard: Shard) -> Iterator[_Tile]:
    token = shard.positions(shard.rank)
    for t, i0 in enumerate(shard.first_blocks(shard.rank)):
        rows = slice(t * TILE, (t + 1) * TILE)
        yield _Tile(rows, i0, token[rows])


def _seen_by(
    shard: Shard,
    tile: _Tile,
    k: Tensor,
    v: Tensor,
    visited: list[Visit],
    columns: Columns | None,
) -> Iterator[VisibleKeys]:
    """Yields the keys and values that a tile's queries see: of each visit, then the columns."""
    for visit in visited:
        blocks = query_walk(shard.table, visit, tile.i0, shard.blocks)
        near = blocks.flatten(0, 2).any(0).repeat_interleave(BLOCK).nonzero()[:, 0]
        if len(near):
            key = shard.positions(visit.owner)[near]
            seen = _elements(blocks)[..., near] & (key <= tile.token[:, None])
            seen &= (tile.token < shard.seqlen)[:, None]
            yield VisibleKeys(k[visit.slot][:, near], v[visit.slot][:, near], seen, True)
    if columns is not None and columns.k.shape[2]:
        yield _columns_seen_by(shard, tile, columns)


def _columns_seen_by(shard: Shard, tile: _Tile, columns: Columns) -> VisibleKeys:
    """Returns the columns, and which of them each row of a tile sees.

    A row sees a column here if the column's block lies before the row's own block, and no slash of
    the head covers the pair.
    """
    most = int(shard.v_cnt.max())
    block = (shard.v_idx[..., :most] // BLOCK).long()[..., None, :]
    distance = (tile.token // BLOCK)[:, None] - block
    active = diagonals(shard.d_bits, shard.T // BLOCK)[..., None, :].expand(
        *distance.shape[:-1], -1
    )
    covered = active.gather(-1, distance.clamp(min=0))
    seen = (distance > 0) & ~covered & (tile.token < shard.seqlen)[:, None]
    return VisibleKeys(columns.k[:, :, :most], columns.v[:, :, :most], seen, False)


def _gradients(
    shard: Shard, q: Tensor, saved: Saved, rows: slice | Tensor, part: VisibleKeys
) -> tuple[Tensor, Tensor]:
    """Returns P = e^{S - LSE}, 0 for unseen pairs, and dS / scale = P (dO v^T - delta).

    Both are [B, H, queries, keys].
    """
    lse, delta = (x[..., rows, None] for x in (saved.lse, saved.delta))
    S = scores(q, part.k, shard.scale, part.grouped)
    P = (S - lse).exp().masked_fill(~part.seen, 0)
    return P, P * (scores(saved.do[:, rows], part.v, 1.0, part.grouped) - delta)


def _rows_of(shard: Shard, owner: int) -> tuple[Tensor, Tensor]:
    """Returns which verticals lie in a rank's chunk, and their rows in it, else 0.

    Both results are [B, H, max_v].
    """
    token = shard.v_idx.long()
    mine = (token < shard.T) & (shard.layout.owner(token, shard.T) == owner)
    return mine, torch.where(mine, shard.layout.local(token, shard.T), 0)


def _elements(blocks: Tensor) -> Tensor:
    return blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


def _weighted(P: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """Returns P v, [B, queries, H, D]; serves for dS k as well."""
    if not grouped:
        return einsum(P, v.to(P.dtype), "b h i j, b h j d -> b i h d")
    per_group = rearrange(P, "b (n g) i j -> b n g i j", n=v.shape[2])
    o = einsum(per_group, v.to(P.dtype), "b n g i j, b j n d -> b i n g d")
    return rearrange(o, "b i n g d -> b i (n g) d")


def _transposed(P: Tensor, x: Tensor) -> Tensor:
    """Returns P^T x, [B, keys, H, D]."""
    return einsum(P, x.to(P.dtype), "b h i j, b i h d -> b j h d")


def _group_sum(per_head: Tensor, num_kv_heads: int) -> Tensor:
    return rearrange(per_head, "b j (n g) d -> b j n g d", n=num_kv_heads).sum(3)


def _per_head(chunk: Tensor, shard: Shard) -> Tensor:
    """Returns the keys or values [B, L, Hk, D] of a chunk for each query head, [B, H, L, D]."""
    group = shard.v_cnt.shape[1] // chunk.shape[2]
    return repeat(chunk, "b l n d -> b (n g) l d", g=group)
