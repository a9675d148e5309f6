"""What runs on the GPU, in order. Allocates, chooses variants, launches; reads nothing back."""

import torch
from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.gdn.kernels import gate as gate_kernel
from qla_kernels.gdn.kernels import kkt_solve as kkt_solve_kernel
from qla_kernels.varlen import CHUNK, ChunkTable, chunk_table


def gate(g: Tensor, beta: Tensor, table: ChunkTable, g_cum: Tensor) -> Tensor:
    """Cumulated gates of every chunk, into g_cum and in the layout that the other kernels fetch.

    Args:
        g, beta: [B, T, HV] fp32, g in natural log; any strides that flatten to tokens.
        g_cum: [B, T, HV] fp32, natural log.

    Returns:
        [capacity of the table, HV, 3, 64] fp32: gamma in base 2, beta and fall of each chunk.
    """
    tokens, HV = g.shape[0] * g.shape[1], g.shape[2]
    gates = g.new_empty(table.chunks.shape[0], HV, 3, CHUNK)
    flat = (x.view(tokens, HV) for x in (g, beta))
    jit.compile(gate_kernel, gate_kernel.Variant("float32"))(
        *flat, table.chunks, g_cum.view(tokens, HV), gates
    )
    return gates


def kkt_solve(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    table: ChunkTable | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The cumulated gates and the gated inverse of every chunk.

    Args:
        k: [B, T, H, K], bf16 or fp16; any strides that flatten to tokens, with unit last stride.
        g: [B, T, HV] fp32, natural log.
        beta: [B, T, HV] fp32.
        cu_seqlens: [N + 1], B = 1.
        table: the chunks, where the caller has them already.
        out: g_cum and A to write into.

    Returns:
        g_cum [B, T, HV] fp32, natural log, inclusive within each chunk, and A [B, T, HV, 64] in k's
        dtype. Rows at or past cu_seqlens[-1] are not written.
    """
    B, T, H, K = k.shape
    HV = g.shape[-1]
    g_cum, A = out or (torch.empty_like(g), k.new_empty(B, T, HV, CHUNK))
    if not g.numel():
        return g_cum, A
    if table is None:
        table = chunk_table(T, cu_seqlens, batch=B, device=k.device)
    gates = gate(g, beta, table, g_cum)
    variant = kkt_solve_kernel.Variant(str(k.dtype).removeprefix("torch."), K)
    capacity = table.chunks.shape[0]
    jit.compile(kkt_solve_kernel, variant)(
        k.view(B * T, H, K),
        gates.view(capacity, H, HV // H, 3, CHUNK),
        table.chunks,
        table.num_chunks,
        A.view(B * T, H, HV // H, CHUNK),
        walkers(variant, capacity, H, device.sm_count(k.device)),
    )
    return g_cum, A


def walkers(variant: kkt_solve_kernel.Variant, chunks: int, heads: int, sm_count: int) -> int:
    """CTAs a key head: as many as are resident together, and no more than there are chunks."""
    resident = kkt_solve_kernel.schedule(variant).ctas_per_sm * sm_count
    return max(1, min(chunks, resident // heads))
