"""Equal shares of all chunks for the CTAs of fused_fwd: pieces of items, and states between CTAs.

share_table.py defines shares and pieces, and writes their tables. A CTA computes its pieces last
one first. The last one begins an item, or the CTA has nothing else; its state goes to the next CTA,
which needs it only for its own first piece, the one that it computes last. So a CTA waits for none
but the one before it, and for that only if an item is longer than a share.

shares.cuh moves a state. Its accumulator goes through memory in fp32, so the results have the bits
of items that are not cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.schedule import WARPGROUP_THREADS

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()

# Columns of a row of `pieces`: the item, its tokens here, and whether the state before the piece
# comes from the CTA before, and the state after it goes to the next one.
N, HV, KH, I_TILE, BEGIN, LENGTH, TAKES, GIVES = range(8)
PIECE_COLUMNS = 8
# Columns of a row of `shares`: the CTA's last piece, its pieces, and from GIVEN on a flag for each
# of its state warps, which is set when the state that the CTA hands on is in memory.
LAST_PIECE, NUM_PIECES, GIVEN = 0, 1, 8
SHARE_COLUMNS = 16
STATE_WARPS = WARPGROUP_THREADS // 32


class Shares(NamedTuple):
    """What the roles of a variant with shares read besides."""

    pieces: Any  # [rows, PIECE_COLUMNS]
    shares: Any  # [CTAs, SHARE_COLUMNS]
    shelves: Any  # [CTAs, state warpgroups, 64 K] fp32: states that CTAs hand on
    block: Any  # this CTA

    @property
    def num_pieces(self) -> Any:
        return number(self.shares[self.block, NUM_PIECES])

    def row(self, j: Any) -> Any:
        """Returns the row of the j-th piece that this CTA computes."""
        return number(self.shares[self.block, LAST_PIECE]) - j

    def takes(self, j: Any) -> Any:
        """Returns 1 if the state before a piece comes from the CTA before, else 0."""
        return number(self.pieces[self.row(j), TAKES])

    def gives(self, j: Any) -> Any:
        """Returns 1 if the state after a piece goes to the next CTA, else 0."""
        return number(self.pieces[self.row(j), GIVES])


def table_types(rows: Any, ctas: Any, states: int, K: int) -> tuple[Any, Any, Any]:
    """Returns the types of the tensors of `Shares`, as arguments of a kernel."""
    return (
        T.Tensor((rows, PIECE_COLUMNS), "int32"),
        T.Tensor((ctas, SHARE_COLUMNS), "int32"),
        T.Tensor((ctas, states, TILE * K), "float32"),
    )


def number(x: Any) -> Any:
    """Returns a number of a table, for the compiler to know that all lanes have the same one.

    Otherwise it would take descriptors and loops that depend on it for different ones in each lane.
    """
    return T.shfl_sync(x, 0)


@T.macro
def read_piece(shares, row, training, item):
    """Sets what `items.find` sets for an item."""
    item["n"] = number(shares.pieces[row, N])
    item["kh"] = number(shares.pieces[row, KH])
    item["hv"] = number(shares.pieces[row, HV])
    item["i_tile"] = number(shares.pieces[row, I_TILE])
    item["begin"] = number(shares.pieces[row, BEGIN])
    item["length"] = number(shares.pieces[row, LENGTH])
    item["num_chunks"] = T.ceildiv(item.length, CHUNK)
    item["saves"] = 0
    if item.i_tile == 0:
        item["saves"] = training


@T.macro
def count_piece_chunks(shares, num_pieces, num_chunks: T.Ref):
    """Sets num_chunks to the number of chunks of all pieces of a CTA."""
    num_chunks = 0
    for j in T.serial(num_pieces):
        num_chunks += T.ceildiv(number(shares.pieces[shares.row(j), LENGTH]), CHUNK)


def _hand(verb, access, K, r_s, shares, block, w):
    return T.call_extern(
        "handle",
        f"qla::{verb}_state<{K}>",
        r_s.data,
        T.access_ptr(shares.shelves[block, w, 0], access, shares.shelves.shape[2]),
        T.access_ptr(shares.shares[block, GIVEN + w * STATE_WARPS], "rw", STATE_WARPS),
    )


def give_state(K, r_s, shares, w):
    """Puts S^T of a state warpgroup where the next CTA takes it."""
    return _hand("give", "w", K, r_s, shares, shares.block, w)


def take_state(K, r_s, shares, w):
    """Waits for S^T of the CTA before, and loads it."""
    return _hand("take", "r", K, r_s, shares, shares.block - 1, w)
