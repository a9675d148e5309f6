"""The launches of the backward on all ranks of a ring, in turn on one device, and the truth."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime.cpu import reference
from qla_kernels.sparse_ring import launch, launch_backward
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import ContiguousLayout, Layout, StripedLayout, ZigZagLayout
from qla_kernels.sparse_ring.plan import pack
from qla_kernels.sparse_ring.route import Chunk
from qla_kernels.sparse_ring.shard import Columns, Shard

# dK and dV are sums of products of two rounded factors, of which the other is given; a rounding is
# 2^-9 (2^-12) at most, 0.29 of twice that on average. dQ is itself rounded once more.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class AttentionBackward(NamedTuple):
    """A whole sequence, and what its gradients must be."""

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
    want: Any  # its gradients dq, dk, dv in fp64

    @property
    def scale(self) -> float:
        """Returns the factor of the scores."""
        return float(self.q.shape[-1] ** -0.5)


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
) -> AttentionBackward:
    """Returns random tensors and a share of the diagonals; up to `columns` columns, head 0 none."""
    sparse_ring = reference().sparse_ring
    T, (H, Hk) = L * layout.world, heads
    seqlen = T if seqlen is None else seqlen
    v_idx = torch.full((B, H, columns), T, dtype=torch.int32)
    v_cnt = torch.randint(columns + 1, (B, H), dtype=torch.int32)
    v_cnt[:, 0] = columns if H == 1 else 0
    for row, n in zip(v_idx.flatten(0, 1), v_cnt.flatten().tolist(), strict=True):
        row[:n] = torch.randperm(T)[:n].sort().values
    active = torch.rand(B, H, T // 64) < share
    active[..., 0] = True
    lines = to(VSIndex(v_idx, v_cnt, pack(active), torch.zeros(B, H), T), device)
    q, do = (torch.randn(B, T, H, D).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(B, T, Hk, D).to(device, dtype) for _ in range(2))
    q, dlse = q * size, torch.randn(B, H, T, device=device)
    seen = lines.to_mask() & (torch.arange(T, device=device) < seqlen)[:, None]
    wide = [x.double() for x in (q, k, v)]
    o, lse = sparse_ring.attention(*wide, seen)
    o = o.to(dtype)
    delta = sparse_ring.delta(o.double(), do.double(), dlse.double())
    want = sparse_ring.attention_backward(*wide, seen, lse, delta, do.double())
    return AttentionBackward(layout, seqlen, lines, q, k, v, o, lse.float(), do, dlse, want)


def backward(x: AttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv.

    If there are several ranks, dQ is two launches; dK and dV are one for a chunk, one for the rest.
    """
    world, T = x.layout.world, x.q.shape[1]
    held: list[Any] = [slice(None)]
    if world == 1:  # as they are, with their strides
        k, v = x.k[None], x.v[None]
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
    dk, dv = dkv.unbind(1)
    if world == 1:
        return dq[0], dk[0], dv[0]
    unshard, rows = reference().sparse_ring.unshard, torch.stack(held)
    return unshard(dq, rows), unshard([*dk], rows), unshard([*dv], rows)


def check(x: AttentionBackward, got: tuple[Tensor, ...]) -> None:
    """Compares the gradients with fp64; those of padding are 0."""
    unit = ROUNDING[x.q.dtype]
    for name, a, b, roundings in zip(("dq", "dk", "dv"), got, x.want, (0.7, 0.5, 0.5), strict=True):
        assert_close(name, a, b, roundings * unit)
        assert not a[:, x.seqlen :].any(), f"{name} of padding"


def _shard(x: AttentionBackward, rank: int) -> Shard:
    T = x.q.shape[1]
    table = launch.table(x.lines.d_bits, T, x.layout)
    return Shard(x.layout, rank, T, x.seqlen, x.scale, *x.lines[:3], table)


def _columns(x: Tensor, v_idx: Tensor, T: int) -> Tensor:
    """Returns [B, H, max_v, D]: rows of x at v_idx, 0 past the last."""
    B, H, max_v = v_idx.shape
    per_head = x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2)
    at = v_idx.long()[..., None].expand(B, H, max_v, x.shape[3])
    return per_head.gather(2, at.clamp(max=T - 1)).masked_fill(at == T, 0).contiguous()


RINGS = (
    StripedLayout(1),
    *(StripedLayout(world, stripe) for world in (2, 3, 4, 8) for stripe in (64, 128)),
    *(kind(world) for world in (2, 3, 4) for kind in (ContiguousLayout, ZigZagLayout)),
)


def _launched(variant: Any, given: tuple[Layout, int, int, int], device: str) -> None:
    layout, L, columns, padding = given
    T = layout.pad_len(L * layout.world)
    x = case(
        layout, T // layout.world, (4, 2), variant.D, dtype_of(variant),
        columns=columns, seqlen=T - padding,
    )  # fmt: skip
    check(x, to(backward(to(x, device)), "cpu"))


def _rounded(variant: Any, shape: tuple[int, ...], device: str) -> None:
    """Compares with the CPU's rounding; some sums lie half-way between neighbours."""
    dtype = dtype_of(variant)
    near = torch.randn(2, *shape).to(dtype).float()
    half = torch.finfo(dtype).eps / 4 * torch.exp2(torch.frexp(near).exponent)  # of a place
    share = torch.rand_like(near)
    sums = near + half * torch.where(share < 0.2, share, 1)
    got = launch_backward.rounded(sums.to(device), dtype)
    for name, a, b in zip(("dk", "dv"), got, sums, strict=True):
        assert torch.equal(a.cpu(), b.to(dtype)), f"{name} is not rounded to nearest even"


CASES = (
    # both dtypes and both sizes are emulated
    Cases(
        (
            "sparse_ring.bwd_dq",
            "sparse_ring.bwd_dkv",
            "sparse_ring.bwd_dkv_columns",
            "sparse_ring.scatter",
        ),
        _launched,
        [
            (layout, 256, 150, 5)
            for layout in (
                StripedLayout(1),
                StripedLayout(2),
                StripedLayout(2, 64),
                ZigZagLayout(2),
            )
        ],
        [(layout, -(-2000 // layout.world), 200, 70) for layout in RINGS],
        emulated=("bf16-d128", "fp16-d64"),
    ),
    Cases(
        ("sparse_ring.round_sums",),
        _rounded,
        [(1, 128, 1, 64), (2, 384, 3, 64), (1, 128, 2, 128)],
        [(1, 2**17, 16, 128)],
    ),
)
