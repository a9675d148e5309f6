"""Forward and backward of one rank: which launches, in which order, around a ring or alone.

Every schedule and every device runs these two functions. Partial results are fp32 from the first
launch to the last, so accuracy does not depend on the number of ranks; each tensor is rounded once.
Where one launch meets everything there are none.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring.gradients import gradients_of
from qla_kernels.sparse_ring.plan import Visit
from qla_kernels.sparse_ring.route import Batch, Chunk, Route
from qla_kernels.sparse_ring.shard import Columns, Partial, Shard, tiles, wide


class Forward(NamedTuple):
    o: Tensor  # [B, L, H, D] in q's dtype
    lse: Tensor  # [B, H, L], natural log, fp32
    columns: Columns  # kept for the backward: their chunks need not be asked again


class Backward(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def forward(shard: Shard, q: Tensor, batches: Iterable[Batch]) -> Forward:
    """`batches` are those of a route, begun when the caller had k and v."""
    run = tiles(q.device)
    B, L, H, D = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = Partial(None, _wide(q, B, H, L))
    columns = Columns(*(q.new_empty(B, H, shard.v_idx.shape[-1], D) for _ in range(2)))
    for batch in batches:
        if not batch.last and partial.o is None:
            partial = partial._replace(o=_wide(q, B, L, H, D))
        visited = _visits(shard, batch.chunks)
        last = (columns, out) if batch.last else (None, None)
        run.compact(shard, batch.k, batch.v, visited, columns)
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
    """Verticals first, which hides what is gathered: their gradients join those of each chunk.

    A step runs the pass for dK and dV before the pass for dQ, which hides their way, the last one's
    home as well.
    """
    run = tiles(q.device)
    batches, gradients = route.batches(k, v), gradients_of(route, k)
    saved = run.saved(done.o, done.lse, do, dlse)
    of_columns = run.backward_columns(shard, q, saved, done.columns)
    dq, out = None, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for batch in batches:
        for chunks, dkv, first in gradients.of(batch.chunks):
            run.backward_keys(shard, q, batch.k, batch.v, saved, chunks, dkv, first)
            run.scatter(shard, of_columns, [chunk.owner for chunk in chunks], dkv)
        if not batch.last and dq is None:
            dq = _wide(q, *q.shape)
        visited = _visits(shard, batch.chunks)
        last = (done.columns, out) if batch.last else (None, None)
        run.backward_queries(shard, q, batch.k, batch.v, saved, visited, dq, batch.first, *last)
    return Backward(out, *gradients.home(k.dtype))


def _visits(shard: Shard, chunks: list[Chunk]) -> list[Visit]:
    return [visit for chunk in chunks for visit in shard.visits(chunk.owner, chunk.slot)]


def _wide(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=wide(x), device=x.device)
