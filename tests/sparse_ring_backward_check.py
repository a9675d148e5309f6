"""The backward's launches on all ranks of a ring, in turn on one device, and the truth."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.sparse_ring import launch, launch_backward
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.plan import pack
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shard import Columns, Shard
from reference import sparse_ring
from reference.sparse_ring import Gradients
from tests.compare import assert_close

# dK and dV are sums of products of two rounded factors, of which the other is given; a rounding is
# 2^-9 (2^-12) at most, 0.29 of twice that on average. dQ is itself rounded once more.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Case(NamedTuple):
    layout: Layout
    seqlen: int
    lines: VSIndex
    q: Tensor  # [B, T, H, D], whole, as k, v, o and their gradients
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor  # [B, H, T]
    do: Tensor
    dlse: Tensor
    want: Gradients  # fp64

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def case(
    layout: Layout,
    L: int,
    heads: tuple[int, int] = (2, 1),
    D: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    B: int = 1,
    columns: int = 40,
    share: float = 0.3,
    seqlen: int | None = None,
    size: float = 1.0,
    device: str = "cpu",
) -> Case:
    """Heads have up to `columns` verticals, head 0 none, and a share of the diagonals."""
    T, (H, Hk) = L * layout.world, heads
    seqlen = T if seqlen is None else seqlen
    v_idx = torch.full((B, H, columns), T, dtype=torch.int32)
    v_cnt = torch.randint(columns + 1, (B, H), dtype=torch.int32)
    v_cnt[:, 0] = columns if H == 1 else 0
    for row, n in zip(v_idx.flatten(0, 1), v_cnt.flatten().tolist(), strict=True):
        row[:n] = torch.randperm(T)[:n].sort().values
    active = torch.rand(B, H, T // 64) < share
    active[..., 0] = True
    index = (x.to(device) for x in (v_idx, v_cnt, pack(active), torch.zeros(B, H)))
    lines = VSIndex(*index, T)
    q, do = (torch.randn(B, T, H, D).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(B, T, Hk, D).to(device, dtype) for _ in range(2))
    q, dlse = q * size, torch.randn(B, H, T, device=device)
    seen = lines.to_mask() & (torch.arange(T, device=device) < seqlen)[:, None]
    wide = [x.double() for x in (q, k, v)]
    o, lse = sparse_ring.attention(*wide, seen)
    o = o.to(dtype)
    delta = sparse_ring.delta(o.double(), do.double(), dlse.double())
    want = sparse_ring.attention_backward(*wide, seen, lse, delta, do.double())
    return Case(layout, seqlen, lines, q, k, v, o, lse.float(), do, dlse, want)


def backward(x: Case) -> Gradients:
    """dQ in two launches where there are several ranks, dK and dV of a chunk, then of the rest."""
    world, T = x.layout.world, x.q.shape[1]
    if world == 1:  # as they are, with their strides
        held, k, v = [slice(None)], x.k[None], x.v[None]
    else:
        held = [x.layout.positions(T, rank).to(x.q.device) for rank in range(world)]
        k, v = (torch.stack([whole[:, rows] for rows in held]) for whole in (x.k, x.v))
    columns = Columns(*(_columns(whole, x.lines.v_idx, T) for whole in (x.k, x.v)))
    dkv = x.q.new_empty(world, 2, *k.shape[1:], dtype=torch.float32)
    dq = []
    for rank, rows in enumerate(held):
        shard = _shard(x, rank)
        q, o, do = (whole[:, rows] for whole in (x.q, x.o, x.do))
        saved = launch_backward.saved(o, x.lse[..., rows], do, x.dlse[..., rows])
        of_columns = launch_backward.backward_columns(shard, q, saved, columns)
        sums = q.new_empty(q.shape, dtype=torch.float32) if world > 1 else None
        out = q.new_empty(q.shape)
        owners = [(rank - step) % world for step in range(world)]
        for n, batch in enumerate(filter(len, (owners[:1], owners[1:]))):
            visited = [visit for owner in batch for visit in shard.visits(owner, owner)]
            last = (columns, out) if owners[-1] in batch else (None, None)
            launch_backward.backward_queries(shard, q, k, v, saved, visited, sums, n == 0, *last)
        dq.append(out)
        chunks = [Chunk(owner, owner, 0, 0) for owner in range(world)]
        for of in filter(len, (chunks[:1], chunks[1:])):  # a chunk alone, and several
            part = dkv[of[0].owner :][: len(of)]
            launch_backward.backward_keys(shard, q, k, v, saved, of, part, rank == 0)
            launch_backward.scatter(shard, of_columns, [chunk.owner for chunk in of], part)
    parts = [dq, [dk for dk, _ in dkv], [dv for _, dv in dkv]]
    if world == 1:
        return Gradients(*(x for (x,) in parts))
    return Gradients(*(sparse_ring.unshard(x, torch.stack(held)) for x in parts))


def check(x: Case, got: Gradients) -> None:
    unit = ROUNDING[x.q.dtype]
    for name, a, b, roundings in zip(("dq", "dk", "dv"), got, x.want, (0.7, 0.5, 0.5), strict=True):
        assert_close(name, a, b, roundings * unit)
        assert not a[:, x.seqlen :].any(), f"{name} of padding"


def _shard(x: Case, rank: int) -> Shard:
    T = x.q.shape[1]
    table = launch.table(x.lines.d_bits, T, x.layout)
    return Shard(x.layout, rank, T, x.seqlen, x.scale, *x.lines[:3], table)


def _columns(x: Tensor, v_idx: Tensor, T: int) -> Tensor:
    """[B, H, max_v, D]: rows of x at v_idx, 0 past the last."""
    B, H, max_v = v_idx.shape
    per_head = x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2)
    at = v_idx.long()[..., None].expand(B, H, max_v, x.shape[3])
    return per_head.gather(2, at.clamp(max=T - 1)).masked_fill(at == T, 0).contiguous()
