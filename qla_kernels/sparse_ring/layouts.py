"""The layouts: three ways to distribute the tokens of a sequence over ranks.

Tokens and rows are ints or int tensors. StripedLayout gives every rank about the same share of
every diagonal, so the steps of a ring have about the same work.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qla_kernels.runtime.arguments import integer
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import expect_tensors
from qla_kernels.sparse_ring.agreement import ends_a_graph, tensor_facts
from qla_kernels.sparse_ring.groups import RingGroups
from qla_kernels.sparse_ring.shapes import BLOCK, TILE

Numbers = TypeVar("Numbers", int, Tensor)


@dataclass(frozen=True)
class Layout:
    """Base class of the layouts: which rank holds which tokens of a sequence, and in which row.

    `world` is the number of ranks. The shard of a rank is the tensor of the tokens that the rank
    holds, one row per token. In all methods, T is the number of tokens of the whole sequence after
    padding, as `pad_len` returns it; a token index counts from 0 within this sequence.
    """

    world: int

    def __post_init__(self) -> None:
        """Raises ValueError unless world is an integer from 1 on."""
        name, fix = type(self).__name__, "pass the number of ranks"
        object.__setattr__(self, "world", integer(name, "world", self.world, fix))
        if self.world < 1:
            raise ValueError(need(name, f"world is {self.world}", "at least 1 rank", fix))

    def owner(self, token: Numbers, T: int) -> Numbers:
        """Returns the rank that holds the token at index `token` of a sequence of T tokens.

        `token` and the result are ints, or integer tensors of one shape.
        """
        raise NotImplementedError

    def local(self, token: Numbers, T: int) -> Numbers:
        """Converts a token's index in the whole sequence to its row on the rank that holds it.

        The row is counted in that rank's tensors, which hold only the tokens of the rank.

        Args:
            token: the index, an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        raise NotImplementedError

    def position(self, rank: int, row: Numbers, T: int) -> Numbers:
        """Converts a row of the tensors that `rank` holds to its token's index in the sequence.

        The inverse of `local`.

        Args:
            rank: a number from 0 to world - 1.
            row: an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        raise NotImplementedError

    def ranges(self, rank: int, T: int) -> list[tuple[int, int, int]]:
        """Returns a list of (first, end, local), the ranges of 64-token blocks that `rank` holds.

        Blocks first to end - 1 of a sequence of T tokens are in the rank's tensors from block
        `local` on. In a striped layout the only range is the whole sequence, (0, T / 64, 0), of
        which the rank holds every world-th stripe.
        """
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """The number of tokens of which every valid T is a multiple."""
        return self.world * TILE

    @property
    def stripe_blocks(self) -> int:
        """The number of blocks of 64 tokens in a stripe; 1 in layouts without stripes."""
        return 1

    @property
    def buckets(self) -> int:
        """The number of ranks among which stripes are distributed; 1 in layouts without stripes.

        The entries of plan.Table are sorted into this number of buckets.
        """
        return 1

    @property
    def gap(self) -> int:
        """The distance in the sequence between the two blocks of a query tile, in blocks.

        A query tile has two adjacent blocks of a shard. The distance is 1 if the blocks are also
        adjacent in the sequence.
        """
        return 1

    def pad_len(self, length: int) -> int:
        """Returns the number of tokens, at least `length`, to which a sequence must be padded.

        Append the padding to the end of the sequence.
        """
        return -(-max(length, 1) // self.unit) * self.unit

    def positions(self, T: int, rank: int) -> Tensor:
        """Returns the indices of the tokens that `rank` holds, in its order; int64 [T / world].

        Pass the result as position_ids to a model that runs on these tokens. T is the number of
        tokens of the sequence, with padding.
        """
        self._require_padded(T)
        self._require_rank(rank)
        return self.position(rank, torch.arange(T // self.world, device="cpu"), T)

    def perm(self, T: int) -> Tensor:
        """Returns the indices of the tokens that the ranks hold, rank after rank; int64 [T].

        `x[layout.perm(T)]` has the tokens of rank 0 first, then those of rank 1, and so on.
        """
        return torch.cat([self.positions(T, rank) for rank in range(self.world)])

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Returns the tokens that `rank` holds, copied from the tensor x of the whole sequence.

        Args:
            x: a tensor whose dimension `dim` has the T tokens of the sequence.
            dim: the dimension of the tokens.
            rank: a number from 0 to world - 1.
        """
        dim = _dimension(f"{type(self).__name__}.shard", x, dim)
        return x.index_select(dim, self.positions(x.shape[dim], rank).to(x.device))

    @ends_a_graph
    def unshard(self, x: Tensor, dim: int, group: RingGroups) -> Tensor:
        """Gathers the tokens of all ranks; returns the tensor of the whole sequence on every rank.

        Collective, not differentiable.

        Args:
            x: the tokens that this rank holds.
            dim: the dimension of the tokens.
            group: the ranks.

        Raises:
            ValueError: arguments are wrong, or differ between ranks; on every rank.
            RingError: a rank is lost.
        """
        self._agree("unshard", x, dim, group, self)
        (parts,) = group.whole.gather(x.detach().movedim(dim, 0).contiguous()).wait()
        order = self.perm(self.world * x.shape[dim]).argsort().to(x.device)
        return parts.flatten(0, 1).index_select(0, order).movedim(0, dim)

    @ends_a_graph
    def exchange(self, x: Tensor, dim: int, source: "Layout", group: RingGroups) -> Tensor:
        """Moves tokens between ranks, from the layout `source` to this layout, by one all-to-all.

        Returns the tokens that this rank holds in this layout. Collective; not differentiable.

        Args:
            x: the tokens that this rank holds in the layout `source`.
            dim: the dimension of the tokens.
            source: the layout of x.
            group: the ranks.

        Raises:
            ValueError: arguments are wrong, or differ between ranks; on every rank.
            RingError: a rank is lost.
        """
        self._agree("exchange", x, dim, group, source)
        T, rank = self.world * x.shape[dim], group.rank
        own_tokens = source.positions(T, rank)
        order = self.owner(own_tokens, T).argsort(stable=True)
        sent = self.owner(own_tokens, T).bincount(minlength=self.world).tolist()
        tokens_from = [source.positions(T, r) for r in range(self.world)]
        tokens_from = [tokens[self.owner(tokens, T) == rank] for tokens in tokens_from]
        rows = x.detach().movedim(dim, 0).index_select(0, order.to(x.device))
        received = group.whole.exchange(rows, sent, [len(tokens) for tokens in tokens_from])
        place = self.local(torch.cat(tokens_from), T).argsort().to(x.device)
        return received.index_select(0, place).movedim(0, dim)

    def _agree(self, op: str, x: Tensor, dim: int, group: RingGroups, source: "Layout") -> None:
        """Compares the arguments of `op` on all ranks before shards of `source` are rearranged.

        Raises on every rank if an argument is wrong on any rank, or differs between ranks.
        """
        if not isinstance(group, RingGroups):
            got = f"group is of type {type(group).__name__}"
            fix = "make one by RingGroups.create(group), and reuse it"
            raise ValueError(need(op, got, "RingGroups", fix))
        problem = None
        try:
            for layout in (self, source):
                check_layout(op, layout, group.world)
                T = group.world * x.shape[_dimension(op, x, dim)]
                layout._require_padded(T)
        except Exception as error:  # whatever it is, for all ranks to raise
            problem = error
        facts = {"x": tensor_facts(x), "dim": str(dim), "layout": self, "from layout": repr(source)}
        group.agree(op, facts, problem, again=True)  # the host waits for such a call anyway

    def _require_rank(self, rank: int) -> None:
        """Raises ValueError unless rank is an int from 0 to world - 1."""
        if not (isinstance(rank, int) and 0 <= rank < self.world):
            fix = "number the ranks within their ring, such as group.rank of RingGroups"
            needs = f"a rank from 0 to {self.world - 1}"
            raise ValueError(need(str(self), f"rank={rank!r}", needs, fix))

    def _require_padded(self, T: int) -> None:
        """Raises ValueError unless T is a positive multiple of `unit`."""
        T = integer(str(self), "T", T, "pass the number of tokens, with padding")
        if T < 1 or T % self.unit:
            fix = f"pad the sequence to {self.pad_len(T)} and pass seqlen={T}"
            raise ValueError(need(str(self), f"T={T}", f"a positive multiple of {self.unit}", fix))


def check_layout(op: str, layout: Layout | None, world: int) -> None:
    """Raises ValueError unless `layout` is a Layout for `world` ranks; the error names `op`."""
    if not isinstance(layout, Layout):
        got, fix = f"layout is of type {type(layout).__name__}", f"pass StripedLayout({world})"
        raise ValueError(need(op, got, "a layout", fix))
    if layout.world != world:
        got = f"layout is for {layout.world} ranks, and the group has {world}"
        fix = f"pass {type(layout).__name__}({world})"
        raise ValueError(need(op, got, "as many ranks in both", fix))


def _dimension(op: str, x: Tensor, dim: int) -> int:
    """Returns dim as an int; ValueError unless x is a tensor that has this dimension."""
    expect_tensors(op, x=x)
    fix = "pass the dimension of the tokens"
    dim = integer(op, "dim", dim, fix)
    if not -x.dim() <= dim < x.dim():
        got, needs = f"dim={dim}", f"a dimension of x, which has shape {tuple(x.shape)}"
        raise ValueError(need(op, got, needs, fix))
    return dim


@dataclass(frozen=True)
class ContiguousLayout(Layout):
    """The layout that cuts a sequence into `world` equal parts, of which rank r holds part r.

    `world` is the number of ranks. With a causal mask, later ranks have more work than earlier
    ones.
    """

    def owner(self, token: Numbers, T: int) -> Numbers:
        """Returns the rank that holds the token at index `token` of a sequence of T tokens.

        `token` and the result are ints, or integer tensors of one shape.
        """
        return token // (T // self.world)

    def local(self, token: Numbers, T: int) -> Numbers:
        """Converts a token's index in the whole sequence to its row on the rank that holds it.

        The row is counted in that rank's tensors, which hold only the tokens of the rank.

        Args:
            token: the index, an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        return token % (T // self.world)

    def position(self, rank: int, row: Numbers, T: int) -> Numbers:
        """Converts a row of the tensors that `rank` holds to its token's index in the sequence.

        The inverse of `local`.

        Args:
            rank: a number from 0 to world - 1.
            row: an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        return rank * (T // self.world) + row

    def ranges(self, rank: int, T: int) -> list[tuple[int, int, int]]:
        """Returns a list of (first, end, local), the ranges of 64-token blocks that `rank` holds.

        Blocks first to end - 1 of a sequence of T tokens are in the rank's tensors from block
        `local` on.
        """
        blocks = T // self.world // BLOCK
        return [(rank * blocks, (rank + 1) * blocks, 0)]


@dataclass(frozen=True)
class ZigZagLayout(Layout):
    """The layout that cuts a sequence into 2 * world equal parts; rank r holds two of them.

    These are parts r and 2 * world - 1 - r, an early and a late one, so that all ranks have the
    same work under a full causal mask. `world` is the number of ranks.
    """

    @property
    def unit(self) -> int:
        """The number of tokens of which every valid T is a multiple."""
        return 2 * self.world * TILE

    def owner(self, token: Numbers, T: int) -> Numbers:
        """Returns the rank that holds the token at index `token` of a sequence of T tokens.

        `token` and the result are ints, or integer tensors of one shape.
        """
        return self._mirrored(token // self._part(T))

    def local(self, token: Numbers, T: int) -> Numbers:
        """Converts a token's index in the whole sequence to its row on the rank that holds it.

        The row is counted in that rank's tensors, which hold only the tokens of the rank.

        Args:
            token: the index, an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        part = self._part(T)
        return token % part + token // part // self.world * part

    def position(self, rank: int, row: Numbers, T: int) -> Numbers:
        """Converts a row of the tensors that `rank` holds to its token's index in the sequence.

        The inverse of `local`.

        Args:
            rank: a number from 0 to world - 1.
            row: an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        part = self._part(T)
        second = row // part
        return (rank + second * (2 * self.world - 1 - 2 * rank)) * part + row % part

    def ranges(self, rank: int, T: int) -> list[tuple[int, int, int]]:
        """Returns a list of (first, end, local), the ranges of 64-token blocks that `rank` holds.

        Blocks first to end - 1 of a sequence of T tokens are in the rank's tensors from block
        `local` on.
        """
        blocks, mirror = self._part(T) // BLOCK, 2 * self.world - 1 - rank
        first = (rank * blocks, (rank + 1) * blocks, 0)
        return [first, (mirror * blocks, (mirror + 1) * blocks, blocks)]

    def _part(self, T: int) -> int:
        return T // (2 * self.world)

    def _mirrored(self, part: Numbers) -> Numbers:
        """Returns the rank of a part: part if it is below world, else 2 * world - 1 - part."""
        return part + part // self.world * (2 * self.world - 1 - 2 * part)


@dataclass(frozen=True)
class StripedLayout(Layout):
    """The layout that gives stripes of `stripe` tokens to the ranks in turn.

    Stripe n belongs to rank n % world. All ranks have about the same work, under a full causal mask
    as well as for each diagonal of a sparse one.

    Args:
        world: the number of ranks.
        stripe: 64 or 128.
    """

    stripe: int = 128

    def __post_init__(self) -> None:
        """Raises ValueError unless world and stripe are integers that the layout allows."""
        super().__post_init__()
        fix = "leave it out for 128 tokens"
        object.__setattr__(self, "stripe", integer("StripedLayout", "stripe", self.stripe, fix))
        if self.stripe not in (BLOCK, TILE):
            needs = f"{BLOCK} or {TILE}, which are whole blocks of the mask"
            raise ValueError(need("StripedLayout", f"stripe is {self.stripe}", needs, fix))

    @property
    def stripe_blocks(self) -> int:
        """The number of blocks of 64 tokens in a stripe."""
        return self.stripe // BLOCK

    @property
    def buckets(self) -> int:
        """The number of ranks among which stripes are distributed."""
        return self.world

    @property
    def gap(self) -> int:
        """The distance in the sequence between the two blocks of a query tile, in blocks."""
        return self.world if self.stripe == BLOCK else 1

    def owner(self, token: Numbers, T: int) -> Numbers:
        """Returns the rank that holds the token at index `token` of a sequence of T tokens.

        `token` and the result are ints, or integer tensors of one shape.
        """
        return token // self.stripe % self.world

    def local(self, token: Numbers, T: int) -> Numbers:
        """Converts a token's index in the whole sequence to its row on the rank that holds it.

        The row is counted in that rank's tensors, which hold only the tokens of the rank.

        Args:
            token: the index, an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        return token // (self.stripe * self.world) * self.stripe + token % self.stripe

    def position(self, rank: int, row: Numbers, T: int) -> Numbers:
        """Converts a row of the tensors that `rank` holds to its token's index in the sequence.

        The inverse of `local`.

        Args:
            rank: a number from 0 to world - 1.
            row: an int or an integer tensor; the result has the same form.
            T: number of tokens of the whole sequence, with padding.
        """
        turn = row // self.stripe * self.world + rank
        return turn * self.stripe + row % self.stripe

    def ranges(self, rank: int, T: int) -> list[tuple[int, int, int]]:
        """Returns [(0, T / 64, 0)]: `rank` has stripes of the range of all 64-token blocks.

        For other layouts, (first, end, local) says that `rank` holds blocks first to end - 1 of the
        sequence, from block `local` of its own tensors on. T is the number of tokens, with padding.
        """
        return [(0, T // BLOCK, 0)]
