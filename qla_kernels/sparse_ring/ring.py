"""Runs the forward and the backward of one rank: its launches in order, and their transfers.

Every schedule and every device runs the same two functions, a single rank included. Partial results
stay in fp32 (fp64 for fp64 tensors) from the first launch to the last, and each result is rounded
once, so accuracy does not depend on the number of ranks. A call that needs one launch only has no
partial results.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from qla_kernels.sparse_ring.gradients import gradients_of
from qla_kernels.sparse_ring.plan import Visit
from qla_kernels.sparse_ring.route import Batch, Chunk, Route
from qla_kernels.sparse_ring.shard import Columns, Partial, Shard, launches, wide


class RingForward(NamedTuple):
    """Results of `forward`, of this rank's rows."""

    o: Tensor  # [B, L, H, D] in q's dtype
    lse: Tensor  # [B, H, L], natural log, fp32
    columns: Columns  # saved for the backward, which then need not gather them again
    gathered: Sequence[Tensor] = ()  # k and v of all ranks, if the backward is not to gather them


class RingBackward(NamedTuple):
    """Results of `backward`, of this rank's rows; each has the dtype of its input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def forward(
    shard: Shard, q: Tensor, batches: Iterable[Batch], keep_gathered: bool = False
) -> RingForward:
    """Computes o, LSE and the gathered columns of this rank's rows, with one launch per batch.

    `batches` come from `Route.batches`. The caller makes them as soon as it has k and v, because
    that starts the first transfers. With `keep_gathered` the result has k and v of the last batch,
    which are those of all ranks if the schedule is allgather.
    """
    run = launches(q.device)
    B, L, H, D = q.shape
    out = q.new_empty(q.shape)
    partial = Partial(None, _wide(q, B, H, L))
    columns = Columns(*(q.new_empty(B, H, shard.v_idx.shape[-1], D) for _ in range(2)))
    for batch in batches:
        if not batch.last and partial.o is None:
            partial = partial._replace(o=_wide(q, B, L, H, D))
        visited = _visits(shard, batch.chunks)
        last = (columns, out) if batch.last else (None, None)
        run.compact(shard, batch.k, batch.v, visited, columns)
        run.forward(shard, q, batch.k, batch.v, visited, partial, batch.first, *last)
    return RingForward(out, partial.lse, columns, (batch.k, batch.v) if keep_gathered else ())


def backward(
    shard: Shard,
    route: Route,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    done: RingForward,
    do: Tensor,
    dlse: Tensor | None,
) -> RingBackward:
    """Returns dq, dk and dv of this rank's rows.

    The gradients of the verticals are computed first, while chunks of k and v are transferred, and
    are later added to the gradients of the chunks they lie in. Each step runs the pass for dK and
    dV before the pass for dQ, so that dK and dV are sent while dQ is computed. This holds for the
    last transfer as well, which brings them home.
    """
    run = launches(q.device)
    batches = route.kept(*done.gathered) if done.gathered else route.batches(k, v)
    gradients = gradients_of(route, k)
    saved = run.saved(done.o, done.lse, do, dlse)
    column_grads = run.backward_columns(shard, q, saved, done.columns)
    dq, out = None, q.new_empty(q.shape)
    for batch in batches:
        for chunks, dkv in gradients.of(batch.chunks):
            run.backward_keys(shard, q, batch.k, batch.v, saved, chunks, dkv, True)
            run.scatter(shard, column_grads, [chunk.owner for chunk in chunks], dkv)
        if not batch.last and dq is None:
            dq = _wide(q, *q.shape)
        visited = _visits(shard, batch.chunks)
        last = (done.columns, out) if batch.last else (None, None)
        run.backward_queries(shard, q, batch.k, batch.v, saved, visited, dq, batch.first, *last)
    return RingBackward(out, *gradients.home(k.dtype))


def _visits(shard: Shard, chunks: list[Chunk]) -> list[Visit]:
    return [visit for chunk in chunks for visit in shard.visits(chunk.owner, chunk.slot)]


def _wide(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=wide(x))
