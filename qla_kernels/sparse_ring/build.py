"""Builds the index of a call from the attention of one block of queries, the observed block.

    1. The rank that holds the observed block broadcasts its queries.
    2. Each rank computes the LSE of these queries over its own keys. The LSEs are gathered.
    3. Each rank combines them in rank order, computes the attention mass of each of its columns as
       an integer, and keeps its best columns. These candidates are gathered.
    4. Every rank selects the lines from the same integers, so all ranks have the same index.

Scores are held for at most a few thousand keys at a time. The last bit of the LSE may depend on the
number of ranks; if it does, a line whose mass is close to a threshold may be chosen with one number
of ranks and not with another. Within one call all ranks choose the same lines.
"""

import torch
from torch import Tensor

from qla_kernels.runtime import device
from qla_kernels.runtime.device_tables import kept
from qla_kernels.sparse_ring.groups import ALONE, RankRing
from qla_kernels.sparse_ring.index import VSIndex, known_index
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import Pattern, VerticalSlash
from qla_kernels.sparse_ring.select import Candidates, last_block, observed_rows
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.sparse_ring.shard import launches


def build(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    layout: Layout,
    seqlen: int,
    scale: float,
    ring: RankRing = ALONE,
) -> VSIndex:
    """Returns the index of a pattern for q [B, L, H, D] and k [B, L, Hk, D], this rank's shards.

    Lines of a VerticalSlash are estimated, which is collective over `ring`. Lines of the other
    patterns are known without q and k.
    """
    if not isinstance(pattern, VerticalSlash):
        return known_index(pattern, q.shape[0], q.shape[2], layout.world * q.shape[1], q.device)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _estimated(q, k, pattern, layout, seqlen, scale, ring)


def _estimated(
    q: Tensor,
    k: Tensor,
    pattern: VerticalSlash,
    layout: Layout,
    seqlen: int,
    scale: float,
    ring: RankRing,
) -> VSIndex:
    """Returns the index of a VerticalSlash by steps 1 to 4 of the module's docstring."""
    T = layout.world * q.shape[1]
    run = launches(q.device)
    last, rows = last_block(seqlen), observed_rows(seqlen)
    owner, at = layout.owner(last * BLOCK, T), layout.local(last * BLOCK, T)
    q_obs = q[:, at : at + rows]
    if ring.size > 1:  # a copy: the broadcast writes to it, and q is the caller's
        q_obs = ring.broadcast(q_obs.clone(memory_format=torch.contiguous_format), owner)

    with device.of(q):
        block, place = _blocks(q.device, layout, ring.rank, T)
    lse = run.window_lse(q_obs, k, block, last, scale)
    if ring.size > 1:
        (lse,) = ring.gather(lse.logsumexp(0)).wait()
    mass = run.window_mass(q_obs, k, block, last, lse, scale)
    candidates, tile = run.cut(mass, block, T, pattern)
    if ring.size > 1:
        candidates, tile = _gathered(ring, candidates, tile)
        tile = tile.index_select(-1, place)
    return run.select(candidates, tile, seqlen, T, pattern)


@kept(16)
def _blocks(on: torch.device, layout: Layout, rank: int, T: int) -> tuple[Tensor, Tensor]:
    """Returns the blocks of a rank's shard, and the place of every block in all shards.

    The first result is int32 [L / 64], the number in the sequence of each local block. The second
    is int64 [T / 64], the number of each block of the sequence in the concatenation of all shards.
    """
    rows = T // layout.world
    block = layout.position(rank, torch.arange(0, rows, BLOCK, device=on), T) // BLOCK
    first = torch.arange(0, T, BLOCK, device=on)
    place = (layout.owner(first, T) * rows + layout.local(first, T)) // BLOCK
    return block.int(), place


def _gathered(ring: RankRing, mine: Candidates, tile: Tensor) -> tuple[Candidates, Tensor]:
    """Returns the candidates and block masses of all ranks, gathered by one collective.

    `mine` and `tile` are this rank's, [B, H, n]; results are [B, H, world n], in rank order.
    """
    everyones = ring.gather(*mine, tile).wait()
    column, mass, of_tiles = (x.movedim(0, -2).flatten(-2) for x in everyones)
    return Candidates(column, mass), of_tiles
