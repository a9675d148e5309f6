"""Times sparse and dense ring attention on the GPUs of one machine.

    torchrun --nproc-per-node 2 -m benchmarks.ring
    torchrun --nproc-per-node 4 -m benchmarks.ring --tokens 131072,524288 --dense fa4 --nodes 2
    torchrun --nproc-per-node 2 -m benchmarks.ring --device cpu --tokens 1024 --heads 1/2 \\
        --density 0.5 --samples 1 --queued 1 --dense none       without a GPU: 20 s on two cores

Forward and backward of one layer through the engine, for each schedule and layout, beside the same
mask on one GPU and beside a dense ring. A time is the slowest rank's, a median over samples; in a
sample calls follow each other, as layers do (`--queued 1`: a call begins when the one before it has
ended on every rank). Every way is checked first. Of forward and backward together:

    overhead   what it takes beyond its share of the time on one GPU
    compute    its launches alone, nothing sent, the slowest rank; the rest is transfers
    makespan   compute of the slowest rank by the mean of all: 1 is ideal

`--only` times the ways whose names contain a text, such as `--only striped,`. `--slow GB/s` adds
rings whose ranks are on `--nodes` nodes with links of that rate, which delays emulate.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels import sparse_ring
from qla_kernels.sparse_ring import RingGroups, StripedLayout, VSIndex, ZigZagLayout
from qla_kernels.sparse_ring.heuristics import chunks_per_launch
from qla_kernels.sparse_ring.route import route_of

from ..attention.workloads import VerticalSlash
from ..harness.own_shapes import heads_of
from ..harness.records import write_whole
from . import dense as dense_ring
from .layer import ALONE, Clock, Layer, Way, agree, by_rank, check, slowest
from .links import silent, slow

CHECKED = 512  # tokens a rank
HEADER = f"tokens, ranks  {'':29}forward + backward, and of both:"  # see `__doc__`


@dataclass
class Row:
    what: str
    tokens: int
    world: int
    forward_ms: float
    backward_ms: float
    tflops: float  # of both together, all GPUs, of pairs that the mask has
    overhead: float | None = None  # beyond one GPU's time / world
    compute_ms: float | None = None  # of both together
    makespan: float | None = None  # compute, slowest by mean of the ranks

    @property
    def both_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    def __str__(self) -> str:
        times = f"{self.forward_ms:8.2f} + {self.backward_ms:8.2f} ms {self.tflops:7.1f} TFLOP/s"
        said = f"{self.tokens / 1024:4g}k x{self.world}  {self.what:32} {times}"
        for name, form in (("overhead", "+.1%"), ("compute_ms", ".2f"), ("makespan", ".3f")):
            if (value := getattr(self, name)) is not None:
                said += f"  {name.removesuffix('_ms')} {value:{form}}"
        return said


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("started by itself; need torchrun --nproc-per-node N -m benchmarks.ring")
    rank = int(os.environ["LOCAL_RANK"])
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    group = RingGroups.create()
    nodes = RingGroups.create(inner_size=max(1, group.world // options.nodes))
    tell(measured(options, group, nodes), options.out, rank)
    dist.destroy_process_group()


def tell(rows: Iterable[Row], out: Path | None, rank: int = 0) -> None:
    """Each row as it comes, and a file of all so far, by rank 0."""
    told = []
    if rank == 0:
        print(HEADER, flush=True)
    for row in rows:
        told.append(asdict(row))
        if rank == 0:
            print(row, flush=True)
            if out:
                write_whole(out, json.dumps(told, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    plain, program = argparse.RawDescriptionHelpFormatter, "torchrun -m benchmarks.ring"
    parser = argparse.ArgumentParser(program, None, __doc__, formatter_class=plain)
    add = parser.add_argument
    said = "of all ranks together, numbers with commas between them (default: 131072)"
    add("--tokens", type=lambda x: [int(n) for n in x.split(",")], default=[131072], help=said)
    said = "key / query heads (default: 2/16)"
    add("--heads", type=two_heads, default=(2, 16), metavar="HK/H", help=said)
    add("--head-dim", type=int, default=128, help="(default: 128)")
    said = "share of the causal pairs that the mask keeps (default: 0.05)"
    add("--density", type=float, default=0.05, help=said)
    said = "neighbouring diagonals that are active together (default: 4)"
    add("--run-length", type=int, default=4, help=said)
    add("--samples", type=int, default=7, help="of which a time is the median (default: 7)")
    said = "calls of a sample, one behind the other (default: 8)"
    add("--queued", type=int, default=8, help=said)
    add("--nodes", type=int, default=2, help="of the double ring, and of slow links (default: 2)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="(default: cuda)")
    add("--out", type=Path, help="a JSON file of all rows, written anew after each")
    said = "attention of the dense ring (default: fa4)"
    add("--dense", default="fa4", choices=("fa4", "cudnn", "flash", "none"), help=said)
    add("--slow", type=float, help="GB/s of emulated links between nodes")
    add("--only", default="", help="of the ways, those whose names contain this")
    return parser.parse_args(arguments)


def two_heads(text: str) -> tuple[int, int]:
    """Returns 2/16, or 2x16, as numbers."""
    try:
        return heads_of(text.replace("x", "/"))
    except ValueError:
        needs = "key / query heads, such as 2/16"
        raise argparse.ArgumentTypeError(f"{text!r}; need {needs}") from None


def measured(options: argparse.Namespace, group: RingGroups, nodes: RingGroups) -> Iterator[Row]:
    clock, world = Clock(options.device, options.samples, options.queued), group.world
    small = layer_of(options, CHECKED * world)
    for tokens in options.tokens:
        layer = layer_of(options, tokens)
        one = row_of(ALONE.what, layer, 1, [clock.slowest(x) for x in layer.calls(ALONE)])
        yield one
        for way in ways(group, nodes, tokens, options.slow):
            if options.only in way.what:
                check(small, way, group.rank)
                yield timed(layer, way, clock, one.both_ms)
        gathered = next(ways(group, nodes, tokens, None))
        index = partial(sparse_ring.build_index, pattern=sparse_ring.VerticalSlash())
        yield from indices(layer, ALONE, index, clock)
        shared = partial(index, layout=gathered.layout, group=group)
        yield from indices(layer, gathered, shared, clock)
        if options.dense != "none":
            kernel = dense_ring.kernel_of(options.dense)
            check_dense(kernel, small, group)
            times = [clock.slowest(x) for x in dense(kernel, layer, group)]
            pairs = tokens * (tokens + 1) // 2
            yield row_of(f"dense ring, zigzag, {kernel.name}", layer, world, times, pairs)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def row_of(
    what: str, layer: Layer, world: int, times: list[float], pairs: int = 0, **of: Any
) -> Row:
    """`times` of forward and backward; `pairs` 0 are those of the layer's mask."""
    work = layer.work * (pairs / layer.workload.pairs if pairs else 1)
    rate = work / sum(times) / 1e9
    return Row(what, layer.workload.tokens, world, times[0], times[1], rate, **of)


def layer_of(options: argparse.Namespace, tokens: int) -> Layer:
    mask = (options.density, options.run_length)
    workload = VerticalSlash(tokens, *mask, heads=options.heads, head_dim=options.head_dim)
    return Layer(workload, options.device)


def ways(group: RingGroups, nodes: RingGroups, tokens: int, rate: float | None) -> Iterator[Way]:
    """Every layout and schedule; the double ring is for stripes. Then the slow links."""
    world = group.world
    per_launch = chunks_per_launch(None, tokens // world)
    layouts = {
        "striped": StripedLayout(world), "striped by 64": StripedLayout(world, 64),
        "zigzag": ZigZagLayout(world), "contiguous": sparse_ring.ContiguousLayout(world),
    }  # fmt: skip
    gathered, circulated, double = (
        route_of(groups, name, per_launch)
        for groups, name in ((group, "allgather"), (group, "ring"), (nodes, "double_ring"))
    )
    striped = layouts["striped"]
    for name, layout in layouts.items():
        yield Way(f"{name}, allgather", layout, gathered)
        if layout is striped and world > 1:
            yield Way("striped, allgather, own chunk first", layout, gathered, True)
            yield Way("striped, allgather, kept", layout, gathered, kept=True)
        yield Way(f"{name}, ring", layout, circulated)
        if isinstance(layout, StripedLayout):
            yield Way(f"{name}, double ring", layout, double)
    if per_launch > 1 and world > 2:
        yield Way("striped, ring, a chunk a launch", striped, circulated._replace(per_launch=1))
    if rate is not None:
        for name, route in (("allgather", gathered), ("ring", circulated), ("double ring", double)):
            links = slow(route, nodes.inner.size, rate * 1e9)
            yield Way(f"striped, {name}, emulated {rate:g} GB/s", striped, links)


def timed(layer: Layer, way: Way, clock: Clock, one: float) -> Row:
    """`one`: milliseconds of both directions on one device."""
    world = way.layout.world
    times = [clock.slowest(call) for call in layer.calls(way)]
    taken = [clock.each(call) for call in layer.calls(way._replace(route=silent(way.route)))]
    of_ranks = [sum(x) for x in zip(*map(by_rank, taken), strict=True)]
    compute, mean = sum(map(slowest, taken)), sum(of_ranks) / world
    more = {"compute_ms": compute, "makespan": max(of_ranks) / mean}
    overhead = sum(times) / (one / world) - 1
    return row_of(way.what, layer, world, times, overhead=overhead, **more)


def indices(
    layer: Layer, way: Way, index: Callable[[Tensor, Tensor], VSIndex], clock: Clock
) -> Iterator[Row]:
    """An index by itself, and what it adds to a forward, whose gather it hides."""
    q, k, _, _ = layer.tensors(way.layout.world)
    tokens, world = layer.workload.tokens, way.layout.world
    yield Row(f"index: {way.what}", tokens, world, clock.slowest(lambda: index(q, k)), 0.0, 0.0)
    without, with_it = (clock.slowest(layer.calls(way, index=x)[0]) for x in (None, index))
    yield Row(f"index, added: {way.what}", tokens, world, with_it - without, 0.0, 0.0)


def dense(
    kernel: dense_ring.Kernel, layer: Layer, group: RingGroups
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, do = layer.tensors(group.world)
    forward = partial(dense_ring.forward, kernel, group.whole, q, k, v)
    saved = q, k, v, *forward()
    return forward, partial(dense_ring.backward, kernel, group.whole, do, saved)


def check_dense(kernel: dense_ring.Kernel, layer: Layer, group: RingGroups) -> None:
    """A dense ring gives what one call of its kernel gives."""
    layout, whole = ZigZagLayout(group.world), layer.tensors(seed=0)
    q, k, v, do = (layout.shard(x, 1, group.rank) for x in whole)
    o, lse = dense_ring.forward(kernel, group.whole, q, k, v)
    found = [o, *dense_ring.backward(kernel, group.whole, do, (q, k, v, o, lse))]
    q, k, v, do = whole
    o, lse = kernel.forward(q, k, v, True)
    want = [o, *kernel.backward(do, (q, k, v, o, lse), True)]
    agree("the dense ring", layout, group.rank, found, want)
