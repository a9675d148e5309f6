"""Cases of each kernel of the sparse forward: one rank of two, 300 tokens, two heads."""

from collections.abc import Callable

import torch

from qla_kernels.cpu import reference
from qla_kernels.selftest.cases import Result, error_of, label
from qla_kernels.sparse_ring.index import VSIndex, known_index
from qla_kernels.sparse_ring.layouts import StripedLayout
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash

LAYOUT = StripedLayout(2)
SEQLEN, T, HEADS = 300, 512, 2
LINES = FixedVerticalSlash(((0, 3, 70, 299), (130,)), ((0, 3), (0, 1, 2)))


def _lines(where: str) -> VSIndex:
    return known_index(LINES, 1, HEADS, T, where)


def _diagonals() -> list[Result]:
    from qla_kernels.sparse_ring import launch, plan

    bits = _lines("cpu").d_bits
    want, got = plan.table(bits, T, LAYOUT), launch.table(bits.cuda(), T, LAYOUT)
    error = max(error_of(a, b.double()) for a, b in zip(got[:2], want[:2], strict=True))
    return [Result("sparse_ring.diagonals", error, 0)]


def _compact() -> list[Result]:
    got, want, *_ = _attended(torch.bfloat16, 128)
    return [Result("sparse_ring.gather_columns", error_of(got, want), 0)]


def _fwd() -> list[Result]:
    results = []
    for dtype, limit in ((torch.bfloat16, 4e-3), (torch.float16, 6e-4)):
        for D in (128, 64):
            *_, got, want = _attended(dtype, D)
            name = label("sparse_ring.fwd", dtype, f", D {D}")
            results.append(Result(name, error_of(got, want), limit))
    return results


def _attended(dtype: torch.dtype, D: int) -> tuple[torch.Tensor, ...]:
    """Returns for the second rank (keys, expected keys, o, expected o).

    The keys are those of the first head's columns.
    """
    from qla_kernels.sparse_ring import launch
    from qla_kernels.sparse_ring.shard import Columns, Partial, shard_of

    definition, rank, lines = reference().sparse_ring, 1, _lines("cuda")
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, D, generator=random).to(dtype) for heads in (HEADS, 1, 1))
    held = [LAYOUT.positions(T, r) for r in range(2)]
    mine = q[:, held[rank]].cuda()
    k_all, v_all = (torch.stack([x[:, rows] for rows in held]).cuda() for x in (k, v))
    shard = shard_of(LAYOUT, rank, T, SEQLEN, D**-0.5, lines[:3])
    out, lse = torch.empty_like(mine), torch.empty(1, HEADS, T // 2, device="cuda")
    partial = Partial(torch.empty_like(mine, dtype=torch.float32), lse)
    columns = Columns(*(mine.new_zeros(*lines.v_idx.shape, D) for _ in range(2)))
    for owner in (rank, 0):
        visits = shard.visits(owner, owner)
        launch.compact(shard, k_all, v_all, visits, columns)
        ending = (columns, out) if owner == 0 else (None, None)
        launch.forward(shard, mine, k_all, v_all, visits, partial, owner == rank, *ending)
    index = definition.Index(_columns_of(lines), lines.diagonals().cpu())
    seen = definition.mask(index, SEQLEN)
    o, _ = definition.attention(q.double(), k.double(), v.double(), seen)
    return columns.k[0, 0], k[0, list(LINES.v_idx[0]), 0].double(), out, o[:, held[rank]]


def _columns_of(lines: VSIndex) -> torch.Tensor:
    columns = torch.zeros(1, HEADS, T + 1, dtype=torch.bool)
    return columns.scatter(-1, lines.v_idx.cpu().long(), True)[..., :T]


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "sparse_ring.diagonals": _diagonals,
    "sparse_ring.gather_columns": _compact,
    "sparse_ring.fwd": _fwd,
}
