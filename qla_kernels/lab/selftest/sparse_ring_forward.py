"""The CUDA forward of every rank in turn, and what it must produce."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime.cpu import reference
from qla_kernels.sparse_ring import cpu, launch, plan
from qla_kernels.sparse_ring.index import VSIndex, known_index
from qla_kernels.sparse_ring.layouts import ContiguousLayout, Layout, StripedLayout, ZigZagLayout
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash
from qla_kernels.sparse_ring.shard import Columns, Partial, shard_of

# P, and then o, are rounded to 16 bits: relative L2 of a head
ROUNDING = {torch.bfloat16: 3.5e-3, torch.float16: 5e-4}
LSE = 2e-5  # of scores around 1; sums are fp32


class AttentionCall(NamedTuple):
    """A whole sequence, and its lines."""

    q: Tensor
    k: Tensor
    v: Tensor
    lines: VSIndex
    seqlen: int


def lines(
    T: int, H: int, columns: Sequence[float], diagonals: Sequence[float]
) -> FixedVerticalSlash:
    """Returns lines at random: of head h, that part of all columns and of all diagonals."""
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
) -> AttentionCall:
    """Returns q, k and v that are slices of one projection; keys have a common mean."""
    H, Hk = heads
    qkv = torch.randn(B, T, H + 2 * Hk, D)
    qkv[:, :, : H + Hk] += torch.randn(D) / 2
    qkv[:, :, :H] *= gain
    q, k, v = torch.split(qkv.to(device, dtype), [H, Hk, Hk], 2)
    pattern = pattern or lines(T, H, (0.02, 0.1, 0, 0.3), (0.4, 0.1, 0.8))
    return AttentionCall(q, k, v, known_index(pattern, B, H, T, q.device), seqlen or T)


def forward(x: AttentionCall, layout: Layout, per_launch: int = 1) -> tuple[Tensor, Tensor]:
    """Returns o and LSE of the whole sequence: each rank's launches, with every chunk at hand."""
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


def check(x: AttentionCall, o: Tensor, lse: Tensor, lse_limit: float = LSE) -> None:
    """Compares each head with the definition in fp64; rows of padding are 0, their LSE is -inf."""
    definition = reference().sparse_ring
    q, k, v = x.q.double(), x.k.double(), x.v.double()
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
    """Returns [world, B, L, heads, D]; of one rank a view, with the caller's strides."""
    if layout.world == 1:
        return x[None]
    return torch.stack([layout.shard(x, 1, rank) for rank in range(layout.world)])


def _batches(rank: int, world: int, per_launch: int) -> Iterator[tuple[list[int], bool, bool]]:
    """Yields (owners, whether it is the first launch, and the last), as the schedules have them."""
    owners = [(rank - step) % world for step in range(world)]
    yield owners[:1], True, world == 1
    for step in range(1, world, per_launch):
        yield owners[step : step + per_launch], False, step + per_launch >= world


ALONE = StripedLayout(1)
LAYOUTS = (
    StripedLayout(2),
    StripedLayout(3, 64),
    StripedLayout(4, 64),
    ZigZagLayout(2),
    ContiguousLayout(3),
)


def _fwd(variant: Any, given: dict[str, Any], device: str) -> None:
    x = problem(D=variant.D, dtype=dtype_of(variant), device=device, **given)
    check(to(x, "cpu"), *to(forward(x, ALONE), "cpu"))


def _table(_: Any, layout: Layout, device: str) -> None:
    """Checks the table of diagonals: that of the plan."""
    for blocks in (1, 9, 40):
        T = layout.pad_len(blocks * 64)
        active = torch.rand(1, 3, T // 64) < torch.tensor([0.1, 0.5, 1.0])[:, None]
        active[..., 0] = True
        bits = plan.pack(active)
        got, want = launch.table(bits.to(device), T, layout), plan.table(bits, T, layout)
        assert torch.equal(got.bounds.cpu(), want.bounds), "bounds"
        assert torch.equal(got.entries.cpu(), want.entries), "entries"


def _columns(_: Any, layout: Layout, device: str) -> None:
    """Checks that columns are gathered from every chunk; one head has none."""
    T = layout.pad_len(500)
    x = problem(T, lines(T, 4, (0.1, 0, 0.3), (0.2,)), B=2, heads=(4, 2))
    kv = tuple(_chunks(t, layout) for t in (x.k, x.v))
    got, want = (
        Columns(*(x.k.new_ones(2, 4, x.lines.v_idx.shape[-1], 64).to(where) for _ in range(2)))
        for where in (device, "cpu")
    )
    own, *others = range(layout.world)
    for owners in filter(None, ([own], others)):  # a chunk alone, and all others at once
        for gather, where, columns in ((launch.compact, device, got), (cpu.compact, "cpu", want)):
            mine = shard_of(layout, 0, T, T, 1.0, to(tuple(x.lines[:3]), where))
            some = [visit for owner in owners for visit in mine.visits(owner, owner)]
            k, v = to(kv, where)
            gather(mine, k, v, some, columns)
        assert torch.equal(got.k.cpu(), want.k), "k"
        assert torch.equal(got.v.cpu(), want.v), "v"


CASES = (
    Cases(
        ("sparse_ring.fwd",),
        _fwd,
        [{"T": 512, "B": 2, "heads": (4, 2), "seqlen": 470}],
        [{"T": 1920, "B": 2, "heads": heads, "seqlen": 1850} for heads in ((1, 1), (8, 2), (6, 1))],
    ),
    Cases(
        ("sparse_ring.diagonals",),
        _table,
        [ALONE, StripedLayout(1, 64), *LAYOUTS, StripedLayout(8)],
    ),
    Cases(("sparse_ring.gather_columns",), _columns, [ALONE, *LAYOUTS]),
)
