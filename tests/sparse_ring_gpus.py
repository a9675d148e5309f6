"""Ranks as processes, one a GPU, over NCCL: one start, every case, results as JSON.

Starting NCCL takes longer than the cases. The last case kills a rank.
"""

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import raised

DEADLINE = 5.0  # seconds, of the groups in which somebody is missing


def main(folder: Path, port: int, rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    said: dict[str, Any] = {}
    for case in (results, repeats, agreements, mixes, compiles, absences):
        for name, found in case(rank, world):
            said[name] = found
        (folder / f"{rank}.json").write_text(json.dumps(said))
    death(rank, world)
    os._exit(0)  # torch would wait for the dead


def problem(world: int, D: int = 128, T: int = 0) -> dict[str, Any]:
    """A whole sequence, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(world)
    T, H, Hk = T or 1024 * world, 4, 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    mean = normal(H, D)
    x = {
        "q": normal(1, T, H, D) + mean,
        "k": normal(1, T, Hk, D) + mean[::2],
        "v": normal(1, T, Hk, D),
        "do": normal(1, T, H, D),
    }
    return {**{n: y.bfloat16() for n, y in x.items()}, "seqlen": T - 70}


def truth(x: dict[str, Any], index: Any) -> list[Tensor]:
    """o, LSE, dq, dk, dv of the definition, in fp64."""
    from reference import sparse_ring as definition

    token = torch.arange(index.T, device="cuda")
    visible = index.to_mask() & (token < x["seqlen"])[:, None]
    leaves = [x[n].double().requires_grad_() for n in "qkv"]
    o, lse = definition.attention(*leaves, visible)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, x["do"].double())]


def attend(x: dict[str, Any], layout: Any, group: Any, **options: Any) -> list[Any]:
    """o, LSE, dq, dk, dv of this rank's rows, and the index."""
    *leaves, do = (layout.shard(x[n], 1, group.rank) for n in ("q", "k", "v", "do"))
    return call(leaves, do, x["seqlen"], layout=layout, group=group, **options)


def call(leaves: list[Tensor], do: Tensor, seqlen: int, **options: Any) -> list[Any]:
    from qla_kernels.sparse_ring import VerticalSlash, sparse_ring_attention

    leaves = [x.detach().requires_grad_() for x in leaves]
    options = {"pattern": VerticalSlash(0.5, 0.6), **options}
    o, lse, index = sparse_ring_attention(
        *leaves, seqlen=seqlen, return_lse=True, return_index=True, **options
    )
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do), index]


def errors(got: list[Tensor], want: list[Tensor], mine: Tensor | slice) -> list[float]:
    """Relative L2 errors of o, dq, dk, dv, and the largest error of the LSE."""
    from tests.compare import relative_l2

    found = [relative_l2(got[n], want[n][:, mine]) for n in (0, 2, 3, 4)]
    lse, right = got[1].double(), want[1][..., mine]
    live = right > -torch.inf
    assert torch.equal(live, lse > -torch.inf)
    return [*found, float((lse - right)[live].abs().max())]


def results(
    rank: int, world: int, adapted: Callable[[Any], Any] = lambda groups: groups
) -> Iterator[tuple[str, Any]]:
    """The errors of each way to compute it, beside those of one GPU that has everything."""
    from qla_kernels.sparse_ring import RingGroups, sparse_attention

    for inner in [n for n in range(1, world + 1) if world % n == 0]:
        group = adapted(RingGroups.create(inner_size=inner))
        x, want = problem(world), None
        for layout, schedule, per_launch in ways(world, inner):
            options = {"schedule": schedule, "chunks_per_launch": per_launch}
            more = options["keep_gathered"] = per_launch > 1  # of no effect but on allgather
            with patch("qla_kernels.sparse_ring.api.own_chunk_first", lambda *_, n=more: n):
                *got, index = attend(x, layout, group, **options)
            want = truth(x, index) if want is None else want
            mine = layout.positions(index.T, rank).cuda()
            yield f"{layout} {schedule} {inner} {per_launch}", errors(got, want, mine)
        contents = b"".join(t.cpu().numpy().tobytes() for t in index[:3])
        yield f"index {inner}", hashlib.sha256(contents).hexdigest()
    leaves = [x[n].requires_grad_() for n in "qkv"]
    o, lse = sparse_attention(*leaves, index=index, seqlen=x["seqlen"], return_lse=True)
    got = [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, x["do"])]
    yield "one GPU", errors(got, want, slice(None))


def ways(world: int, inner: int) -> Iterator[tuple[Any, str, int]]:
    """(layout, schedule, chunks a launch): what a group of so many ranks a node is there for."""
    from qla_kernels.sparse_ring import ContiguousLayout, StripedLayout, ZigZagLayout

    stripes = (StripedLayout(world), StripedLayout(world, 64))
    if inner < world:
        for layout in stripes:
            yield from ((layout, "double_ring", per_launch) for per_launch in (1, 2))
        return
    yield stripes[0], "ring", 2
    yield stripes[0], "allgather", 2
    for layout in (*stripes, ZigZagLayout(world), ContiguousLayout(world)):
        yield layout, "ring", 1
        yield layout, "allgather", 1


def repeats(rank: int, world: int) -> Iterator[tuple[str, Any]]:
    """Calls that are made again, beside work on other streams, and what they leave alone."""
    from qla_kernels.sparse_ring import RingGroups, StripedLayout, VerticalSlash, build_index

    group, layout = RingGroups.create(), StripedLayout(world)
    x = problem(world, 64, 8192 * world)
    before = {n: y.clone() for n, y in x.items() if n != "seqlen"}
    for schedule in ("allgather", "ring"):
        *want, _ = attend(x, layout, group, schedule=schedule)
        same = True
        for _ in range(10):
            *got, _ = attend(x, layout, group, schedule=schedule)
            same &= all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        yield f"again {schedule}", same
    yield "untouched", all(torch.equal(y, x[n]) for n, y in before.items())
    *leaves, do = (layout.shard(x[n], 1, rank) for n in ("q", "k", "v", "do"))
    again = functools.partial(call, leaves, do, x["seqlen"], layout=layout, group=group)
    again()
    torch.cuda.set_sync_debug_mode("error")
    yield "sync", raised(again)
    torch.cuda.set_sync_debug_mode("default")
    pattern, seqlen = VerticalSlash(0.5, 0.6), x["seqlen"]
    q, k = (layout.shard(x[n], 1, rank) for n in "qk")
    here = build_index(q, k, pattern, layout=layout, group=group, seqlen=seqlen)
    alone = build_index(x["q"], x["k"], pattern, seqlen=seqlen)
    differing = (here.diagonals() != alone.diagonals()).sum(-1).max()
    yield "diagonals that one GPU chooses otherwise", int(differing)
    yield "unshard", torch.equal(layout.unshard(q, 1, group), x["q"])


def agreements(rank: int, world: int) -> Iterator[tuple[str, Any]]:
    """What each rank raises when one of them was given something else."""
    from qla_kernels.sparse_ring import RingGroups, StripedLayout

    group, layout, x = RingGroups.create(), StripedLayout(world), problem(world)
    halves = {**x, **{n: x[n].half() for n in ("q", "k", "v", "do")}}
    wrong: dict[str, Callable[[], object]] = {
        "dtype": lambda: attend(halves if rank else x, layout, group),
        "seqlen": lambda: attend({**x, "seqlen": 5} if rank else x, layout, group),
        "layout": lambda: attend(x, StripedLayout(world, 64 if rank else 128), group),
        "afterwards": lambda: attend(x, layout, group),
    }
    for name, call in wrong.items():
        yield name, raised(call)


def mixes(rank: int, world: int) -> Iterator[tuple[str, Any]]:
    """Two calls that all ranks know, one of them on the last rank: an error, if a later one."""
    from qla_kernels.sparse_ring import RingGroups, StripedLayout, VerticalSlash
    from qla_kernels.sparse_ring import sparse_ring_attention as attention
    from qla_kernels.sparse_ring.agreement import LOOK_BACK

    group, layout, x = RingGroups.create(), StripedLayout(world), problem(world)
    leaves = [layout.shard(x[n], 1, rank) for n in "qkv"]

    def of(scale: float) -> Tensor:
        options = {"layout": layout, "pattern": VerticalSlash(0.5, 0.6), "scale": scale}
        return attention(*leaves, group=group, **options)

    for scale in (0.1, 0.2):
        of(scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # nor does a look back wait for the GPU
    yield "unmixed", raised(lambda: [of(0.1) for _ in range(3 * LOOK_BACK)])
    of(0.2 if rank + 1 == world else 0.1)
    yield "mixed", raised(lambda: [of(0.1) for _ in range(2 * LOOK_BACK)])
    torch.cuda.set_sync_debug_mode("default")
    yield "mixed afterwards", raised(lambda: of(0.1))
    odd = leaves[0][:, :128] if rank + 1 == world else leaves[0]
    yield "unshard of another shape", raised(lambda: layout.unshard(odd, 1, group))


def compiles(rank: int, world: int) -> Iterator[tuple[str, Any]]:
    """Within torch.compile, whose graph ends there."""
    from qla_kernels.sparse_ring import Dense, RingGroups, StripedLayout, VerticalSlash
    from qla_kernels.sparse_ring import sparse_ring_attention as attention

    group, layout, x = RingGroups.create(), StripedLayout(world), problem(world)
    leaves = [layout.shard(x[n], 1, rank).requires_grad_() for n in "qkv"]
    for pattern in (VerticalSlash(0.5, 0.6), Dense()):
        for schedule in ("allgather", "ring"):
            options = {"layout": layout, "pattern": pattern, "schedule": schedule}

            def layer(q: Tensor, k: Tensor, v: Tensor, options: Any = options) -> Tensor:
                return attention(2 * q, k * 1, v * 1, group=group, **options) * 3

            want = layer(*leaves)
            got = torch.compile(layer, backend="aot_eager")(*leaves)
            both = (torch.autograd.grad(o.sum(), leaves) for o in (got, want))
            same = torch.equal(got, want) and all(map(torch.equal, *both))
            yield f"compiled {type(pattern).__name__} {schedule}", same


def absences(rank: int, world: int) -> Iterator[tuple[str, Any]]:
    """The last rank does not call."""
    from qla_kernels.sparse_ring import RingGroups, StripedLayout

    limit = timedelta(seconds=DEADLINE)
    group = RingGroups.create(side_timeout=limit)
    started = time.monotonic()
    if rank + 1 == world:
        time.sleep(DEADLINE + 1)
        yield "absent", None
    else:
        yield "absent", raised(lambda: attend(problem(world), StripedLayout(world), group))
    yield "absent for", time.monotonic() - started


def death(rank: int, world: int) -> None:
    """The last rank dies in the middle of a ring; torch ends the others after the timeout."""
    from qla_kernels.sparse_ring import RingGroups, StripedLayout, launch

    group = RingGroups.create(timeout=timedelta(seconds=DEADLINE))
    layout, x = StripedLayout(world), problem(world)
    again = functools.partial(attend, x, layout, group, schedule="ring")
    again()
    if rank + 1 == world:
        launch.forward = lambda *_: os._exit(0)
    again()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
