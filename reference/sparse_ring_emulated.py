"""A ring of ranks in one process: who holds what when, what is merged, and what travels.

A double ring has world = outer x inner ranks; rank r is number r mod inner of node r // inner. In
each outer step the nodes' chunks of k and v make a turn around their inner rings, and then move on
one node. inner = world is the plain ring. Rank r's partial results stay with it; the gradient of a
chunk travels with the chunk, and then goes home.

Verticals do not travel: what a head needs of a chunk is copied while the chunk is there, and is
attended to in the end, all columns at once.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange, repeat
from torch import Tensor

from . import sparse_ring as definition
from .sparse_ring import Gradients, Index, attention, attention_backward

Held = TypeVar("Held")


class Forward(NamedTuple):
    """Results of `ring`, of all tokens."""

    o: Tensor  # [B, T, H, D]
    lse: Tensor  # [B, H, T]


def turns(first: list[Held], inner: int) -> Iterator[tuple[int, int, list[Held]]]:
    """(outer step, inner step, what each rank holds), by passing chunks on as the ranks do."""
    world = len(first)
    node = first
    for o in range(world // inner):
        ring = node
        for i in range(inner):
            yield o, i, ring
            ring = _from_the_left(ring, inner)
        node = [node[(r - inner) % world] for r in range(world)]


def _from_the_left(ring: list[Held], inner: int) -> list[Held]:
    """Each rank has what the rank before it on its node had."""
    return [ring[r - 1 if r % inner else r + inner - 1] for r in range(len(ring))]


def merge(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> tuple[Tensor, Tensor]:
    """LSE' = log(e^LSE + e^l);  O' = e^{LSE - LSE'} O + e^{l - LSE'} o, with weights 0 at -inf."""
    both = torch.logaddexp(lse, lse_new)
    safe = both.masked_fill(both == -torch.inf, 0)
    old, new = (rearrange((x - safe).exp(), "b h t -> b t h 1") for x in (lse, lse_new))
    return old * o + new * o_new, both


class Columns(NamedTuple):
    """The rows of k and v that a head's verticals need, compact; heads have different numbers."""

    position: Tensor  # [B, H, max]; T where there is none
    k: Tensor  # [B, max, H, D]
    v: Tensor  # [B, max, H, D]


def compact(index: Index, k: Tensor, v: Tensor) -> Columns:
    """Returns the rows of k and v at each head's verticals, in ascending order."""
    T, group = k.shape[1], index.columns.shape[1] // k.shape[2]
    token = torch.arange(T, device=k.device).where(index.columns, T)
    position = token.sort(-1).values[..., : int(index.columns.sum(-1).max())]
    rows = repeat(position.clamp(max=T - 1), "b h n -> b n h d", d=k.shape[3])
    per_head = (repeat(x, "b t h d -> b t (h g) d", g=group) for x in (k, v))
    return Columns(position, *(x.gather(1, rows) for x in per_head))


def _columns_seen(index: Index, query: Tensor, columns: Columns, T: int) -> Tensor:
    """verticals() for the compact rows, [B, H, queries, max]."""
    every = definition.verticals(index, query, torch.arange(T, device=query.device))
    never = torch.zeros_like(every[..., :1])
    where = repeat(columns.position, "b h n -> b h i n", i=len(query))
    return torch.cat([every, never], -1).gather(-1, where)


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Index,
    held: Tensor,
    inner: int | None = None,
    seqlen: int | None = None,
    scale: float | None = None,
) -> Forward:
    """`attention` under `mask(index)`, by ranks that hold the rows `held` [world, T / world]."""
    q_of, k_of, v_of = (definition.shards(x, held) for x in (q, k, v))
    world, T = held.shape[0], q.shape[1]
    columns = compact(index, k, v)
    o = [torch.zeros_like(x) for x in q_of]
    lse = [x.new_full((x.shape[0], x.shape[2], x.shape[1]), -torch.inf) for x in q_of]
    for _, _, owners in turns(list(range(world)), inner or world):
        for r, owner in enumerate(owners):
            seen = _rows(definition.slashes(index, held[r], held[owner]), held[r], seqlen)
            part = attention(q_of[r], k_of[owner], v_of[owner], seen, scale)
            o[r], lse[r] = merge(o[r], lse[r], *part)
    for r in range(world):
        seen = _rows(_columns_seen(index, held[r], columns, T), held[r], seqlen)
        part = attention(q_of[r], columns.k, columns.v, seen, scale)
        o[r], lse[r] = merge(o[r], lse[r], *part)
    return Forward(definition.unshard(o, held), definition.unshard(lse, held, 2))


def ring_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Index,
    held: Tensor,
    done: Forward,
    do: Tensor,
    dlse: Tensor | None = None,
    inner: int | None = None,
    seqlen: int | None = None,
    scale: float | None = None,
) -> Gradients:
    """Gradients of `ring`: dQ stays, dK and dV make each inner turn from zero and go home outside.

    After an inner turn a chunk's gradient has met every rank of a node. It is added to what the
    nodes before gave, which has travelled along the outer ring.
    """
    world, inner, T = held.shape[0], inner or held.shape[0], q.shape[1]
    q_of, k_of, v_of, do_of = (definition.shards(x, held) for x in (q, k, v, do))
    lse_of = definition.shards(done.lse, held, 2)
    delta_of = definition.shards(definition.delta(done.o, do, dlse), held, 2)
    columns = compact(index, k, v)

    # The verticals first: every rank's part of the gradient of each column.
    dq, of_columns = [], []
    for r in range(world):
        seen = _rows(_columns_seen(index, held[r], columns, T), held[r], seqlen)
        rank = (lse_of[r], delta_of[r], do_of[r], scale)
        part = attention_backward(q_of[r], columns.k, columns.v, seen, *rank)
        dq.append(part.dq)
        of_columns.append(part)

    nothing = [torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device) for x in k_of]  # dK, dV
    outer, turn = nothing, nothing
    for _, i, owners in turns(list(range(world)), inner):
        turn = nothing if i == 0 else _from_the_left(turn, inner)
        met = []
        for r, owner in enumerate(owners):
            seen = _rows(definition.slashes(index, held[r], held[owner]), held[r], seqlen)
            rank = (lse_of[r], delta_of[r], do_of[r], scale)
            part = attention_backward(q_of[r], k_of[owner], v_of[owner], seen, *rank)
            dq[r] = dq[r] + part.dq
            verticals = _scattered(of_columns[r], columns, held[owner], k)
            met.append(turn[r] + torch.stack([part.dk, part.dv]) + verticals)
        turn = met
        if i == inner - 1:  # the turn ends where the chunk came from, and the node hands it on
            turn = _from_the_left(turn, inner)
            outer = [outer[r] + turn[r] for r in range(world)]
            outer = [outer[(r - inner) % world] for r in range(world)]
    dk, dv = ([pair[n] for pair in outer] for n in (0, 1))
    return Gradients(*(definition.unshard(x, held) for x in (dq, dk, dv)))


def _scattered(of_columns: Gradients, columns: Columns, rows: Tensor, k: Tensor) -> Tensor:
    """The columns' dK and dV at the rows of one rank, of all heads of a group: [2, B, L, Hk, D]."""
    T, heads = k.shape[1], k.shape[2]
    where = repeat(columns.position, "b h n -> b n h d", d=k.shape[3])
    spread = []
    for x in (of_columns.dk, of_columns.dv):
        room = x.new_zeros(x.shape[0], T + 1, *x.shape[2:])  # one row more: where there is none
        spread.append(room.scatter(1, where, x)[:, rows])
    return rearrange(torch.stack(spread), "n b l (h g) d -> n b l h g d", h=heads).sum(4)


def _rows(seen: Tensor, query: Tensor, seqlen: int | None) -> Tensor:
    return seen if seqlen is None else seen & (query < seqlen)[:, None]
