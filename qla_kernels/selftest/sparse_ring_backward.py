"""Cases of each kernel of the sparse backward, for one rank of two, against fp64 torch tiles."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import Result, error_of, label
from qla_kernels.sparse_ring import cpu
from qla_kernels.sparse_ring.index import known_index
from qla_kernels.sparse_ring.layouts import StripedLayout
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shard import Columns, Saved, Shard, launches, shard_of, wide

LAYOUT, RANK = StripedLayout(2), 1
SEQLEN, T, HEADS = 300, 512, 2
LINES = FixedVerticalSlash(((0, 3, 70, 290), (130,)), ((0, 3), (0, 1, 2)))
LIMITS = ((torch.bfloat16, 3e-3), (torch.float16, 4e-4))


class _Case(NamedTuple):
    """The inputs of a rank's launches: made once in fp64 on the CPU, and once on the GPU."""

    shard: Shard
    q: Tensor
    k: Tensor  # [ranks, 1, rows, 1, D]
    v: Tensor
    saved: Saved
    columns: Columns


def _cases(dtype: torch.dtype, D: int) -> tuple[_Case, _Case]:
    definition, random = reference().sparse_ring, torch.Generator().manual_seed(0)
    q, do, k, v = (
        torch.randn(1, T, heads, D, generator=random).to(dtype).double()
        for heads in (HEADS, HEADS, 1, 1)
    )
    lines = known_index(LINES, 1, HEADS, T, "cpu")
    seen = lines.to_mask() & (torch.arange(T) < SEQLEN)[:, None]
    o, lse = definition.attention(q, k, v, seen)
    held = [LAYOUT.positions(T, rank) for rank in (0, 1)]
    own = q[:, held[RANK]]
    k_all, v_all = (torch.stack([x[:, rows] for rows in held]) for x in (k, v))
    where = lines.v_idx[0].long().clamp(max=T - 1)
    live = (lines.v_idx < T)[..., None]
    columns = Columns(*(x[:, where, 0] * live for x in (k, v)))
    saved = cpu.saved(o[:, held[RANK]], lse[..., held[RANK]], do[:, held[RANK]], None)
    shard = shard_of(LAYOUT, RANK, T, SEQLEN, D**-0.5, lines[:3])
    q_gpu, k_gpu, v_gpu, do_gpu = (x.to("cuda", dtype) for x in (own, k_all, v_all, saved.do))
    on_gpu = _Case(
        shard_of(LAYOUT, RANK, T, SEQLEN, D**-0.5, [x.cuda() for x in lines[:3]]),
        q_gpu,
        k_gpu,
        v_gpu,
        Saved((saved.lse * math.log2(math.e)).float().cuda(), saved.delta.float().cuda(), do_gpu),
        Columns(*(x.to("cuda", dtype) for x in columns)),
    )
    return _Case(shard, own, k_all, v_all, saved, columns), on_gpu


def _dq(x: _Case) -> Tensor:
    visits = [visit for owner in (1, 0) for visit in x.shard.visits(owner, owner)]
    run, out = launches(x.q.device), torch.empty_like(x.q)
    run.backward_queries(x.shard, x.q, x.k, x.v, x.saved, visits, None, True, x.columns, out)
    return out


def _dkv(x: _Case) -> Tensor:
    """Returns the gradient of k and v for the other rank's chunk."""
    dkv = torch.empty(1, 2, *x.k.shape[1:], dtype=wide(x.q), device=x.q.device)
    other = [Chunk(0, 0, 0, 0)]
    launches(x.q.device).backward_keys(x.shard, x.q, x.k, x.v, x.saved, other, dkv, True)
    return dkv


def _dkv_columns(x: _Case) -> Tensor:
    """Returns the columns' gradient at their places in the other rank's chunk, by `scatter`.

    All other places are 0.
    """
    run, dkv = (
        launches(x.q.device),
        torch.zeros(1, 2, *x.k.shape[1:], dtype=wide(x.q)).to(x.q.device),
    )
    of_columns = run.backward_columns(x.shard, x.q, x.saved, x.columns)
    run.scatter(x.shard, of_columns, [0], dkv)
    return dkv


def _check(name: str, gradient: Callable[[_Case], Tensor]) -> Callable[[], list[Result]]:
    def check() -> list[Result]:
        results = []
        for dtype, limit in LIMITS:
            for D in (128, 64):
                want, got = map(gradient, _cases(dtype, D))
                results.append(Result(label(name, dtype, f", D {D}"), error_of(got, want), limit))
        return results

    return check


KERNELS: dict[str, Callable[[], list[Result]]] = {
    name: _check(name, gradient)
    for name, gradient in (
        ("sparse_ring.bwd_dkv_columns", _dkv_columns),
        ("sparse_ring.bwd_dq", _dq),
        ("sparse_ring.bwd_dkv", _dkv),
        ("sparse_ring.scatter", _dkv_columns),
    )
}
