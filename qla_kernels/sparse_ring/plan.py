"""Makes the tables from which a launch finds its blocks: diagonals of each head, and visits.

A query tile is two local blocks of 64 rows, at blocks i0 and i0 + gap of the sequence. A table
entry is (e, b0, b1). The tile's first 64 rows see key block i0 - e if b0, its last 64 rows if b1.
With D the set of the head's diagonals this means

    b0 = [e in D]        b1 = [e + gap in D]        -gap <= e < blocks.

In a layout with stripes of s blocks, entry e of any tile of rank r meets keys of rank
(r - ceil(e / s)) mod world. The number ceil(e / s) mod world is the entry's bucket. Entries are
sorted by bucket, and then by e, so all entries that concern one visiting chunk lie in one bucket,
between two bounds. The backward uses the same table: there key tile (j0, j0 + gap) meets query
block j0 + e + gap, with the bits swapped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.shapes import BLOCK, WORD


class Table(NamedTuple):
    """The table of diagonals of every head, for one layout.

    It is rebuilt from the index in each forward and each backward, and never saved between them.
    """

    entries: Tensor  # int32 [B, H, blocks + gap]: (e + gap) << 2 | b1 << 1 | b0; unused ones are 0
    bounds: Tensor  # int32 [B, H, buckets + 1]: bucket b has entries bounds[b] to bounds[b + 1]
    gap: int
    stripe_blocks: int
    buckets: int


class Visit(NamedTuple):
    """One range of blocks that a launch meets, and the bucket of table entries that apply to it."""

    owner: int  # rank that holds the blocks
    slot: int  # slot of the chunk in its buffer
    bucket: int
    first: int  # first block of the range, in the sequence
    end: int  # the block behind the range
    row0: int  # local block of `first`


def visits(layout: Layout, T: int, rank: int, owner: int, slot: int) -> list[Visit]:
    """Returns the visits of the chunk of `owner`, in slot `slot`, by queries of `rank`.

    There is one visit for each range of the owner's shard.
    """
    bucket = (rank - owner) % layout.buckets
    return [Visit(owner, slot, bucket, *where) for where in layout.ranges(owner, T)]


def returns(layout: Layout, T: int, rank: int, owner: int, slot: int = 0) -> list[Visit]:
    """Returns the visits of queries of `rank` by the chunk of `owner`, for the backward's keys.

    The bucket is that of `visits`; the ranges are those of the shard of `rank`.
    """
    bucket = (rank - owner) % layout.buckets
    return [Visit(rank, slot, bucket, *where) for where in layout.ranges(rank, T)]


def diagonals(d_bits: Tensor, blocks: int) -> Tensor:
    """Returns bool [B, H, blocks], unpacked from the bits that `pack` makes."""
    bit = torch.arange(WORD, dtype=torch.int32, device=d_bits.device)
    return (d_bits[..., None] >> bit & 1).bool().flatten(-2)[..., :blocks]


def pack(active: Tensor) -> Tensor:
    """Returns int32 [B, H, ceil(blocks / 32)]: diagonal d is bit d % 32 of word d // 32."""
    padding = -active.shape[-1] % WORD
    padded = torch.nn.functional.pad(active, (0, padding)).view(*active.shape[:-1], -1, WORD)
    weight = torch.arange(WORD, device=active.device)
    return (padded.long() << weight).sum(-1).int()  # bit 31 becomes the sign


def table(d_bits: Tensor, T: int, layout: Layout) -> Table:
    """Returns the table of diagonals of each head, from the bits of an index."""
    blocks, gap, s = T // BLOCK, layout.gap, layout.stripe_blocks
    e = torch.arange(-gap, blocks, device=d_bits.device)
    bucket = -(-e // s) % layout.buckets
    order = (bucket * len(e) + e + gap).argsort()  # depends on shapes alone, not on contents
    e, bucket = e[order], bucket[order]
    active = torch.nn.functional.pad(diagonals(d_bits, blocks), (gap, gap))  # from -gap on
    b0, b1 = active[..., e + gap], active[..., e + 2 * gap]
    kept = b0 | b1
    place = torch.where(kept, kept.cumsum(-1) - 1, len(e))
    entries = kept.new_zeros(*kept.shape[:-1], len(e) + 1, dtype=torch.int32)  # the last is dropped
    words = ((e + gap) << 2).int() | b1.int() << 1 | b0.int()
    entries.scatter_(-1, place, words)
    ends = torch.arange(layout.buckets, device=e.device)[:, None] >= bucket  # [buckets, entries]
    bounds = (kept[..., None, :] & ends).sum(-1, dtype=torch.int32)
    bounds = torch.nn.functional.pad(bounds, (1, 0))
    return Table(entries[..., :-1], bounds, gap, s, layout.buckets)


def query_walk(table: Table, visit: Visit, i0: int, chunk_blocks: int) -> Tensor:
    """Returns which blocks of a chunk each half of a query tile sees.

    The result is bool [B, H, 2, chunk_blocks]; the tile begins at block i0 of the sequence.
    """
    e, bits, mine = _bucket(table, visit)
    return _seen(table, visit, i0 - e, bits, mine, chunk_blocks)


def key_walk(table: Table, visit: Visit, j0: int, shard_blocks: int) -> Tensor:
    """Returns which query blocks of a shard see each half of a key tile.

    The result is bool [B, H, 2, shard_blocks]; the tile begins at block j0 of the sequence.
    """
    e, bits, mine = _bucket(table, visit)
    return _seen(table, visit, j0 + e + table.gap, bits.flip(-2), mine, shard_blocks)


def _bucket(table: Table, visit: Visit) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the entries' e and (b0, b1), and which entries are in the visit's bucket.

    Shapes are [B, H, entries], [B, H, 2, entries] and [B, H, entries].
    """
    x = table.entries
    at = torch.arange(x.shape[-1], device=x.device)
    start, end = (table.bounds[..., visit.bucket + n, None] for n in (0, 1))
    return (
        (x >> 2) - table.gap,
        torch.stack([x & 1, x >> 1 & 1], -2).bool(),
        (start <= at) & (at < end),
    )


def _seen(
    table: Table, visit: Visit, block: Tensor, bits: Tensor, mine: Tensor, num_blocks: int
) -> Tensor:
    mine = mine & (visit.first <= block) & (block < visit.end)
    inside = block - visit.first
    turn = table.stripe_blocks * table.buckets
    local = visit.row0 + inside // turn * table.stripe_blocks + inside % table.stripe_blocks
    place = torch.where(mine, local, num_blocks).long()[..., None, :].expand(bits.shape)
    seen = bits.new_zeros(*bits.shape[:-1], num_blocks + 1)
    return seen.scatter_(-1, place, bits)[..., :-1]
