"""Launches of the forward's kernels at K = 256: A, P and exponentials of chunks, and the chain.

V is any multiple of 64. steps.py puts them in order.
"""

from torch import Tensor

from qla_kernels.gdn.kernels import solve_score as solve_score_kernel
from qla_kernels.gdn.kernels import wide_fwd as wide_fwd_kernel
from qla_kernels.gdn.kernels.chain.layout import GATE_ROWS, TILE
from qla_kernels.gdn.launch.chunks import gate
from qla_kernels.gdn.launch.tensors import no_state, spans, tokens
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.runtime.varlen import ChunkTable
from qla_kernels.tile.constants import CHUNK


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

    Args:
        q, k: [B, T, H, 256]; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32.
        beta: [B, T, HV], in fp32 or in q's dtype.
        saved: g_cum [B, T, HV] fp32 and A [B, T, HV, 64], written.

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
        tile_v: columns of V of a CTA.
    The others are as for `chunks.fused_fwd`.
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
