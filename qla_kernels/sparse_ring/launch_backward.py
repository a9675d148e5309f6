"""Implements the backward's launches of shard.Launches for CUDA tensors."""

import torch
from torch import Tensor

from qla_kernels.attn.kernels.delta import DELTA, LSE2
from qla_kernels.attn.launch import row_stats
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.sparse_ring.kernels import bwd_dkv as dkv_kernel
from qla_kernels.sparse_ring.kernels import bwd_dkv_columns as columns_kernel
from qla_kernels.sparse_ring.kernels import bwd_dq as dq_kernel
from qla_kernels.sparse_ring.kernels import round_sums as round_kernel
from qla_kernels.sparse_ring.kernels import scatter as scatter_kernel
from qla_kernels.sparse_ring.operands import (
    INT32,
    chunks,
    columns_of,
    first_blocks_of,
    first_blocks_on,
    or_placeholder,
    per_head,
    rows,
    visits_on,
)
from qla_kernels.sparse_ring.plan import Visit
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shapes import TILE
from qla_kernels.sparse_ring.shard import Columns, Saved, Shard
from qla_kernels.tile.constants import LOG2E

ROWS_A_SLICE, MOST_SLICES = 8192, 4  # slices of queries, for columns; scatter reads each
NUMBERS = 1 << 27  # most fp32 numbers that all slices' dK and dV of columns may take
ALIGNMENT = 16  # bytes, required by TMA for a tensor's address and its strides


def saved(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Saved:
    """Returns the LSE in base 2, delta, and dO, copied if TMA could not read its strides."""
    with device.of(o):
        do = _readable(do)
        numbers = row_stats(o, do, lse, dlse, base2=False)
    return Saved(numbers[:, :, LSE2], numbers[:, :, DELTA], do)


def backward_queries(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    visited: list[Visit],
    dq: Tensor | None,
    first: bool,
    columns: Columns | None,
    out: Tensor | None,
) -> None:
    """Launches the pass for dQ; adds to dq and, in the last launch, writes out."""
    table = shard.table
    *gathered, any_columns = columns_of(columns, q)
    with device.of(q):
        jit.compile(dq_kernel, dq_kernel.Variant(dtype_name(q.dtype), q.shape[3]))(
            *_queries(q, saved),
            chunks(k),
            chunks(v),
            *gathered,
            *(per_head(x) for x in (table.entries, table.bounds, shard.d_bits, shard.v_idx)),
            visits_on(q.device, q.shape[0], tuple(visited)),
            first_blocks_on(q.device, shard.layout, shard.rank, shard.T),
            or_placeholder(dq, q, torch.float32),
            or_placeholder(out, q, q.dtype),
            table.gap,
            table.stripe_blocks,
            shard.scale,
            shard.scale * LOG2E,
            int(first),
            int(any_columns),
            int(out is not None),
        )


def backward_keys(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    met: list[Chunk],
    dkv: Tensor,
    first: bool,
) -> None:
    """Launches the pass for dK and dV of the chunks `met`; adds to dkv."""
    table = shard.table
    visits = tuple(visit for x in met for visit in shard.returns(x.owner, x.slot))
    with device.of(q):
        jit.compile(dkv_kernel, dkv_kernel.Variant(dtype_name(q.dtype), q.shape[3]))(
            *_queries(q, saved),
            chunks(k),
            chunks(v),
            per_head(table.entries),
            per_head(table.bounds),
            torch.unflatten(visits_on(q.device, q.shape[0], visits), 0, (len(met), -1)),
            first_blocks_of(q.device, shard.layout, tuple(x.owner for x in met), shard.T),
            dkv,
            table.gap,
            table.stripe_blocks,
            shard.scale,
            shard.scale * LOG2E,
            int(first),
        )


def backward_columns(shard: Shard, q: Tensor, saved: Saved, columns: Columns) -> Columns:
    """Returns dK and dV of every vertical, fp32 [slices, B H, padded_v, D].

    Each slice of the queries has sums of its own, which `scatter` adds. `padded_v` is max_v,
    rounded up to whole tiles.
    """
    B, H, max_v, D = columns.k.shape
    padded_v = -(-max_v // TILE) * TILE
    most = max(1, NUMBERS // max(1, 2 * B * H * padded_v * D))
    slices = min(MOST_SLICES, most, -(-shard.rows // ROWS_A_SLICE))
    grads = Columns(*saved.lse.new_empty(2, slices, B * H, padded_v, D))
    if max_v:
        with device.of(q):
            jit.compile(columns_kernel, columns_kernel.Variant(dtype_name(q.dtype), D))(
                *_queries(q, saved),
                *(x.view(B * H, max_v, 1, D) for x in columns),
                per_head(shard.d_bits),
                per_head(shard.v_idx),
                first_blocks_on(q.device, shard.layout, shard.rank, shard.T),
                *grads,
                shard.table.gap,
                shard.T,
                shard.scale,
                shard.scale * LOG2E,
            )
    return grads


def scatter(shard: Shard, column_grads: Columns, owners: list[int], dkv: Tensor) -> None:
    """Launches the addition of the verticals' gradients to dkv of the chunks of `owners`."""
    Hk, D = dkv.shape[4:]
    H, max_v = shard.v_idx.shape[1:]
    if max_v:
        with device.of(dkv):
            jit.compile(scatter_kernel, scatter_kernel.Variant(D))(
                *column_grads,
                per_head(shard.v_idx),
                first_blocks_of(dkv.device, shard.layout, tuple(owners), shard.T),
                dkv,
                shard.table.gap,
                H // Hk,
            )


def rounded(sums: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Launches the rounding of dK and dV of a chunk, which are new tensors; returns them."""
    grads = [sums.new_empty(sums.shape[1:], dtype=dtype) for _ in range(2)]
    if sums.numel():
        pieces = -1, round_kernel.ROUND_PIECE
        with device.of(sums):
            jit.compile(round_kernel, round_kernel.Variant(dtype_name(dtype)))(
                sums.view(2, *pieces), *(x.view(pieces) for x in grads)
            )
    return grads


def _queries(q: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    return rows(q), rows(saved.do), saved.lse, saved.delta


def _readable(x: Tensor) -> Tensor:
    """Returns x [B, L, H, D], or a contiguous copy if x is not aligned to 16 bytes for TMA.

    autograd may pass a gradient with any strides.
    """
    step = ALIGNMENT // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    in_whole_pieces = all(0 < s <= INT32 and s % step == 0 for s in strides)
    aligned = x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0
    return x if in_whole_pieces and aligned else x.contiguous()
