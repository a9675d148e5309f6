"""Defines Shard, the arguments that all launches of a call share, and Launches, their interface.

`launches` returns the module that implements the launches for a device.
"""

import importlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.plan import Table, Visit, returns, visits
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.select import Candidates
from qla_kernels.sparse_ring.shapes import BLOCK, TILE


class Shard(NamedTuple):
    """The layout, mask and sizes of a call, for one rank.

    Tokens from seqlen on are padding: their o is 0, and their LSE is -inf.
    """

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
        """Tokens of a rank."""
        return self.T // self.layout.world

    @property
    def blocks(self) -> int:
        """Blocks of 64 tokens of a rank."""
        return self.rows // BLOCK

    def first_blocks(self, rank: int) -> list[int]:
        """Returns the number in the sequence of the first block of each tile of a rank's shard."""
        rows = range(0, self.rows, TILE)
        return [self.layout.position(rank, row, self.T) // BLOCK for row in rows]

    def positions(self, rank: int) -> Tensor:
        """Returns the tokens of a rank's shard, on the device of the index."""
        return self.layout.positions(self.T, rank).to(self.v_idx.device)

    def visits(self, owner: int, slot: int = 0) -> list[Visit]:
        """Returns the visits of the chunk of `owner` by queries of this rank."""
        return visits(self.layout, self.T, self.rank, owner, slot)

    def returns(self, owner: int, slot: int = 0) -> list[Visit]:
        """Returns the visits of queries of this rank by the chunk of `owner`."""
        return returns(self.layout, self.T, self.rank, owner, slot)


def shard_of(
    layout: Layout, rank: int, T: int, seqlen: int, scale: float, lines: Sequence[Tensor]
) -> Shard:
    """Returns the Shard of a rank, with its table of diagonals.

    `lines` are the tensors v_idx, v_cnt and d_bits of an index.
    """
    v_idx, v_cnt, d_bits = lines
    made = launches(d_bits.device).table(d_bits, T, layout)
    return Shard(layout, rank, T, seqlen, scale, v_idx, v_cnt, d_bits, made)


class Columns(NamedTuple):
    """The rows of k and v at each head's verticals, in the order of v_idx; unused rows are 0.

    The same class holds the gradients of these rows.
    """

    k: Tensor  # [B, H, max_v, D]
    v: Tensor  # [B, H, max_v, D]


class Partial(NamedTuple):
    """The result of attention to the keys that were visited so far."""

    o: Tensor | None  # [B, L, H, D], fp32; None if the call has a single launch
    lse: Tensor  # [B, H, L], natural log, fp32


class Saved(NamedTuple):
    """Row statistics of the forward, and dO, as the backward's launches read them.

    `Launches.saved` makes them.
    """

    lse: Tensor  # [B, H, L], +inf for a row that sees nothing; base 2 on a GPU
    delta: Tensor  # [B, H, L], rowsum(dO O) - dLSE
    do: Tensor  # [B, L, H, D]


class Launches(Protocol):
    """The launches. cpu.py implements them for CPU tensors, and launch.py for CUDA tensors.

    A chunk is k or v of one rank, [B, L, Hk, D]. Arguments k and v are buffers of several chunks,
    [slots, B, L, Hk, D], and a visit names the slot of its chunk. If `first` is true, accumulators
    are uninitialised: a launch overwrites them and does not read them.
    """

    def table(self, d_bits: Tensor, T: int, layout: Layout) -> Table:
        """Returns the same table of diagonals as plan.table."""
        ...

    def window_lse(
        self, q_obs: Tensor, k: Tensor, block: Tensor, last: int, scale: float
    ) -> Tensor:
        """Returns LSEs of the observed queries over parts of the local keys, [parts, B, H, rows].

        The caller combines the parts, fp32 on a GPU. k is [B, L, Hk, D]. `block` is int32 [L / 64],
        the number in the sequence of each block of keys; the observed block is `last`.
        """
        ...

    def window_mass(
        self, q_obs: Tensor, k: Tensor, block: Tensor, last: int, lse: Tensor, scale: float
    ) -> Tensor:
        """Returns the observed attention that each local key gets, as integers, int32 [B, H, L].

        All masses of a head add up to 2^30 over all ranks, but for rounding. `lse` is [parts, B, H,
        rows]; the parts cover the keys of all ranks.
        """
        ...

    def cut(
        self, mass: Tensor, block: Tensor, T: int, pattern: VerticalSlash
    ) -> tuple[Candidates, Tensor]:
        """Returns a rank's best columns, and int32 [B, H, L / 64], the mass of each block."""
        ...

    def select(
        self, candidates: Candidates, tile: Tensor, seqlen: int, T: int, pattern: VerticalSlash
    ) -> VSIndex:
        """Returns the index of the lines that the pattern's targets and limits give.

        `candidates` are those of all ranks, and `tile` int32 [B, H, T / 64] is the mass of each
        block, in the order of the sequence.
        """
        ...

    def compact(
        self, shard: Shard, k: Tensor, v: Tensor, visited: list[Visit], columns: Columns
    ) -> None:
        """Copies rows of the visited chunks to `columns`, at the places of their verticals.

        Places of verticals in other chunks keep their contents. Unused places become 0.
        """
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
        """Merges attention to the visited slashes, and to `columns` if given, into `partial`.

        The last launch of a call is given `out`, and writes o to it, rounded once; partial.o is not
        used afterwards.
        """
        ...

    def saved(self, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Saved:
        """Returns the forward's row statistics, and dO, as the backward's launches read them."""
        ...

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
        """Adds dQ of the visited slashes, and of `columns` if given, to dq, which is fp32.

        The last launch of a call is given `out`, and writes the sum to it, rounded once; dq is not
        used afterwards. dq is None if the call has a single launch.
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
        """Adds the part of dK and dV that comes from this rank's queries to dkv.

        `met` are the chunks of k and v of this launch, of L tokens each; dkv is fp32
        [chunks, 2, B, L, Hk, D].
        """
        ...

    def backward_columns(self, shard: Shard, q: Tensor, saved: Saved, columns: Columns) -> Columns:
        """Returns this rank's part of dK and dV of every vertical, fp32, in scatter's format."""
        ...

    def scatter(self, shard: Shard, column_grads: Columns, owners: list[int], dkv: Tensor) -> None:
        """Adds gradients of verticals to dkv, the gradients of the chunks they lie in.

        dkv holds the chunks of `owners`; verticals in other chunks are left out.
        """
        ...

    def rounded(self, sums: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Returns dK and dV [B, L, Hk, D] of a chunk in dtype, from sums [2, B, L, Hk, D]."""
        ...


def launches(device: torch.device) -> Launches:
    """Returns the module with the launches for a device: launch.py for CUDA, else cpu.py.

    The module is imported at its first use.
    """
    home = "launch" if device.type == "cuda" else "cpu"
    return cast(Launches, importlib.import_module(f"qla_kernels.sparse_ring.{home}"))


def wide(x: Tensor) -> torch.dtype:
    """Returns the dtype of partial results for x: fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)
