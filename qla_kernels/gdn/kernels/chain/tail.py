"""Roles of anchored_fwd that find an item and load it: its anchor, and its tail's rows.

anchored_fwd.py states the steps, with the numbers used here. A row of its table `steps` is a
sequence's slot, or -1; 128 times the slot plus the place in it of its tail's first token, 0 or 64;
the number of tokens in the tail before this step; and the number of new ones. A kernel of this
package made it, so what it says lies inside the tensors. The tail's second chunk is in the other
half of the slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.shapes import NEW_TOKENS, STEP_COLUMNS, TAIL_PLACES
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled

TAIL_ROWS = 16  # rows of k or v that one TMA copy loads
TAIL_COLUMNS = 64  # columns of it: 128 bytes


class PlacedGates:
    """A view of gates [slots, places, heads] as [slots * places, heads], whatever slots' stride."""

    def __init__(self, x: Any) -> None:
        self.x, self.dtype = x, x.dtype

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        row, head = at
        return self.x[row // TAIL_PLACES, row % TAIL_PLACES, head]


class Walk(NamedTuple):
    """An item as digits, from the fastest on: tile, value head of the key head, key head, sequence.

    A CTA adds the digits of `ctas` to those of its item. Finding digits takes four divisions, each
    of them a long chain of dependent instructions, so a role does it twice and not for every item.
    """

    at: Any  # [4] digits of the next item
    by: Any  # [4] digits of the number of CTAs
    sizes: tuple[Any, Any, Any]  # tiles, value heads a key head, key heads
    steps: Any  # the table
    r_step: Any  # the next item's row of it


@T.macro
def put_digits(x, sizes, digits):
    rest = T.alloc_var("int32")
    rest = x
    for i, size in enumerate(sizes):
        digits[i] = rest % size
        rest = rest // size
    digits[3] = rest


@T.macro
def read_step(walk):
    """Reads the next item's row of `steps`; its numbers arrive while this one is computed."""
    n = walk.at[3]
    for i in T.unroll(STEP_COLUMNS):
        walk.r_step[i] = walk.steps[T.min(n, walk.steps.shape[0] - 1), i]


@T.macro
def begin_walk(block, ctas, walk):
    put_digits(block, walk.sizes, walk.at)
    put_digits(ctas, walk.sizes, walk.by)
    read_step(walk)


@T.macro
def find(walk, item):
    """Sets an item's sequence, heads and columns, and what its row says; reads the next one's."""
    item["i_tile"] = walk.at[0]
    item["kh"] = walk.at[2]
    item["hv"] = item.kh * walk.sizes[1] + walk.at[1]
    item["n"] = walk.at[3]
    item["slot"] = walk.r_step[0]
    item["row0"] = walk.r_step[1]
    item["kept"] = walk.r_step[2]
    item["count"] = walk.r_step[3]
    item["num_chunks"] = 0
    if item.slot >= 0:
        item["num_chunks"] = T.ceildiv(item.kept + item.count, CHUNK)
    item["num_chunks"] = T.shfl_sync(item.num_chunks, 0)  # uniform, and known to be
    for i in T.unroll(4):
        walk.at[i] += walk.by[i]
    for i, size in enumerate(walk.sizes):
        if walk.at[i] >= size:
            walk.at[i] -= size
            walk.at[i + 1] += 1
    read_step(walk)


@T.macro
def fetch_rows(x, head, column, width, shared, ring, i, first, rows):
    """Loads `rows` rows of x [slots, places, heads, size], in boxes of 16 x 64."""
    ring.acquire(i)
    slot, row = first // TAIL_PLACES, first % TAIL_PLACES
    for b in rolled(T.ceildiv(rows, TAIL_ROWS)):
        for p in T.unroll(width // TAIL_COLUMNS):
            T.tma_copy(
                x[
                    slot,
                    row + b * TAIL_ROWS : row + b * TAIL_ROWS + TAIL_ROWS,
                    head,
                    column + p * TAIL_COLUMNS : column + p * TAIL_COLUMNS + TAIL_COLUMNS,
                ],
                shared[
                    ring.slot(i),
                    b * TAIL_ROWS : b * TAIL_ROWS + TAIL_ROWS,
                    p * TAIL_COLUMNS : p * TAIL_COLUMNS + TAIL_COLUMNS,
                ],
                barrier=ring.barrier(i),
            )
    ring.commit(i)


@T.macro
def load_k(K, q, k, s, ring, item, tokens_each):
    num_chunks, tok0, row0 = item.num_chunks, item.n * tokens_each, item.row0
    length, kh = item.kept + item.count, item.kh
    for i in rolled(num_chunks):  # 1
        rows = T.min(length - i * CHUNK, CHUNK)
        fetch_rows(k, kh, 0, K, s.k, ring.k, i, T.bitwise_xor(row0, i * CHUNK), rows)
        ring.q.acquire(i)
        T.tma_copy(
            q[tok0 : tok0 + NEW_TOKENS, kh, 0:K],
            s.q[ring.q.slot(i), :, :],
            barrier=ring.q.barrier(i),
        )
        ring.q.commit(i)


@T.macro
def load_s(variant, anchors, s, ring, item):
    num_chunks, slot, hv = item.num_chunks, item.slot, item.hv
    v0 = item.i_tile * variant.tile_v
    if num_chunks > 0:  # 2
        for w in rolled(variant.states):
            ring.s.acquire(w)
            T.tma_copy(
                anchors[slot, hv, 0 : variant.K, v0 + w * TILE : v0 + w * TILE + TILE],
                s.s[ring.s.slot(w), :, :],
                barrier=ring.s.barrier(w),
            )
            ring.s.commit(w)


@T.macro
def load_v(variant, v, s, ring, item):
    num_chunks, row0, length = item.num_chunks, item.row0, item.kept + item.count
    hv, v0 = item.hv, item.i_tile * variant.tile_v
    for i in rolled(num_chunks):  # 2
        rows = T.min(length - i * CHUNK, CHUNK)
        row = T.bitwise_xor(row0, i * CHUNK)
        fetch_rows(v, hv, v0, variant.tile_v, s.v, ring.v, i, row, rows)
