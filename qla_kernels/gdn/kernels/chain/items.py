"""Divides the work of fused_fwd into items, which a CTA computes one after another.

An item is a sequence, a value head and a tile of V. CTA b of n has items b, b + n, ..; or, where
CTAs have equal shares, pieces of items, from a table (shares.py). Each role walks the items at its
own pace: while the state finishes one item, the first chunks of the next are loaded and solved.
Rings, and the roles that make A and P, treat the chunks of all items as one sequence of steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.shares import count_piece_chunks, read_piece
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.record import Record
from qla_kernels.tile.ring import Ring


class After:
    """A view of a ring whose step i is step `first` + i of the ring."""

    def __init__(self, ring: Ring, first: Any) -> None:
        self.ring, self.first, self.stages = ring, first, ring.stages

    def slot(self, i: Any) -> Any:
        return self.ring.slot(self.first + i)

    def acquire(self, i: Any) -> Any:
        return self.ring.acquire(self.first + i)

    def barrier(self, i: Any) -> Any:
        return self.ring.barrier(self.first + i)

    def commit(self, i: Any) -> Any:
        return self.ring.commit(self.first + i)

    def wait(self, i: Any) -> Any:
        return self.ring.wait(self.first + i)

    def release(self, i: Any) -> Any:
        return self.ring.release(self.first + i)


def after(rings: Any, first: Any, **firsts: Any) -> Any:
    """Returns rings as an item sees them, whose first chunk is step `first` of each.

    A ring that an item begins with another step is among `firsts`, by its name.
    """
    views = {name: ring for name, ring in vars(rings).items() if isinstance(ring, Ring)}
    return Record(**{name: After(ring, firsts.get(name, first)) for name, ring in views.items()})


class Items(NamedTuple):
    """What a CTA has to know to find its items."""

    block: Any
    ctas: Any
    shares: Any  # or None
    spans: Any
    num_tokens: Any
    num_heads: Any
    num_value_heads: Any
    num_tiles: Any
    training: Any


@T.macro
def find(items, x, item):
    item["i_tile"] = x % items.num_tiles
    item["hv"] = x // items.num_tiles % items.num_value_heads
    item["n"] = x // items.num_tiles // items.num_value_heads
    item["kh"] = item.hv // (items.num_value_heads // items.num_heads)
    read_span(items.spans, item.n, items.num_tokens, item.begin, item.length)
    item["num_chunks"] = T.ceildiv(item.length, CHUNK)
    item["saves"] = 0  # one of a head's CTAs saves what they all have
    if item.i_tile == 0:
        item["saves"] = items.training


@T.macro
def locate(items, j, item):
    """Sets `item` to the j-th item of a CTA, or to its j-th piece if there are shares."""
    if items.shares is not None:
        read_piece(items.shares, items.shares.row(j), items.training, item)
    else:
        find(items, items.block + j * items.ctas, item)


@T.macro
def count_chunks(items, num_items, num_chunks: T.Ref):
    """Sets num_chunks to the number of chunks of all items of a CTA, or of all its pieces."""
    if items.shares is not None:
        count_piece_chunks(items.shares, num_items, num_chunks)
    else:
        begin, length = T.alloc_var("int32"), T.alloc_var("int32")
        num_chunks = 0
        for j in T.serial(num_items):
            n = (items.block + j * items.ctas) // (items.num_value_heads * items.num_tiles)
            read_span(items.spans, n, items.num_tokens, begin, length)
            num_chunks += T.ceildiv(length, CHUNK)
