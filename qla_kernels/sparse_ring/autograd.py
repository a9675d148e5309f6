"""Defines SparseAttention, attention under given lines as a differentiable function.

On one device it calls the operators of ops.py, in a group it runs ring.py. It saves q, k, v, o,
LSE, the index, and the rows of k and v at the verticals; chunks of other ranks are saved only if
the call asks for it. The backward makes the table of diagonals again. Autocast does not change
dtypes. A second derivative raises an error.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.derivatives import refuse_second_derivative
from qla_kernels.sparse_ring import ops, ring
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.route import Batch, Route
from qla_kernels.sparse_ring.shard import Columns, Shard, shard_of


class Distributed(NamedTuple):
    """The layout and the route of a ring's call, and the forward's batches of chunks.

    The batches' first transfers have been posted.
    """

    layout: Layout
    route: Route
    batches: Iterator[Batch]
    keep_gathered: bool  # the backward does not gather k and v again; of a route that gathers

    def shard(self, q: Tensor, lines: list[Tensor], seqlen: int, scale: float) -> Shard:
        """Returns the Shard of this rank, whose rows q has."""
        T, rank = self.layout.world * q.shape[1], self.route.whole.rank
        return shard_of(self.layout, rank, T, seqlen, scale, lines)


class SparseAttention(torch.autograd.Function):
    """Computes o and LSE of this rank's rows, with derivatives of both in q, k and v.

    `distributed` holds the ring of a call over ranks, and is None for a call on one device.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        v_idx: Tensor,
        v_cnt: Tensor,
        d_bits: Tensor,
        seqlen: int,
        scale: float,
        distributed: Distributed | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns o and the LSE, and saves what the backward reads."""
        lines = [v_idx, v_cnt, d_bits]
        with torch.autocast("cpu", enabled=False):
            if distributed is None:
                done = tuple(ops.vertical_slash_fwd.replayed(q, k, v, *lines, seqlen, scale))
            else:
                shard = distributed.shard(q, lines, seqlen, scale)
                kept = distributed.keep_gathered
                o, lse, columns, gathered = ring.forward(shard, q, distributed.batches, kept)
                done = (o, lse, *columns, *gathered)
        ctx.set_materialize_grads(False)  # an unused LSE costs no tensor of zeros
        ctx.seqlen, ctx.scale, ctx.distributed = seqlen, scale, distributed
        ctx.save_for_backward(q, k, v, *lines, *done)
        return done[0], done[1]

    @staticmethod
    @refuse_second_derivative("sparse_attention")
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns dq, dk, dv, and None for each further input."""
        q, k, v, v_idx, v_cnt, d_bits, o, lse, columns_k, columns_v, *gathered = ctx.saved_tensors
        lines = [v_idx, v_cnt, d_bits]
        do = torch.zeros_like(o) if do is None else do
        settings = (ctx.seqlen, ctx.scale)
        with torch.autocast("cpu", enabled=False):
            if ctx.distributed is None:
                done = (o, lse, columns_k, columns_v)
                dq, dk, dv = ops.vertical_slash_bwd.replayed(
                    q, k, v, *lines, *settings, *done, do, dlse
                )
            else:
                shard = ctx.distributed.shard(q, lines, *settings)
                forward = ring.RingForward(o, lse, Columns(columns_k, columns_v), gathered)
                dq, dk, dv = ring.backward(shard, ctx.distributed.route, q, k, v, forward, do, dlse)
        return dq, dk, dv, None, None, None, None, None, None
