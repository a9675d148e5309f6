"""The index of a call, from the attention of one block of queries; the same on every rank.

    1. The rank that has the observed block broadcasts its queries.
    2. Each rank's LSE over its keys is gathered, and combined in rank order.
    3. Each rank's columns get their masses, integers, and its best candidates are gathered.
    4. Every rank selects from the same integers.

Scores are never held for more than a few thousand keys. Across numbers of ranks the LSE may differ
in its last bit, so a line at the very edge may; on the ranks of one call nothing can.
"""

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import ALONE, Ring
from qla_kernels.sparse_ring.index import VSIndex, given
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import BLOCK, Pattern, VerticalSlash
from qla_kernels.sparse_ring.select import Candidates, cut, last_block, observed_rows, select
from qla_kernels.sparse_ring.shard import tiles


def build(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    layout: Layout,
    seqlen: int,
    scale: float,
    ring: Ring = ALONE,
) -> VSIndex:
    """q [B, L, H, D] and k [B, L, Hk, D] are this rank's shards."""
    if not isinstance(pattern, VerticalSlash):
        return given(pattern, q.shape[0], q.shape[2], layout.world * q.shape[1], q.device)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _estimated(q, k, pattern, layout, seqlen, scale, ring)


def _estimated(
    q: Tensor,
    k: Tensor,
    pattern: VerticalSlash,
    layout: Layout,
    seqlen: int,
    scale: float,
    ring: Ring,
) -> VSIndex:
    T = layout.world * q.shape[1]
    run = tiles(q.device)
    first, rows = last_block(seqlen) * BLOCK, observed_rows(seqlen)
    owner, at = layout.owner(first, T), layout.local(first, T)
    room = q[:, at : at + rows].clone(memory_format=torch.contiguous_format)  # q is the caller's
    q_obs = ring.broadcast(room, owner)

    position = layout.positions(T, ring.rank).to(q.device)
    seen = position <= torch.arange(first, first + rows, device=q.device)[:, None]
    (lse,) = ring.gather(run.window_lse(q_obs, k, seen, scale)).wait()
    lse = lse.logsumexp(0)
    mass = run.window_mass(q_obs, k, seen, lse, scale)
    tile = mass.view(*mass.shape[:2], -1, BLOCK).sum(-1, dtype=torch.int32)

    mine = cut(mass, position, tile, T, pattern)
    found, of_tiles = _gathered(ring, mine, tile)
    order = layout.perm(T)[::BLOCK].argsort().to(q.device)  # gathered tiles in their sequence
    return select(found, of_tiles.index_select(-1, order), seqlen, T, pattern)


def _gathered(ring: Ring, mine: Candidates, tile: Tensor) -> tuple[Candidates, Tensor]:
    """Candidates and tiles of all ranks, by one collective, [B, H, world x ...]."""
    widths = [mine.column.shape[-1], mine.mass.shape[-1], tile.shape[-1]]
    (everything,) = ring.gather(torch.cat([*mine, tile], -1)).wait()
    column, mass, of_tiles = (
        x.movedim(0, -2).flatten(-2) for x in torch.split(everything, widths, -1)
    )
    return Candidates(column, mass), of_tiles
