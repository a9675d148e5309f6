"""What ranks of a ring find, for tests.ranks. The last case kills one."""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from tests.limits import HANG
from tests.ranks import DEADLINE, WORLD, raised, serve

PATIENCE = timedelta(seconds=HANG)  # of the groups in which nobody is missing


def problem(world: int, dtype: Any = None) -> dict[str, Any]:
    """A whole sequence, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(world)
    T, H, Hk, D = 256 * world, 2, 1, 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mean = normal(H, D)
    q, k = normal(1, T, H, D) + mean, normal(1, T, Hk, D) + mean[:Hk]
    do, dlse = normal(1, T, H, D), normal(1, H, T)
    seqlen = T - 70
    dlse[..., seqlen:] = 0  # the LSE of padding is a constant
    return {"q": q, "k": k, "v": normal(1, T, Hk, D), "do": do, "dlse": dlse, "seqlen": seqlen}


def truth(x: dict[str, Any], index: Any) -> list[Any]:
    """o, LSE, dq, dk, dv of the definition, in fp64."""
    import torch

    from reference import sparse_ring as definition

    token = torch.arange(index.T)
    visible = index.to_mask() & (token < x["seqlen"])[:, None]
    leaves = [x[n].double().requires_grad_() for n in "qkv"]
    o, lse = definition.attention(*leaves, visible)
    live = lse[..., : x["seqlen"]]
    loss = (o * x["do"]).sum() + (live * x["dlse"][..., : x["seqlen"]]).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def shards(x: dict[str, Any], layout: Any, rank: int) -> list[Any]:
    return [layout.shard(x[n], 1, rank).requires_grad_() for n in "qkv"]


def attend(x: dict[str, Any], layout: Any, group: Any, **options: Any) -> list[Any]:
    """o, LSE, dq, dk, dv of this rank's rows, and the index."""
    import torch

    from qla_kernels.sparse_ring import VerticalSlash, sparse_ring_attention

    leaves = shards(x, layout, group.rank)
    options = {"pattern": VerticalSlash(0.5, 0.6), "seqlen": x["seqlen"], **options}
    o, lse, index = sparse_ring_attention(
        *leaves, group=group, layout=layout, return_lse=True, return_index=True, **options
    )
    mine = layout.positions(index.T, group.rank)
    loss = (o * x["do"][:, mine]).sum()
    live = mine < x["seqlen"]
    loss = loss + (lse * x["dlse"][..., mine])[..., live].sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves), index]


def results(rank: int) -> Iterator[tuple[str, Any]]:
    """The largest relative error of every tensor, for each way to compute it."""
    import torch

    from tests.compare import relative_l2

    wanted: dict[int, list[torch.Tensor]] = {}
    for group in _groups(rank):
        world = group.world
        x = problem(world, torch.float64)
        for layout, schedule, per_launch in _ways(group):
            options = {"schedule": schedule, "chunks_per_launch": per_launch}
            more = options["keep_gathered"] = per_launch > 1  # of no effect but on allgather
            with patch("qla_kernels.sparse_ring.api.own_chunk_first", lambda *_, n=more: n):
                *got, index = attend(x, layout, group, **options)
            if world not in wanted:
                wanted[world] = truth(x, index)
            mine = layout.positions(index.T, group.rank)
            rows = [t[..., mine] if t.dim() == 3 else t[:, mine] for t in wanted[world]]
            rows[1], got[1] = (t.exp() for t in (rows[1], got[1]))  # no infinities
            error = max(relative_l2(a, b) for a, b in zip(got, rows, strict=True))
            name = f"{layout} {schedule} {group.inner.size}x{group.outer.size} {per_launch}"
            yield name, error
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in index[:3])).hexdigest()
        yield f"index of a ring {world} {group.inner.size}", digest


def _ways(group: Any) -> Iterator[tuple[Any, str, int]]:
    """(layout, schedule, chunks a launch): what a group is there for."""
    from qla_kernels.sparse_ring import ContiguousLayout, StripedLayout, ZigZagLayout

    world = group.world
    if group.inner.size < world:
        for layout in (StripedLayout(world), StripedLayout(world, 64)):
            yield from ((layout, "double_ring", per_launch) for per_launch in (1, 2))
        return
    yield StripedLayout(world), "double_ring", 1
    yield StripedLayout(world), "ring", 2
    yield StripedLayout(world), "allgather", 2
    layouts = (StripedLayout(world), StripedLayout(world, 64), ZigZagLayout(world))
    for layout in (*layouts, ContiguousLayout(world)):
        yield layout, "ring", 1
        yield layout, "allgather", 1


def _groups(rank: int) -> Iterator[Any]:
    """Two rings of 2 ranks, one of 3, and of 4 ranks a ring and two double rings."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from qla_kernels.sparse_ring import RingGroups

    for size in (2, 3):
        rings = [list(range(n, min(n + size, WORLD))) for n in range(0, WORLD, size)]
        groups = [dist.new_group(ranks) for ranks in rings]
        group = RingGroups.create(groups[rank // size], side_timeout=PATIENCE)
        if group.world == size:
            yield group
    yield RingGroups.create(side_timeout=PATIENCE)
    yield RingGroups.create(inner_size=1, side_timeout=PATIENCE)
    yield RingGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "ring")))


def agreements(rank: int) -> Iterator[tuple[str, Any]]:
    """What each rank raises when one of them was given something else."""
    import torch

    from qla_kernels.sparse_ring import RingGroups, StripedLayout, VerticalSlash

    group, layout = RingGroups.create(side_timeout=PATIENCE), StripedLayout(WORLD)
    x = problem(WORLD, torch.float64)
    wrong: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "dtype": lambda x: {**x, **{n: x[n].float() for n in ("q", "k", "v", "do", "dlse")}},
        "heads": lambda x: {**x, **{n: torch.cat([x[n], x[n]], 2) for n in "kv"}},
        "mixed": lambda x: {**x, "k": x["k"].float()},
        "seqlen": lambda x: {**x, "seqlen": 5},
    }
    for name, change in wrong.items():
        mine = change(x) if rank == 2 else x
        yield name, raised(functools.partial(attend, mine, layout, group))
    for name, value in {"q": "none", "seqlen": "x", "scale": "x", "index": (1, 2)}.items():
        odd = {name: value} if rank == 2 else {}
        yield f"odd {name}", raised(functools.partial(asked, x, layout, group, **odd))
    with torch.set_grad_enabled(rank != 2):
        yield "no_grad", raised(lambda: asked(x, layout, group))
    options = {"pattern": VerticalSlash(0.5, 0.7)} if rank == 1 else {}
    yield "pattern", raised(lambda: attend(x, layout, group, **options))
    mine = StripedLayout(WORLD, 64 if rank == 1 else 128)
    yield "layout", raised(lambda: attend(x, mine, group))
    yield "everybody", raised(lambda: attend({**x, "seqlen": 0}, layout, group))
    yield "positions", raised(lambda: hooked(x, layout, group, rank != 2))
    yield "right positions", raised(lambda: hooked(x, layout, group, True))
    for name, odd, inner in (("rings", 3, 2), ("nodes", 3, 3)):
        mine = odd if rank == 2 else inner
        yield name, raised(functools.partial(RingGroups.create, inner_size=mine))
    for odd in (0, 2.0):
        mine = odd if rank == 2 else 4
        yield f"inner_size {odd}", raised(functools.partial(RingGroups.create, inner_size=mine))
    index = attend(x, layout, group)[-1]
    changed = index._replace(d_bits=index.d_bits | 2**30) if rank == 1 else index
    os.environ["QLA_CHECK"] = "1"
    options = {"pattern": None, "index": changed}
    yield "contents", raised(lambda: attend(x, layout, group, **options))
    del os.environ["QLA_CHECK"]
    yield "afterwards", raised(lambda: attend(x, layout, group))


def hooked(x: dict[str, Any], layout: Any, group: Any, right: bool) -> None:
    """A layer of a transformers model, which counts positions from 0 unless it is given them."""
    from types import SimpleNamespace

    import torch

    from qla_kernels.integrations.transformers_sparse_ring import SparseRingConfig, attention

    q, k, v = (t.transpose(1, 2) for t in shards(x, layout, group.rank))
    T = x["q"].shape[1]
    places = layout.positions(T, group.rank) if right else torch.arange(T // group.world)
    settings = SparseRingConfig(group, layout, seqlen=x["seqlen"])
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    attention(layer, q, k, v, None, position_ids=places[None], sparse_ring=settings)


def asked(x: dict[str, Any], layout: Any, group: Any, **odd: Any) -> None:
    """A call with one argument in the place of what it should be."""
    from qla_kernels.sparse_ring import VerticalSlash, sparse_ring_attention

    leaves = dict(zip("qkv", shards(x, layout, group.rank), strict=True))
    options = {**leaves, "pattern": VerticalSlash(0.5, 0.6), "seqlen": x["seqlen"], **odd}
    sparse_ring_attention(group=group, layout=layout, **options)


def mixes(rank: int) -> Iterator[tuple[str, Any]]:
    """Facts that all ranks know, asked for on some ranks each; by the rule of CPUs, and of GPUs."""
    import torch

    from qla_kernels.sparse_ring import FixedVerticalSlash, RingGroups, StripedLayout
    from qla_kernels.sparse_ring.agreement import KNOWN, LOOK_BACK

    group, layout = RingGroups.create(side_timeout=PATIENCE), StripedLayout(WORLD)
    x = problem(WORLD, torch.float64)
    for scale in (0.3, 0.5):
        asked(x, layout, group, scale=scale)
    mine = 0.5 if rank == 1 else 0.3
    yield "known scale", raised(lambda: asked(x, layout, group, scale=mine))
    yield "known scale afterwards", raised(lambda: asked(x, layout, group, scale=0.3))

    def gpu(fact: object) -> None:
        group.agree("call", {"fact": fact})

    for fact in "AB":
        gpu(fact)
    gpu("B" if rank == 3 else "A")  # nobody can know yet
    yield "mixed and then new", raised(lambda: gpu("C"))
    for fact in "AB":
        gpu(fact)
    gpu("B" if rank == 3 else "A")
    calls = 0
    said = None
    while said is None and calls < 3 * LOOK_BACK:
        said, calls = raised(lambda: gpu("A")), calls + 1
    yield "mixed long ago", said
    yield "mixed calls ago", calls
    yield "mixed afterwards", raised(lambda: [gpu("AB"[n % 2]) for n in range(3 * LOOK_BACK)])
    for n in range(KNOWN + 10):  # lengths without end
        gpu(n)
    yield "facts kept", len(group.agreement._known) - KNOWN
    pattern, made = FixedVerticalSlash(range(300), [0, 1]), []
    described = type(pattern).described.func
    type(pattern).described.func = lambda self: made.append(self) or described(self)
    for _ in range(3):
        asked(x, layout, group, pattern=pattern)
    type(pattern).described.func = described
    yield "patterns described", len(made)


def moves(rank: int) -> Iterator[tuple[str, Any]]:
    """Shards that do not fit together."""
    import torch

    from qla_kernels.sparse_ring import ContiguousLayout, RingGroups, StripedLayout

    group, layout, other = (
        RingGroups.create(side_timeout=PATIENCE),
        StripedLayout(WORLD),
        ContiguousLayout(WORLD),
    )
    x = torch.arange(256.0)[None]
    odd = {
        "shape": (x[:, :128], 1, layout),
        "dtype": (x.double(), 1, layout),
        "dim": (x, 2, layout),
        "type": ([1.0], 1, layout),
        "layout": (x, 1, StripedLayout(2)),
        "stripe": (x, 1, StripedLayout(WORLD, 64)),
    }
    for name, call in odd.items():
        a, dim, by = call if rank == 1 else (x, 1, layout)
        yield f"unshard {name}", raised(lambda a=a, dim=dim, by=by: by.unshard(a, dim, group))
        moved = functools.partial(other.exchange, a, dim, by, group)
        yield f"exchange {name}", raised(moved)
    yield "unshard to nobody", raised(lambda: layout.unshard(x, 1, None))
    yield "moved afterwards", raised(lambda: layout.unshard(x, 1, group))


def repeats(rank: int) -> Iterator[tuple[str, Any]]:
    """Calls that are made twice, and what they leave alone; an index, and shards moved about."""
    import torch

    from qla_kernels.sparse_ring import (
        ContiguousLayout,
        RingGroups,
        StripedLayout,
        VerticalSlash,
        build_index,
        sparse_ring_attention,
    )
    from tests.compare import relative_l2

    group, layout = RingGroups.create(inner_size=2, side_timeout=PATIENCE), StripedLayout(WORLD)
    x = problem(WORLD, torch.float32)
    for schedule in ("allgather", "ring", "double_ring"):
        a, b = (attend(x, layout, group, schedule=schedule) for _ in range(2))
        yield (
            f"twice {schedule}",
            all(torch.equal(s, t) for s, t in zip(a[:-1], b[:-1], strict=True)),
        )
    x = problem(WORLD, torch.bfloat16)
    *got, index = attend(x, layout, group)
    want, mine = truth(x, index), layout.positions(index.T, rank)
    yield "bf16", max(relative_l2(got[n], want[n][:, mine]) for n in (0, 2, 3, 4))
    x = problem(WORLD, torch.float32)
    leaves = shards(x, layout, rank)
    before = [t.detach().clone() for t in leaves]
    pattern, seqlen = VerticalSlash(0.5, 0.6), x["seqlen"]

    attention = sparse_ring_attention(
        *leaves, group=group, layout=layout, pattern=pattern, seqlen=seqlen
    )
    attention.sum().backward()
    yield "untouched", all(torch.equal(s, t) for s, t in zip(before, leaves, strict=True))
    here = build_index(leaves[0], leaves[1], pattern, layout=layout, group=group, seqlen=seqlen)
    alone = build_index(x["q"], x["k"], pattern, seqlen=seqlen)
    yield (
        "index of one rank",
        all(torch.equal(s, t) for s, t in zip(here[:3], alone[:3], strict=True)),
    )
    yield "unshard", torch.equal(layout.unshard(leaves[1], 1, group), x["k"])
    other = ContiguousLayout(WORLD)
    moved = layout.exchange(other.shard(x["k"], 1, rank), 1, other, group)
    yield "exchange", torch.equal(moved, leaves[1])


def absences(rank: int) -> Iterator[tuple[str, Any]]:
    """Rank 2 does not call."""
    import torch
    import torch.distributed as dist

    from qla_kernels.sparse_ring import RingGroups, StripedLayout

    limit = timedelta(seconds=DEADLINE)
    layout, x = StripedLayout(WORLD), problem(WORLD, torch.float64)
    group = RingGroups.create(timeout=limit, side_timeout=limit)
    dist.barrier()  # nobody is late but the one that is absent
    started = time.monotonic()
    if rank == 2:
        time.sleep(DEADLINE + 1)
        yield "absent", None
    else:
        yield "absent", raised(lambda: attend(x, layout, group))
    yield "absent for", time.monotonic() - started


def missing(rank: int) -> Iterator[tuple[str, Any]]:
    """Rank 2 makes no ring."""
    import torch.distributed as dist

    from qla_kernels.sparse_ring import RingGroups, groups

    dist.barrier()
    started = time.monotonic()
    if rank == 2:
        next(groups._created)  # and all make the next one
        time.sleep(DEADLINE + 1)
    else:
        limit = timedelta(seconds=DEADLINE)
        yield "missing", raised(lambda: RingGroups.create(timeout=limit))
        yield "missing for", time.monotonic() - started


def deaths(rank: int) -> Iterator[tuple[str, Any]]:
    """Rank 3 dies in the middle of a ring."""
    import torch

    from qla_kernels.sparse_ring import RingGroups, StripedLayout, cpu

    group = RingGroups.create(timeout=timedelta(seconds=2 * DEADLINE), side_timeout=PATIENCE)
    layout, x = StripedLayout(WORLD), problem(WORLD, torch.float64)
    yield "before a death", raised(lambda: attend(x, layout, group, schedule="ring"))
    if rank == 3:
        cpu.forward = lambda *_: os._exit(0)
    started = time.monotonic()
    yield "death", raised(lambda: attend(x, layout, group, schedule="ring"))
    yield "death for", time.monotonic() - started


if __name__ == "__main__":
    serve(results, agreements, mixes, moves, repeats, absences, missing, deaths)
