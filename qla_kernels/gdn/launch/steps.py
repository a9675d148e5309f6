"""The steps of a forward, for a whole batch and for a rank's part of one: cut, solve, map, chain.

forward.py puts them together, and sharded/launch.py does with an exchange between ranks before the
last one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.chunks import fused_fwd, kkt_solve
from qla_kernels.gdn.launch.pools import Places
from qla_kernels.gdn.launch.segments import NO_ENDS, Maps, OpenEnds, Segments
from qla_kernels.gdn.launch.tensors import WHOLE, of_part, room_for_chunks, sequence_bounds
from qla_kernels.gdn.plan import Plan
from qla_kernels.runtime.varlen import ChunkTable
from qla_kernels.tile.constants import CHUNK


class FlatBatch(NamedTuple):
    """The inputs of one launch: [B, T, heads, size] or [B, T, HV], whose B and T flatten."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # fp32, natural log
    beta: Tensor  # in fp32 or in q's dtype
    h0: Tensor | None  # [N, HV, K, V] fp32, of `with_room`: enters each sequence; zeros if None
    bounds: Tensor  # [N + 1] of the sequences, where B is 1; or 0, T, 2 T, ...

    def of_part(self, rows: slice) -> "FlatBatch":
        if rows == WHOLE:
            return self
        q, k, v, g, beta, h0 = of_part(rows, *self[:-1])
        return FlatBatch(q, k, v, g, beta, h0, sequence_bounds(q, None))


class SavedChunks(NamedTuple):
    """Tensors that the chain writes for the backward, or reads if it does not solve for A."""

    g_cum: Tensor  # [B, T, HV] fp32, natural log, cumulated within each chunk
    A: Tensor  # [B, T, HV, 64]

    @staticmethod
    def empty(q: Tensor, g: Tensor) -> "SavedChunks":
        return SavedChunks(torch.empty_like(g), q.new_empty(*g.shape, CHUNK))


class Outputs(NamedTuple):
    """Tensors that the forward of one batch writes."""

    o: Tensor  # [B, T, HV, V]
    ht: Tensor | None  # [N, HV, K, V] fp32, of `room_for`
    saved: SavedChunks | None

    def of_part(self, rows: slice) -> "Outputs":
        if rows == WHOLE:
            return self
        o, ht, g_cum, A = of_part(rows, self.o, self.ht, *(self.saved or (None, None)))
        return Outputs(o, ht, None if self.saved is None else SavedChunks(g_cum, A))


class Solved(NamedTuple):
    """What segment_map and the chain take from kkt_solve, if the plan has it; else as given."""

    beta: Tensor
    g_cum: Tensor | None = None
    A: Tensor | None = None
    growth: Tensor | None = None


def cut_batch(
    x: FlatBatch, plan: Plan, open_ends: OpenEnds = NO_ENDS
) -> tuple[Segments, ChunkTable | None]:
    """Cuts a batch as the plan says; also returns the chunk table, if the chain does not solve.

    open_ends: of a batch that is cut over ranks.
    """
    assert plan.segment_chunks is not None, "the plan cuts"
    table = None
    if not plan.kernel.solves:  # segment_plan writes the chunk table, too
        table = room_for_chunks(x.g.shape[0] * x.g.shape[1], x.bounds)
    return segments.cut(x.g, x.bounds, plan.segment_chunks, open_ends, table), table


def solve(
    x: FlatBatch, plan: Plan, saved: SavedChunks | None, table: ChunkTable | None, is_cut: bool
) -> Solved:
    """Runs gate and kkt_solve, if the plan's chain does not solve for A; writes `saved` then."""
    if plan.kernel.solves:
        return Solved(x.beta)
    growth = torch.empty_like(x.g) if is_cut and plan.grows else None
    wide = x.beta if x.beta.dtype == torch.float32 else torch.empty_like(x.g)
    g_cum, A = kkt_solve(x.k, x.g, x.beta, x.bounds, table, saved, growth, wide)
    return Solved(wide, g_cum, A, growth)


def map_segments(x: FlatBatch, plan: Plan, solved: Solved, cut: Segments) -> Maps:
    """Returns the maps of segments, right after `solve`."""
    g = x.g if solved.g_cum is None else solved.g_cum
    return segments.maps(
        x.k, x.v, g, solved.beta, solved.A, x.h0, cut, plan.warm_log_bound, solved.growth,
        early=not plan.kernel.solves,
    )  # fmt: skip


def chain_segments(
    x: FlatBatch,
    scale: float,
    plan: Plan,
    out: Outputs,
    cut: Segments,
    found: Maps,
    h0: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Folds the maps into start states, and runs the chain over the segments.

    Args:
        x: the batch, with beta of `solve`.
        out: A of `solve` is in `out.saved`.
        found: overwritten as `segments.start_states` says.
        h0: enters each sequence; x.h0 is not used.
        places: of the segments in a pool.
    """
    starts = segments.start_states(found, h0, cut)  # a view of found.left
    fused_fwd(
        x.q, x.k, x.v, x.g, x.beta, scale, starts, cut.bounds, *out, plan.kernel, cut.ends_of,
        places=places,
    )  # fmt: skip
