"""Forward and backward of one rank: which launches, in which order, around a ring or alone.

Every schedule and every device runs these two functions. Partial results are fp32 from the first
launch to the last, so accuracy does not depend on the number of ranks; each tensor is rounded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring.gradients import gradients_of
from qla_kernels.sparse_ring.route import Route
from qla_kernels.sparse_ring.shard import Columns, Partial, Shard, tiles, wide


class Forward(NamedTuple):
    o: Tensor  # [B, L, H, D] in q's dtype
    lse: Tensor  # [B, H, L], natural log, fp32
    columns: Columns  # kept for the backward: their chunks need not be asked again


class Backward(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def forward(shard: Shard, route: Route, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    run = tiles(q.device)
    B, L, H, D = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = Partial(_wide(q, B, L, H, D), _wide(q, B, H, L))
    columns = Columns(*(k.new_zeros(B, H, shard.lines.v_idx.shape[-1], D) for _ in range(2)))
    for batch in route.batches(k, v):
        for chunk in batch.chunks:
            run.compact(shard, batch.k, batch.v, chunk.owner, chunk.slot, columns)
        visited = [v for chunk in batch.chunks for v in shard.visits(chunk.owner, chunk.slot)]
        last = (columns, out) if batch.last else (None, None)
        run.forward(shard, q, batch.k, batch.v, visited, partial, batch.first, *last)
    return Forward(out, partial.lse, columns)


def backward(
    shard: Shard,
    route: Route,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    done: Forward,
    do: Tensor,
    dlse: Tensor | None,
) -> Backward:
    """Verticals first: their gradients then join those of each chunk while it is here.

    A step runs the pass for dQ before the pass for dK and dV, whose accumulator is under way for as
    long.
    """
    run = tiles(q.device)
    saved = run.saved(done.o, done.lse, do, dlse)
    of_columns = run.backward_columns(shard, q, saved, done.columns)
    dq, out = _wide(q, *q.shape), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    gradients = gradients_of(route, k)
    for batch in route.batches(k, v):
        visited = [v for chunk in batch.chunks for v in shard.visits(chunk.owner, chunk.slot)]
        last = (done.columns, out) if batch.last else (None, None)
        run.backward_queries(shard, q, batch.k, batch.v, saved, visited, dq, batch.first, *last)
        for chunk in batch.chunks:
            dkv, first = gradients.arrive(chunk)
            where = (chunk.owner, chunk.slot)
            run.backward_keys(shard, q, batch.k, batch.v, saved, *where, dkv, first)
            run.scatter(shard, of_columns, chunk.owner, dkv)
            gradients.leave(chunk)
    dk, dv = gradients.home()  # views of one tensor, which travelled
    return Backward(out, dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True))


def _wide(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=wide(x), device=x.device)
