"""The steps of a forward, for any head size: cut, solve, map, fold, chain.

forward.py puts them together for a batch, sharded/launch.py with an exchange between ranks before
the fold, and tree/launch.py with a chain for each level. K = 256 has kernels of its own for all but
the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.chunks import fused_fwd, kkt_solve
from qla_kernels.gdn.launch.pools import Places
from qla_kernels.gdn.launch.segments import NO_ENDS, Maps, OpenEnds, Segments
from qla_kernels.gdn.launch.tensors import (
    WHOLE,
    chunk_table,
    of_part,
    room_for_chunks,
    sequence_bounds,
)
from qla_kernels.gdn.launch.wide_forward import solve_score, wide_fwd
from qla_kernels.gdn.launch.wide_segments import WideMaps, wide_maps, wide_scan, wide_windows
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.gdn.times import ForwardChoice
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


class Scores(NamedTuple):
    """What solve_score adds to A: all else of each chunk that does not depend on V, at K = 256."""

    P: Tensor  # [B, T, HV, 64] in q's dtype
    gates: Tensor  # [capacity of the chunk table, HV, 7, 64] fp32
    first_chunk: Tensor  # [N + 1] of the chunk table


class Solved(NamedTuple):
    """What segment maps and the chain take from kkt_solve, if the plan has it; else as given."""

    beta: Tensor
    g_cum: Tensor | None = None
    A: Tensor | None = None
    growth: Tensor | None = None
    scores: Scores | None = None  # at K = 256


class Ends(NamedTuple):
    """Where states enter the sequences of a chain and leave them: segments, nodes, or sequences."""

    bounds: Tensor  # [N + 1], or spans [N, 2] of nodes
    h0: Tensor | None  # [rows, HV, K, V] fp32, any strides; zeros if None
    ht: Tensor | None  # [rows, HV, K, V] fp32, any strides, written if given
    ends_of: Tensor | None = None  # the row of ht in which each sequence ends, or -1
    starts_of: Tensor | None = None  # the row of h0 from which each node starts, or -1 for zeros
    first_chunk: Tensor | None = None  # [N]: of nodes at K = 256


def cut_batch(
    x: FlatBatch, plan: Plan, open_ends: OpenEnds = NO_ENDS
) -> tuple[Segments, ChunkTable | None]:
    """Cuts a batch as the plan says; also returns the chunk table, if the chain does not solve.

    open_ends: of a batch that is cut over ranks.
    """
    assert plan.segment_chunks is not None, "the plan cuts"
    table = None
    if not plan.kernel.solves and x.k.shape[-1] != WIDE:  # segment_plan writes the table, too
        table = room_for_chunks(x.g.shape[0] * x.g.shape[1], x.bounds)
    return segments.cut(x.g, x.bounds, plan.segment_chunks, open_ends, table), table


def solve(
    x: FlatBatch,
    scale: float,
    plan: Plan,
    saved: SavedChunks | None,
    table: ChunkTable | None,
    cut: Segments | None,
) -> Solved:
    """Runs gate and kkt_solve or solve_score, if the plan's chain does not solve for A.

    Writes `saved` then.
    """
    if x.k.shape[-1] == WIDE:
        assert saved is not None, "a plan that does not solve has room for A"
        if table is None:
            table = chunk_table(
                x.g.shape[0] * x.g.shape[1], x.bounds if cut is None else cut.bounds
            )
        of_chunks = solve_score(x.q, x.k, x.g, x.beta, scale, table, saved)
        return Solved(x.beta, *saved, scores=Scores(*of_chunks, table.first_chunk))
    if plan.kernel.solves:
        return Solved(x.beta)
    growth = torch.empty_like(x.g) if cut is not None and plan.grows else None
    wide = x.beta if x.beta.dtype == torch.float32 else torch.empty_like(x.g)
    g_cum, A = kkt_solve(x.k, x.g, x.beta, x.bounds, table, saved, growth, wide)
    return Solved(wide, g_cum, A, growth)


def map_segments(x: FlatBatch, plan: Plan, solved: Solved, cut: Segments) -> Maps | WideMaps:
    """Returns the maps of segments, right after `solve`."""
    beta, g_cum, A, growth, scores = solved
    if scores is not None and g_cum is not None and A is not None:
        windows = wide_windows(x.k, g_cum, beta, cut, plan.warm_log_bound)
        return wide_maps(x.k, x.v, A, scores.gates, scores.first_chunk, x.h0, cut, windows)
    return segments.maps(
        x.k, x.v, x.g if g_cum is None else g_cum, beta, A, x.h0, cut, plan.warm_log_bound, growth,
        early=not plan.kernel.solves,
    )  # fmt: skip


def chain_segments(
    x: FlatBatch,
    scale: float,
    plan: Plan,
    solved: Solved,
    out: Outputs,
    cut: Segments,
    found: Maps | WideMaps,
    h0: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Folds the maps into start states, and runs the chain over the segments.

    Args:
        found: overwritten as `segments.start_states` says.
        h0: enters each sequence; x.h0 is not used.
        places: of the segments in a pool.
    """
    if isinstance(found, WideMaps):
        starts = wide_scan(found, h0, cut.first_segment)
    else:
        starts = segments.start_states(found, h0, cut)  # a view of found.left
    ends = Ends(cut.bounds, starts, out.ht, cut.ends_of)
    chain(x, scale, plan.kernel, solved, out, ends, places=places)


def chain(
    x: FlatBatch,
    scale: float,
    kernel: ForwardChoice,
    solved: Solved,
    out: Outputs,
    ends: Ends,
    **how: Any,
) -> None:
    """Runs the chain over each sequence's chunks: writes o and, where given, ht and `out.saved`.

    Args:
        x: the batch, whose bounds and states are not used.
        how: further arguments of `fused_fwd`.
    """
    bounds, h0, ht, ends_of, starts_of, first_chunk = ends
    if solved.scores is None:
        fused_fwd(
            x.q, x.k, x.v, x.g, solved.beta, scale, h0, bounds, out.o, ht, out.saved, kernel,
            ends_of=ends_of, starts_of=starts_of, **how,
        )  # fmt: skip
        return
    P, gates, first = solved.scores
    assert solved.A is not None, "of solve_score"
    wide_fwd(
        x.q, x.k, x.v, solved.A, P, gates, first if first_chunk is None else first_chunk, h0,
        bounds, out.o, ht, kernel.tile_v, starts_of, ends_of,
    )  # fmt: skip
