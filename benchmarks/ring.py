"""Times sparse and dense ring attention on the GPUs of one machine.

    torchrun --nproc-per-node 2 -m benchmarks.ring
    torchrun --nproc-per-node 4 -m benchmarks.ring --tokens 131072,524288 --dense fa4

Forward and backward of one layer through the engine, for each schedule and layout, beside the same
mask on one GPU and beside a dense ring. A time is the slowest rank's, a median over calls. Overhead
is what a ring takes beyond its share of the time on one GPU. Everything is checked before.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.sparse_ring import (
    ContiguousLayout,
    FixedVerticalSlash,
    RingGroups,
    StripedLayout,
    VerticalSlash,
    VSIndex,
    ZigZagLayout,
    build_index,
    ring,
)
from qla_kernels.sparse_ring.autograd import Around
from qla_kernels.sparse_ring.heuristics import chunks_per_launch
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.route import LOCAL, Route, route_of

from . import dense_ring
from .workloads_attention import VerticalSlash as Workload

DENSE_LIMIT = 5e-3  # relative L2 error of a dense ring beside one call of its kernel


@dataclass
class Row:
    what: str
    tokens: int
    world: int
    forward_ms: float
    backward_ms: float
    tflops: float  # of both together, all GPUs, of pairs that the mask has
    overhead: float | None = None  # beyond one GPU's time / world

    def __str__(self) -> str:
        more = "" if self.overhead is None else f"  overhead {self.overhead:+.1%}"
        times = f"{self.forward_ms:8.2f} + {self.backward_ms:8.2f} ms {self.tflops:7.0f} TFLOP/s"
        return f"{self.tokens // 1024:4}k x{self.world}  {self.what:34} {times}{more}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    group = RingGroups.create()
    rows: list[Row] = []
    for tokens in options.tokens:
        for row in measured(options, group, tokens):
            rows.append(row)
            if rank == 0:
                print(row, flush=True)
        torch.cuda.empty_cache()
    if rank == 0 and options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.ring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=lambda x: [int(n) for n in x.split(",")], default=[131072])
    add("--heads", type=lambda x: tuple(map(int, x.split("x"))), default=(2, 16), metavar="HKxH")
    add("--density", type=float, default=0.05)
    add("--run-length", type=int, default=4, help="neighbouring diagonals that are active together")
    add("--dense", default="fa4", choices=("fa4", "cudnn", "flash", "none"))
    add("--calls", type=int, default=10)
    add("--out", type=Path, help="also write the rows as JSON")
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace, group: RingGroups, tokens: int) -> Iterator[Row]:
    workload = Workload(tokens, options.density, options.run_length, heads=options.heads)
    index = lines(workload)
    pairs = 14.0 * workload.pairs * workload.head_dim * options.heads[1]  # 2 + 5 products

    def row(what: str, world: int, calls: Sequence[Callable[[], Any]], work: float) -> Row:
        forward, backward = (timed(call, options.calls) for call in calls)
        return Row(what, tokens, world, forward, backward, work / (forward + backward) / 1e9)

    one = row("sparse, one GPU", 1, sparse(workload, index, StripedLayout(1), LOCAL), pairs)
    yield one
    for what, layout, route in ways(group, tokens):
        done = row(what, group.world, sparse(workload, index, layout, route), pairs)
        share = (one.forward_ms + one.backward_ms) / group.world
        done.overhead = (done.forward_ms + done.backward_ms) / share - 1
        yield done
    q, k, _, _ = shards(workload, 1)
    index_ms = timed(lambda: build_index(q, k, VerticalSlash()), options.calls)
    yield Row("index, one GPU", tokens, 1, index_ms, 0.0, 0.0)
    q, k, _, _ = shards(workload, group.world)
    layout, pattern = StripedLayout(group.world), VerticalSlash()
    index_ms = timed(lambda: build_index(q, k, pattern, layout=layout, group=group), options.calls)
    yield Row("index, striped", tokens, group.world, index_ms, 0.0, 0.0)
    if options.dense != "none":
        kernel = dense_ring.kernel_of(options.dense)
        check_dense(kernel, group, options.heads, workload.head_dim)
        all_pairs = 7.0 * tokens * (tokens + 1) * workload.head_dim * options.heads[1]
        calls = dense(kernel, workload, group)
        yield row(f"dense ring, zigzag, {kernel.name}", group.world, calls, all_pairs)


def lines(workload: Workload) -> VSIndex:
    diagonals, columns = workload.mask()
    q = torch.empty(1, workload.tokens, workload.heads[1], 64, device="cuda", dtype=torch.bfloat16)
    return build_index(q, q, FixedVerticalSlash(columns, diagonals))


def ways(group: RingGroups, tokens: int) -> Iterator[tuple[str, Layout, Route]]:
    world = group.world
    per_launch = chunks_per_launch(None, tokens // world)
    striped = StripedLayout(world)
    nodes = RingGroups.create(inner_size=max(1, world // 2))
    yield "striped, allgather", striped, route_of(group, "allgather", per_launch)
    yield "striped, ring", striped, route_of(group, "ring", per_launch)
    yield "striped, ring, a chunk a launch", striped, route_of(group, "ring", 1)
    yield "striped, double ring", striped, route_of(nodes, "double_ring", per_launch)
    yield "striped by 64, ring", StripedLayout(world, 64), route_of(group, "ring", per_launch)
    yield "zigzag, ring", ZigZagLayout(world), route_of(group, "ring", per_launch)
    yield "contiguous, ring", ContiguousLayout(world), route_of(group, "ring", per_launch)


def shards(workload: Workload, world: int) -> list[Tensor]:
    """q, k, v, do of a rank; what is in them does not matter for how long it takes."""
    kv_heads, heads = workload.heads
    rows = workload.tokens // world

    def normal(num: int) -> Tensor:
        return torch.randn(1, rows, num, workload.head_dim, device="cuda", dtype=torch.bfloat16)

    return [normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)]


def sparse(
    workload: Workload, index: VSIndex, layout: Layout, route: Route
) -> list[Callable[[], Any]]:
    q, k, v, do = shards(workload, layout.world)
    scale = workload.head_dim**-0.5

    def shard() -> Any:  # made by every call, as its tables are
        return Around(layout, route).shard(q, list(index[:3]), workload.tokens, scale)

    def forward() -> Any:
        return ring.forward(shard(), route, q, k, v)

    done = forward()
    return [forward, lambda: ring.backward(shard(), route, q, k, v, done, do, None)]


def dense(
    kernel: dense_ring.Kernel, workload: Workload, group: RingGroups
) -> list[Callable[[], Any]]:
    q, k, v, do = shards(workload, group.world)
    o, lse = dense_ring.forward(kernel, group.whole, q, k, v)
    return [
        lambda: dense_ring.forward(kernel, group.whole, q, k, v),
        lambda: dense_ring.backward(kernel, group.whole, do, q, k, v, o, lse),
    ]


def check_dense(
    kernel: dense_ring.Kernel, group: RingGroups, heads: tuple[int, int], head_dim: int
) -> None:
    """A dense ring gives what one call of its kernel gives."""
    layout, generator = ZigZagLayout(group.world), torch.Generator("cuda").manual_seed(0)
    tokens = layout.pad_len(4096)

    def normal(num: int) -> Tensor:
        shape = (1, tokens, num, head_dim)
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    whole = [normal(n) for n in (heads[1], heads[0], heads[0], heads[1])]
    q, k, v, do = (layout.shard(x, 1, group.rank) for x in whole)
    o, lse = dense_ring.forward(kernel, group.whole, q, k, v)
    found = [o, *dense_ring.backward(kernel, group.whole, do, q, k, v, o, lse)]
    q, k, v, do = whole
    o, lse = kernel.forward(q, k, v, True)
    want = [o, *kernel.backward(do, q, k, v, o, lse, True)]
    for name, got, right in zip(("o", "dq", "dk", "dv"), found, want, strict=True):
        right = layout.shard(right, 1, group.rank).double()
        error = float((got.double() - right).norm() / right.norm())
        if not error < DENSE_LIMIT:
            raise RuntimeError(f"the dense ring's {name} is off by {error:.1e}")


def timed(call: Callable[[], Any], calls: int) -> float:
    """Milliseconds of the slowest rank."""
    samples = []
    for n in range(calls + 2):
        start, end = _event(), _event()
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if n >= 2:
            samples.append(float(slowest))
    return statistics.median(samples)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
