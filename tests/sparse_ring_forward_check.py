"""The CUDA forward of every rank in turn, and what it must produce: both GPU tiers use it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring import launch
from qla_kernels.sparse_ring.index import VSIndex, known_index
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash
from qla_kernels.sparse_ring.shard import Columns, Partial, shard_of
from reference import sparse_ring as definition
from tests.compare import assert_close

# P, and then o, are rounded to 16 bits: relative L2 of a head
ROUNDING = {torch.bfloat16: 3.5e-3, torch.float16: 5e-4}
LSE = 2e-5  # of scores around 1; sums are fp32


class Problem(NamedTuple):
    """A whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    lines: VSIndex
    seqlen: int


def lines(
    T: int, H: int, columns: Sequence[float], diagonals: Sequence[float]
) -> FixedVerticalSlash:
    """Of head h, that part of all columns and of all diagonals, at random."""
    blocks = T // 64

    def some(n: int, share: float) -> tuple[int, ...]:
        return tuple(torch.randperm(n)[: round(share * n)].sort().values.tolist())

    return FixedVerticalSlash(
        tuple(some(T, columns[h % len(columns)]) for h in range(H)),
        tuple(some(blocks, diagonals[h % len(diagonals)]) for h in range(H)),
    )


def problem(
    T: int,
    pattern: FixedVerticalSlash | None = None,
    *,
    B: int = 1,
    heads: tuple[int, int] = (2, 1),
    D: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seqlen: int | None = None,
    gain: float = 1.0,
    device: str = "cpu",
) -> Problem:
    """q, k and v are views into one tensor, as a projection's are; keys have a common mean."""
    H, Hk = heads
    qkv = torch.randn(B, T, H + 2 * Hk, D)
    qkv[:, :, : H + Hk] += torch.randn(D) / 2
    qkv[:, :, :H] *= gain
    q, k, v = qkv.to(device, dtype).split([H, Hk, Hk], 2)
    pattern = pattern or lines(T, H, (0.02, 0.1, 0, 0.3), (0.4, 0.1, 0.8))
    return Problem(q, k, v, known_index(pattern, B, H, T, q.device), seqlen or T)


def forward(x: Problem, layout: Layout, per_launch: int = 1) -> tuple[Tensor, Tensor]:
    """o and LSE of the whole sequence: each rank's launches, with every chunk at hand."""
    B, T, H, D = x.q.shape
    k, v = (_chunks(t, layout) for t in (x.k, x.v))
    o = torch.empty(B, T, H, D, dtype=x.q.dtype, device=x.q.device)
    lse = torch.empty(B, H, T, device=x.q.device)
    for rank in range(layout.world):
        shard = shard_of(layout, rank, T, x.seqlen, D**-0.5, x.lines[:3])
        q = x.q if layout.world == 1 else layout.shard(x.q, 1, rank)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = out.new_empty(q.shape, dtype=torch.float32) if layout.world > 1 else None
        partial = Partial(sums, lse.new_empty(B, H, shard.rows))
        max_v = x.lines.v_idx.shape[-1]
        columns = Columns(*(out.new_full((B, H, max_v, D), torch.nan) for _ in range(2)))
        for owners, first, last in _batches(rank, layout.world, per_launch):
            visited = [visit for owner in owners for visit in shard.visits(owner, owner)]
            launch.compact(shard, k, v, visited, columns)
            ending = (columns, out) if last else (None, None)
            launch.forward(shard, q, k, v, visited, partial, first, *ending)
        mine = layout.positions(T, rank).to(q.device)
        o[:, mine], lse[..., mine] = out, partial.lse
    return o, lse


def check(x: Problem, o: Tensor, lse: Tensor, lse_limit: float = LSE) -> None:
    """Each head against the definition in fp64; rows of padding are 0, their LSE is -inf."""
    q, k, v = (t.double() for t in x[:3])
    columns = o.new_zeros(*x.lines.v_cnt.shape, x.lines.T + 1, dtype=torch.bool)
    columns.scatter_(-1, x.lines.v_idx.long(), True)
    index = definition.Index(columns[..., :-1], x.lines.diagonals())
    want, want_lse = definition.attention(q, k, v, definition.mask(index, x.seqlen))
    live = slice(None, x.seqlen)
    for h in range(q.shape[2]):
        assert_close(f"o of head {h}", o[:, live, h], want[:, live, h], ROUNDING[x.q.dtype])
    torch.testing.assert_close(
        lse[..., live].double(), want_lse[..., live], atol=lse_limit, rtol=1e-6
    )
    assert not o[:, x.seqlen :].any()
    assert (lse[..., x.seqlen :] == -torch.inf).all()


def _chunks(x: Tensor, layout: Layout) -> Tensor:
    """[world, B, L, heads, D]; of one rank a view, with the caller's strides."""
    if layout.world == 1:
        return x[None]
    return torch.stack([layout.shard(x, 1, rank) for rank in range(layout.world)])


def _batches(rank: int, world: int, per_launch: int) -> Iterator[tuple[list[int], bool, bool]]:
    """(owners, whether it is the first launch, and the last), as the schedules have them."""
    owners = [(rank - step) % world for step in range(world)]
    yield owners[:1], True, world == 1
    for step in range(1, world, per_launch):
        yield owners[step : step + per_launch], False, step + per_launch >= world
