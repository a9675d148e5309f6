"""Launches of the forward's kernels on chunks: the norm, the gates, A, and the chain."""

import functools

import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.kernels import fused_fwd as fused_fwd_kernel
from qla_kernels.gdn.kernels import gate as gate_kernel
from qla_kernels.gdn.kernels import kkt_solve as kkt_solve_kernel
from qla_kernels.gdn.kernels import l2norm as l2norm_kernel
from qla_kernels.gdn.kernels.chain.forward import EVERY, FROM
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch.pools import Places
from qla_kernels.gdn.launch.shares import share_out
from qla_kernels.gdn.launch.tensors import (
    chunk_table,
    fresh_like,
    no_state,
    of_part,
    parts_in_reach,
    pass_state_through,
    sequence_bounds,
    spans,
    tokens,
)
from qla_kernels.gdn.shapes import key_room
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.gdn.validate import OP
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name, require_aligned
from qla_kernels.runtime.varlen import ChunkTable
from qla_kernels.tile.constants import CHUNK


def l2norm_fwd(x: Tensor) -> Tensor:
    """Returns x divided by its L2 norm over K, contiguous.

    x is [B, T, H, K] in bf16 or fp16, with K a multiple of 8 up to 256, a unit last stride and
    other strides that are multiples of 16 bytes.
    """
    require_aligned(OP, x=x)
    K, piece = x.shape[3], l2norm_kernel.PIECE
    with device.of(x):
        y = fresh_like(x)
        for part in parts_in_reach(x) if y.numel() else ():
            x_b, y_b = of_part(part, x, y)
            B, T, H, _ = x_b.shape
            variant = l2norm_kernel.Variant(dtype_name(x.dtype), wide=K > 128)
            jit.compile(l2norm_kernel, variant)(
                x_b.as_strided((B, T, H, K // piece, piece), (*x.stride()[:3], piece, 1)),
                y_b.view(B * T * H, K // piece, piece),
            )
    return y


def gate(
    g: Tensor, beta: Tensor, table: ChunkTable, g_cum: Tensor, wide_beta: Tensor | None = None
) -> Tensor:
    """Cumulates the gates within each chunk; returns them in the layout that kkt_solve fetches.

    Args:
        g: [B, T, HV] fp32, natural log; any strides that flatten to tokens.
        beta: [B, T, HV] in fp32, bf16 or fp16; likewise.
        table: the chunks.
        g_cum: [B, T, HV] fp32, written: the cumulated gates in natural log.
        wide_beta: [B, T, HV] fp32, written: beta, if that has 16 bits; then it must be given.

    Returns:
        [capacity of the table, HV, 3, 64] fp32: three rows per chunk, gamma in base 2, beta and
        fall.
    """
    num_tokens, HV = g.shape[0] * g.shape[1], g.shape[2]
    gates = g.new_empty(table.chunks.shape[0], HV, 3, CHUNK)
    flat = (x.view(num_tokens, HV) for x in (g, beta))
    wide = g_cum if wide_beta is None else wide_beta
    jit.compile(gate_kernel, gate_kernel.Variant(dtype_name(beta.dtype)))(
        *flat, table.chunks, g_cum.view(num_tokens, HV), gates, wide.view(num_tokens, HV)
    )
    return gates


def kkt_solve(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    table: ChunkTable | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    growth: Tensor | None = None,
    wide_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the cumulated gates and the gated inverse of every chunk.

    Args:
        k: [B, T, H, K], bf16 or fp16; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32, natural log.
        beta: [B, T, HV] in fp32, bf16 or fp16.
        cu_seqlens: [N + 1], with B = 1; None if each batch row is a sequence.
        table: the table of chunks; made here if None.
        out: g_cum and A to write into; allocated here if None.
        growth: [B, T, HV] fp32, written if given, for segments.maps: at the last of every 16 tokens
            of a chunk, the sum over the 16 of log max(1, |1 - beta |k|^2|).
        wide_beta: as in `gate`.

    Returns:
        g_cum [B, T, HV] fp32, natural log, inclusive within each chunk, and A [B, T, HV, 64] in k's
        dtype. Rows at or past cu_seqlens[-1] are not written.
    """
    B, T, H, K = k.shape
    HV = g.shape[-1]
    g_cum, A = out or (torch.empty_like(g), k.new_empty(B, T, HV, CHUNK))
    if table is None:
        table = chunk_table(B * T, sequence_bounds(k, cu_seqlens))
    room = table.chunks.shape[0]
    if not g.numel() or not room:
        return g_cum, A
    gates = gate(g, beta, table, g_cum, wide_beta)
    variant = kkt_solve_kernel.Variant(dtype_name(k.dtype), key_room(K))
    jit.compile(kkt_solve_kernel, variant)(
        tokens(k),
        gates.view(room, H, HV // H, 3, CHUNK),
        table.chunks,
        table.num_chunks,
        A.view(B * T, H, HV // H, CHUNK),
        (g_cum if growth is None else growth).view(B * T, H, HV // H),
        walkers(variant, room, H, device.sm_count(k.device)),
        int(growth is not None),
    )
    return g_cum, A


def walkers(variant: kkt_solve_kernel.Variant, chunks: int, heads: int, sm_count: int) -> int:
    """Returns the CTAs of kkt_solve per key head: those resident at once, at most one per chunk."""
    return max(1, min(chunks, _ctas_per_sm(variant) * sm_count // heads))


@functools.cache
def _ctas_per_sm(variant: kkt_solve_kernel.Variant) -> int:
    """Returns how many CTAs of kkt_solve an SM holds.

    Cached: making a schedule, which checks itself, takes the host as long as ten launches.
    """
    return kkt_solve_kernel.schedule(variant).ctas_per_sm


def fused_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    h0: Tensor | None,
    cu_seqlens: Tensor,
    o: Tensor,
    ht: Tensor | None,
    saved: tuple[Tensor, Tensor] | None,
    plan: ForwardChoice,
    ends_of: Tensor | None = None,
    equal_lengths: bool = False,
    starts_of: Tensor | None = None,
    early: bool = True,
    places: Places | None = None,
    shares: bool = False,
    most_cut: int | None = None,
) -> None:
    """Runs the chain over each sequence's chunks: writes o and, where given, ht and saved.

    Args:
        q, k, v: [B, T, heads, size]; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32.
        beta: [B, T, HV], in fp32 or in q's dtype.
        h0: [N, HV, K, V] fp32, any strides, of `with_room`; zeros if None.
        o: [B, T, HV, V], written; rows at or past cu_seqlens[-1] become 0.
        ht: [N, HV, K, V] fp32, any strides, of `room_for`, written if given.
        saved: g_cum [B, T, HV] fp32 and A [B, T, HV, 64]. If the plan solves, they are written for
            the backward, or not at all if None. Otherwise they are read and come from kkt_solve.
        plan: the kernel to run.
        ends_of: given if the sequences are segments: the sequence that each segment ends, or -1.
        equal_lengths: the sequences are known to have one length, or nearly one.
        starts_of: given if the sequences are nodes of a tree, whose spans [N, 2] `cu_seqlens` then
            holds: the row of h0 from which each node starts, or -1 for zeros. `ends_of` is the row
            of ht to which it writes, or -1. Rows of o at no node are not written.
        early: if ends_of is given and starts_of is not, this promises that segment_scan, which
            writes h0, is the launch right before this one, and that all other inputs were complete
            before segment_scan began: the kernel reads them early. See tile/dependent.py.
        places: given if states are in a pool: where sequences start and end. ht is None then, and
            h0 is given if they start from states of their own, as segments do.
        shares: each CTA gets an equal share of all chunks, which cuts sequences between CTAs. The
            results have the same bits.
        most_cut: of shares, if the device alone knows the lengths: see `share_out`.
    """
    B, T, HV, V = v.shape
    K = key_room(q.shape[-1])
    bounds = cu_seqlens.int().contiguous()
    of_sequences = spans(bounds)
    N = of_sequences.shape[0]
    if not N or not o.numel():  # no token to compute, or none that a sequence owns
        for x in (o, *(saved or ())):
            x.zero_()
        pass_state_through(h0, ht)  # of a pool, N > 0 sequences without tokens take the kernel
        return
    g, beta = g.view(B * T, HV), beta.view(B * T, HV)
    is_16 = beta.dtype != torch.float32
    items = N * HV * (V // plan.tile_v)
    if saved is None:  # placeholders, which the kernel does not write
        g_cum, A = g, o.as_strided((B * T, HV, 1, CHUNK), (HV * CHUNK, CHUNK, CHUNK, 1))
    else:
        g_cum, A = saved[0].view(B * T, HV), saved[1].view(B * T, HV, 1, CHUNK)
    pool = "" if places is None else dtype_name(places.pool.dtype)
    variant = fused_fwd_kernel.Variant(dtype_name(q.dtype), K, *plan, pool, shares)
    nothing = no_state(g, K, V) if h0 is None or ht is None else None
    has = [int(x is not None) for x in (h0, ht)]
    kept, numbers = (h0 if nothing is None else nothing), (0, 0, -1)
    entries = chunks = None
    early = early and ends_of is not None and starts_of is None
    if places is not None:
        starts_of, ends_of, early = places.starts, places.ends, h0 is not None
        has = [1, 1]
        h0, ht = places.pool if h0 is None else h0, places.pool
        kept, entries, chunks, numbers = _kept(places)
    ctas = gdn_plan.ctas(items, equal_lengths, device.sm_count(q.device))
    if shares:
        shared = device.sm_count(q.device), most_cut
        tables = share_out(g, bounds, (q.shape[2], HV), plan.tile_v, (K, V), B * T, *shared)
        entries, chunks, kept = tables
        ctas = chunks.shape[0]
    jit.compile(fused_fwd_kernel, variant)(
        tokens(q),
        tokens(k),
        tokens(v, plan.tile_v),
        g,
        g if is_16 else beta,
        beta if is_16 else o.as_strided((B * T, HV), (HV, 1)),
        of_sequences,
        bounds if starts_of is None else starts_of,
        bounds if ends_of is None else ends_of,
        nothing if h0 is None else h0,
        o.view(B * T, HV, V // TILE, TILE),
        nothing if ht is None else ht,
        kept,
        bounds.view(-1) if entries is None else entries,
        bounds.view(-1) if chunks is None else chunks,
        g_cum,
        A,
        scale,
        has[0] and 1 + (starts_of is not None),
        has[1] and 1 + (ends_of is not None),
        int(saved is not None),
        int(is_16),
        ctas,
        int(early),
        *numbers,
    )


def _kept(
    places: Places,
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[int, int, int]]:
    """Returns the tensor of checkpoints, their two tables, and every, keeps and null_slot."""
    if places.kept is None:
        return as_bytes(places.pool), None, None, (0, 0, places.null_slot)
    states, entries, chunks, every = places.kept
    keeps = EVERY if chunks is None else FROM
    return as_bytes(states), entries, chunks, (every, keeps, places.null_slot)


def as_bytes(x: Tensor) -> Tensor:
    """Returns x [..] as bytes [.., size of a number], a view of any strides."""
    return x.unsqueeze(-1).view(torch.uint8)
