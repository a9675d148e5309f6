"""Implements the launches of shard.Launches for CUDA tensors, by kernels.

The functions compute the same as those of cpu.py. The host reads nothing back from the device.
"""

import torch
from torch import Tensor

from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name, require_aligned
from qla_kernels.sparse_ring.kernels import diagonals as diagonals_kernel
from qla_kernels.sparse_ring.kernels import fwd as fwd_kernel
from qla_kernels.sparse_ring.kernels import gather_columns as compact_kernel
from qla_kernels.sparse_ring.launch_backward import (
    backward_columns,
    backward_keys,
    backward_queries,
    rounded,
    saved,
    scatter,
)
from qla_kernels.sparse_ring.launch_index import cut, select, window_lse, window_mass
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.operands import (
    chunks,
    columns_of,
    first_blocks_on,
    or_placeholder,
    per_head,
    rows,
    visits_on,
)
from qla_kernels.sparse_ring.plan import Table, Visit
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.sparse_ring.shard import Columns, Partial, Shard
from qla_kernels.sparse_ring.validate import OP
from qla_kernels.tile.constants import LOG2E

__all__ = [
    "backward_columns",
    "backward_keys",
    "backward_queries",
    "compact",
    "cut",
    "forward",
    "rounded",
    "saved",
    "scatter",
    "select",
    "table",
    "window_lse",
    "window_mass",
]


def table(d_bits: Tensor, T: int, layout: Layout) -> Table:
    """Makes the table of diagonals by one launch; the result equals that of plan.table."""
    B, H, _ = d_bits.shape
    blocks = T // BLOCK
    made = Table(
        d_bits.new_empty(B, H, blocks + layout.gap),
        d_bits.new_empty(B, H, layout.buckets + 1),
        layout.gap,
        layout.stripe_blocks,
        layout.buckets,
    )
    with device.of(d_bits):
        jit.compile(diagonals_kernel, diagonals_kernel.Variant())(
            per_head(d_bits),
            per_head(made.entries),
            per_head(made.bounds),
            blocks,
            layout.gap,
            layout.stripe_blocks,
        )
    return made


def compact(shard: Shard, k: Tensor, v: Tensor, visited: list[Visit], columns: Columns) -> None:
    """Launches the copy of the verticals' rows of k and v from visited chunks to `columns`."""
    if not columns.k.numel():
        return
    with device.of(k):
        jit.compile(compact_kernel, compact_kernel.Variant())(
            chunks(k).view(torch.int64),
            chunks(v).view(torch.int64),
            shard.v_idx,
            visits_on(k.device, k.shape[1], tuple(visited)),
            *(x.view(torch.int64) for x in columns),
            shard.T // BLOCK,
            shard.table.stripe_blocks,
            shard.table.buckets,
            shard.rank,
        )


def forward(
    shard: Shard,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visited: list[Visit],
    partial: Partial,
    first: bool,
    columns: Columns | None,
    out: Tensor | None,
) -> None:
    """Launches attention to the visited slashes, and to `columns`; updates partial, writes out."""
    require_aligned(OP, q=q, k=k, v=v)
    *gathered, any_columns = columns_of(columns, q)
    with device.of(q):
        jit.compile(fwd_kernel, fwd_kernel.Variant(dtype_name(q.dtype), q.shape[3]))(
            rows(q),
            chunks(k),
            chunks(v),
            *gathered,
            per_head(shard.table.entries),
            per_head(shard.table.bounds),
            per_head(shard.d_bits),
            per_head(shard.v_idx),
            visits_on(q.device, q.shape[0], tuple(visited)),
            first_blocks_on(q.device, shard.layout, shard.rank, shard.T),
            or_placeholder(partial.o, q, torch.float32),
            partial.lse,
            or_placeholder(out, q, q.dtype),
            shard.table.gap,
            shard.table.stripe_blocks,
            shard.seqlen,
            shard.scale * LOG2E,
            int(first),
            int(any_columns),
            int(out is not None),
        )
