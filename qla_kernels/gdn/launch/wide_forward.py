"""Launches of the forward at K = 256: A, P and exponentials of every chunk, then the chain.

V is any multiple of 64.
"""

from torch import Tensor

from qla_kernels.gdn.kernels import solve_score as solve_score_kernel
from qla_kernels.gdn.kernels import wide_fwd as wide_fwd_kernel
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.chunks import gate
from qla_kernels.gdn.launch.tensors import (
    chunk_table,
    no_state,
    pass_state_through,
    spans,
    tokens,
)
from qla_kernels.gdn.launch.wide_segments import wide_starts
from qla_kernels.gdn.plan import Plan
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.runtime.varlen import ChunkTable
from qla_kernels.tile.constants import CHUNK


def wide_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    h0: Tensor | None,
    bounds: Tensor,
    o: Tensor,
    ht: Tensor | None,
    saved: tuple[Tensor, Tensor],
    plan: Plan,
) -> None:
    """Runs the forward of one batch: writes o, saved and, where given, ht.

        segment_plan            cuts long sequences into segments, if the plan has segments
        chunk_table             where the chunks of sequences, or of segments, lie
        gate, solve_score       all of each chunk that does not depend on V
        wide_windows            which chunks of a segment decide the state that leaves it
        wide_map, wide_scan     the map of each segment, and the state that enters it
        wide_fwd                the chain over the chunks of each segment, or of each sequence

    Args:
        q, k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32.
        beta: [B, T, HV], in fp32 or in q's dtype.
        h0: [N, HV, K, V] fp32, any strides; zeros if None.
        bounds: [N + 1] of the sequences.
        o: [B, T, HV, V], written; rows at or past bounds[-1] become 0.
        ht: [N, HV, K, V] fp32, any strides, written if given.
        saved: g_cum [B, T, HV] fp32 and A [B, T, HV, 64], written, likewise.
        plan: where to cut, and the columns of V of a CTA of wide_fwd.
    """
    if bounds.shape[0] == 1 or not o.numel():  # no token to compute, or none that a sequence owns
        for x in (o, *saved):
            x.zero_()
        pass_state_through(h0, ht)
        return
    cut = ends_of = None
    if plan.segment_chunks is not None:
        cut = segments.cut(g, bounds, plan.segment_chunks)
        bounds, ends_of = cut.bounds, cut.ends_of
    table = chunk_table(v.shape[0] * v.shape[1], bounds)
    first, A, tile_v = table.first_chunk, saved[1], plan.kernel.tile_v
    P, gates = solve_score(q, k, g, beta, scale, table, saved)
    if cut is not None:
        h0 = wide_starts(k, v, beta, saved, gates, first, h0, cut, plan.warm_log_bound)
    wide_fwd(q, k, v, A, P, gates, first, h0, bounds, o, ht, tile_v, None, ends_of)


def solve_score(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    table: ChunkTable,
    saved: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Computes all of each chunk that does not depend on V; writes saved, g_cum and A.

    Arguments are as for `wide_forward`.

    Returns:
        P [B, T, HV, 64] in q's dtype, whose rows of no sequence are not written, and
        [capacity of the table, HV, 7, 64] fp32, the rows of a gate slot (chain/layout.py).
    """
    (B, T, H, K), HV = q.shape, g.shape[-1]
    g_cum, A = saved
    P, room = A.new_empty(A.shape), table.chunks.shape[0]
    wide_beta = None if beta.dtype == g.dtype else g.new_empty(g.shape)
    of_gate = gate(g, beta, table, g_cum, wide_beta)
    gates = g.new_empty(room, HV, GATE_ROWS, CHUNK)
    resident = solve_score_kernel.CTAS_PER_SM * device.sm_count(q.device)
    tiles = B * T, H, HV // H, CHUNK
    jit.compile(solve_score_kernel, solve_score_kernel.Variant(dtype_name(q.dtype), K))(
        tokens(q),
        tokens(k),
        of_gate.view(room, H, HV // H, 3, CHUNK),
        table.chunks,
        table.num_chunks,
        A.view(tiles),
        P.view(tiles),
        g_cum.view(tiles[:3]),
        gates.view(room, H, HV // H, GATE_ROWS, CHUNK),
        scale,
        max(1, min(room, resident // H)),
    )
    return P, gates


def wide_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A: Tensor,
    P: Tensor,
    gates: Tensor,
    first_chunk: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor,
    o: Tensor,
    ht: Tensor | None,
    tile_v: int,
    starts_of: Tensor | None = None,
    ends_of: Tensor | None = None,
) -> None:
    """Runs the chain over each sequence's chunks: writes o and, where given, ht.

    Args:
        P, gates: from `solve_score`.
        first_chunk: [N + 1], the number of each sequence's first chunk, as in a chunk table.
        cu_seqlens: [N + 1], or spans [N, 2] of the nodes of a tree.
        starts_of, ends_of: as for `chunks.fused_fwd`.
    The others are as for `wide_forward`.
    """
    B, T, HV, V = v.shape
    K = q.shape[-1]
    bounds = cu_seqlens.int().contiguous()
    tiles = B * T, HV, 1, CHUNK
    nothing = no_state(gates.view(-1, HV), K, V) if h0 is None or ht is None else None
    jit.compile(wide_fwd_kernel, wide_fwd_kernel.Variant(dtype_name(q.dtype), K, tile_v))(
        tokens(q),
        tokens(k),
        tokens(v, tile_v),
        A.view(tiles),
        P.view(tiles),
        gates,
        first_chunk,
        spans(bounds),
        first_chunk if starts_of is None else starts_of,
        first_chunk if ends_of is None else ends_of,
        nothing if h0 is None else h0,
        o.view(B * T, HV, V // TILE, TILE),
        nothing if ht is None else ht,
        0 if h0 is None else 1 + (starts_of is not None),
        0 if ht is None else 1 + (ends_of is not None),
    )
