"""What every launch of a call on one rank has in common, and which module has the launches."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.plan import Table, Visit, returns, visits
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.select import Candidates
from qla_kernels.sparse_ring.shapes import BLOCK, TILE


class Shard(NamedTuple):
    """One rank's view of a call. Rows from seqlen on are padding: their o is 0, their LSE -inf."""

    layout: Layout
    rank: int
    T: int  # tokens of all ranks, with padding
    seqlen: int
    scale: float
    v_idx: Tensor  # the lines, as VSIndex has them
    v_cnt: Tensor
    d_bits: Tensor
    table: Table

    @property
    def rows(self) -> int:
        return self.T // self.layout.world

    @property
    def blocks(self) -> int:
        return self.rows // BLOCK

    def first_blocks(self, rank: int) -> list[int]:
        """The block of the sequence that each tile of a rank's shard begins with."""
        rows = range(0, self.rows, TILE)
        return [self.layout.position(rank, row, self.T) // BLOCK for row in rows]

    def positions(self, rank: int) -> Tensor:
        return self.layout.positions(self.T, rank).to(self.v_idx.device)

    def visits(self, owner: int, slot: int = 0) -> list[Visit]:
        return visits(self.layout, self.T, self.rank, owner, slot)

    def returns(self, owner: int, slot: int = 0) -> list[Visit]:
        return returns(self.layout, self.T, self.rank, owner, slot)


def shard_of(
    layout: Layout, rank: int, T: int, seqlen: int, scale: float, lines: Sequence[Tensor]
) -> Shard:
    """`lines` are v_idx, v_cnt and d_bits of an index, as operators and autograd hand them on."""
    v_idx, v_cnt, d_bits = lines
    made = tiles(d_bits.device).table(d_bits, T, layout)
    return Shard(layout, rank, T, seqlen, scale, v_idx, v_cnt, d_bits, made)


class Columns(NamedTuple):
    """The rows of k and v that each head's verticals need, in the order of v_idx; the rest is 0."""

    k: Tensor  # [B, H, max_v, D]
    v: Tensor  # [B, H, max_v, D]


class Partial(NamedTuple):
    """The attention to what was visited so far."""

    o: Tensor | None  # [B, L, H, D], fp32; None where one launch meets everything
    lse: Tensor  # [B, H, L], natural log, fp32


class Saved(NamedTuple):
    """What a launch of the backward reads of the forward, as `saved` made it."""

    lse: Tensor  # [B, H, L], +inf for a row that sees nothing; base 2 on a GPU
    delta: Tensor  # [B, H, L], rowsum(dO O) - dLSE
    do: Tensor  # [B, L, H, D]


class Tiles(Protocol):
    """The launches. cpu.py has them for CPU tensors.

    A chunk is k or v of one rank, [B, L, Hk, D]; several lie in the slots of a buffer, and a visit
    names its slot. `first` says that accumulators hold nothing yet and are not to be read.
    """

    def table(self, d_bits: Tensor, T: int, layout: Layout) -> Table:
        """The diagonals of every head, as plan.table has them."""
        ...

    def window_lse(
        self, q_obs: Tensor, k: Tensor, block: Tensor, last: int, scale: float
    ) -> Tensor:
        """LSE of the observed queries over local keys, fp32 [B, H, rows].

        `block` is int32 [L / 64], the number in the sequence of each block of keys; the observed
        block is `last`.
        """
        ...

    def window_mass(
        self, q_obs: Tensor, k: Tensor, block: Tensor, last: int, lse: Tensor, scale: float
    ) -> Tensor:
        """Column sums of the window's attention, 2^30 in total, int32 [B, H, L]."""
        ...

    def cut(
        self, mass: Tensor, block: Tensor, T: int, pattern: VerticalSlash
    ) -> tuple[Candidates, Tensor]:
        """A rank's best columns, and int32 [B, H, L / 64], the mass of each block."""
        ...

    def select(
        self, found: Candidates, tile: Tensor, seqlen: int, T: int, pattern: VerticalSlash
    ) -> VSIndex:
        """The lines that the pattern's budget buys; `tile` is in the order of the sequence."""
        ...

    def compact(
        self, shard: Shard, k: Tensor, v: Tensor, visited: list[Visit], columns: Columns
    ) -> None:
        """Copy the rows that verticals need of the visited chunks; rows of no vertical become 0."""
        ...

    def forward(
        self,
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
        """Merge the attention to the visited slashes, and to the columns, into `partial`.

        The last launch of a call has `out`, and writes o to it, rounded once.
        """
        ...

    def saved(self, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Saved: ...

    def backward_queries(
        self,
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
        """Add dQ of the visited slashes, and of the columns; dq is fp32.

        The last launch of a call has `out`, and writes dQ to it, rounded once, and not to dq, which
        is None where it is the first as well.
        """
        ...

    def backward_keys(
        self,
        shard: Shard,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: Saved,
        met: list[Chunk],
        dkv: Tensor,
        first: bool,
    ) -> None:
        """Add this rank's part of dK and dV of chunks; dkv is fp32 [met, 2, B, L, Hk, D]."""
        ...

    def backward_columns(self, shard: Shard, q: Tensor, saved: Saved, columns: Columns) -> Columns:
        """This rank's part of dK and dV of every vertical, fp32, in a form that scatter reads."""
        ...

    def scatter(self, shard: Shard, of_columns: Columns, owners: list[int], dkv: Tensor) -> None:
        """Add the gradients of the verticals that lie in these ranks' chunks to the chunks'."""
        ...


def tiles(device: torch.device) -> Tiles:
    """The module that launches for a device; one file for each, imported when first used."""
    home = "launch" if device.type == "cuda" else "cpu"
    return cast(Tiles, jit.imported(f"qla_kernels.sparse_ring.{home}"))


def wide(x: Tensor) -> torch.dtype:
    """What partial results are kept in: fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(x.dtype, torch.float32)
