"""Divides the work of fused_fwd into items, which a CTA computes one after another.

An item is a sequence, a value head and a tile of V. CTA b of n has items b, b + n, ..; or, where
CTAs have equal shares, pieces of items, from a table (shares.py). Each role walks the items at its
own pace: while the state finishes one item, the first chunks of the next are loaded and solved.
Rings, and the roles that make A and P, treat the chunks of all items as one sequence of steps.
"""

from __future__ import annotations

from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.shares import count_piece_chunks, read_piece
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
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


@T.macro
def find(
    item, spans, num_tokens, num_heads, num_value_heads, num_tiles, training,
    n: T.Ref, kh: T.Ref, hv: T.Ref, i_tile: T.Ref, begin: T.Ref, length: T.Ref, num_chunks: T.Ref,
    saves: T.Ref,
):  # fmt: skip
    i_tile = item % num_tiles
    hv = item // num_tiles % num_value_heads
    n = item // num_tiles // num_value_heads
    kh = hv // (num_value_heads // num_heads)
    read_span(spans, n, num_tokens, begin, length)
    num_chunks = T.ceildiv(length, CHUNK)
    saves = 0  # one of a head's CTAs saves what they all have
    if i_tile == 0:
        saves = training


@T.macro
def locate(
    j, block, ctas, shares, spans, num_tokens, num_heads, num_value_heads, num_tiles, training,
    n: T.Ref, kh: T.Ref, hv: T.Ref, i_tile: T.Ref, begin: T.Ref, length: T.Ref, num_chunks: T.Ref,
    saves: T.Ref,
):  # fmt: skip
    """Finds the j-th item of a CTA, or its j-th piece if there are shares."""
    if shares is not None:
        read_piece(
            shares, shares.row(block, j), training,
            n, kh, hv, i_tile, begin, length, num_chunks, saves,
        )  # fmt: skip
    else:
        find(
            block + j * ctas, spans, num_tokens, num_heads, num_value_heads, num_tiles, training,
            n, kh, hv, i_tile, begin, length, num_chunks, saves,
        )  # fmt: skip


@T.macro
def count_chunks(
    items, block, ctas, shares, spans, num_tokens, num_heads, num_value_heads, num_tiles, training,
    num_chunks: T.Ref,
):  # fmt: skip
    """Sets num_chunks to the number of chunks of all items of a CTA, or of all its pieces."""
    if shares is not None:
        count_piece_chunks(shares, block, items, num_chunks)
    else:
        begin, length = T.alloc_var("int32"), T.alloc_var("int32")
        num_chunks = 0
        for j in T.serial(items):
            n = (block + j * ctas) // (num_value_heads * num_tiles)
            read_span(spans, n, num_tokens, begin, length)
            num_chunks += T.ceildiv(length, CHUNK)
