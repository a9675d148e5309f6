"""Times sparse and dense ring attention on the GPUs of one machine.

    torchrun --nproc-per-node 2 -m benchmarks.ring
    torchrun --nproc-per-node 4 -m benchmarks.ring --tokens 131072,524288 --dense fa4 --nodes 2
    torchrun --nproc-per-node 2 -m benchmarks.ring --device cpu --tokens 1024 --heads 1/2 \\
        --density 0.5 --samples 1 --queued 1 --dense none       without a GPU: 20 s on two cores

Forward and backward of one layer through the engine, for each schedule and layout, beside the same
mask on one GPU and beside a dense ring. A time is the slowest rank's, a median over samples; in a
sample calls follow each other, as layers do (`--queued 1`: a call begins when the one before it has
ended on every rank, and its start shows). Every way is checked first. Of each:

    overhead   what it takes beyond its share of the time on one GPU
    compute    its launches alone, nothing sent, the slowest rank
    transfers  its transfers alone
    hidden     of its transfers, what it does not take beyond compute
    waits      how long launches waited for transfers, between two events of their stream: the rank
               that waited least, and the mean. The least is what transfers cost by coming late; the
               rest is waiting for slower ranks
    slowed     what it takes beyond compute and the least wait: launches that share SMs, memory and
               power with transfers; on a GPU alone
    makespan   compute of the slowest rank by the mean of all: 1 is ideal

`--only` times the ways whose names contain a text, such as `--only striped,`.

`--slow GB/s` adds rings whose ranks are on `--nodes` nodes with links of that rate between them;
the links are emulated, by delays.
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

from qla_kernels.sparse_ring import (
    ContiguousLayout,
    RingGroups,
    StripedLayout,
    VerticalSlash,
    VSIndex,
    ZigZagLayout,
    build_index,
)
from qla_kernels.sparse_ring.heuristics import chunks_per_launch
from qla_kernels.sparse_ring.route import route_of

from ..attention.workloads import VerticalSlash as Workload
from ..harness.own_shapes import heads_of
from ..harness.records import write_whole
from . import dense as dense_ring
from .layer import ALONE, Clock, Layer, Way, agree, by_rank, check, slowest
from .links import Waits, silent, slow, transfers, watched

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
    transfers_ms: float | None = None  # alone
    makespan: float | None = None  # compute, slowest by mean of the ranks
    least_wait_ms: float | None = None  # for transfers, of both together; the rank that waits least
    mean_wait_ms: float | None = None
    slowed_ms: float | None = None  # what neither compute nor waits explain

    @property
    def both_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def hidden(self) -> float | None:
        """Share of the transfers."""
        if self.compute_ms is None or not self.transfers_ms:
            return None
        shown = self.both_ms - self.compute_ms
        return 1 - min(1.0, max(0.0, shown) / self.transfers_ms)

    def __str__(self) -> str:
        times = f"{self.forward_ms:8.2f} + {self.backward_ms:8.2f} ms {self.tflops:7.1f} TFLOP/s"
        said = f"{self.tokens / 1024:4g}k x{self.world}  {self.what:32} {times}"
        for name, value, form in (
            ("overhead", self.overhead, "+.1%"),
            ("compute", self.compute_ms, ".2f"),
            ("transfers", self.transfers_ms, ".2f"),
            ("hidden", self.hidden, ".0%"),
            ("waits", self.least_wait_ms, ".2f"),
            ("mean", self.mean_wait_ms, ".2f"),
            ("slowed", self.slowed_ms, ".2f"),
            ("makespan", self.makespan, ".3f"),
        ):
            said += "" if value is None else f"  {name} {value:{form}}"
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
    nodes = RingGroups.create(inner_size=node_size(group.world, options.nodes))
    tell(measured(options, group, nodes), options.out, rank)
    dist.destroy_process_group()


def tell(rows: Iterable[Row], out: Path | None, rank: int = 0) -> None:
    """Each row as it comes, and a file of all so far, by rank 0."""
    told = []
    if rank == 0:
        print(HEADER, flush=True)
    for row in rows:
        told.append({**asdict(row), "hidden": row.hidden})
        if rank == 0:
            print(row, flush=True)
            if out:
                write_whole(out, json.dumps(told, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.ring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mask_options(parser)
    add = parser.add_argument
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


def mask_options(parser: argparse.ArgumentParser) -> None:
    """What is timed, how often and where; `layer_of` reads it."""
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


def node_size(world: int, nodes: int) -> int:
    return max(1, world // nodes)


def measured(options: argparse.Namespace, group: RingGroups, nodes: RingGroups) -> Iterator[Row]:
    clock = Clock(options.device, options.samples, options.queued)
    small = layer_of(options, CHECKED * group.world)
    for tokens in options.tokens:
        layer = layer_of(options, tokens)
        yield (one := alone(layer, clock))
        for way in ways(group, nodes, tokens, options.slow):
            if options.only not in way.what:
                continue
            check(small, way, group.rank)
            yield timed(layer, way, clock, one.both_ms)
        gathered = next(ways(group, nodes, tokens, None))
        index = partial(build_index, pattern=VerticalSlash())
        yield from indices(layer, ALONE, index, clock)
        shared = partial(index, layout=gathered.layout, group=group)
        yield from indices(layer, gathered, shared, clock)
        if options.dense != "none":
            kernel = dense_ring.kernel_of(options.dense)
            check_dense(kernel, small, group)
            forward, backward = map(clock.slowest, dense(kernel, layer, group))
            all_pairs = 7.0 * tokens * (tokens + 1) * options.head_dim * options.heads[1]
            rate = all_pairs / (forward + backward) / 1e9
            what = f"dense ring, zigzag, {kernel.name}"
            yield Row(what, tokens, group.world, forward, backward, rate)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def alone(layer: Layer, clock: Clock) -> Row:
    forward, backward = map(clock.slowest, layer.calls(ALONE))
    rate = layer.work / (forward + backward) / 1e9
    return Row(ALONE.what, layer.workload.tokens, 1, forward, backward, rate)


def layer_of(options: argparse.Namespace, tokens: int) -> Layer:
    mask = (options.density, options.run_length)
    workload = Workload(tokens, *mask, heads=options.heads, head_dim=options.head_dim)
    return Layer(workload, options.device)


def ways(group: RingGroups, nodes: RingGroups, tokens: int, rate: float | None) -> Iterator[Way]:
    """Every layout and schedule; the double ring is for stripes. Then the slow links."""
    world = group.world
    per_launch = chunks_per_launch(None, tokens // world)
    layouts = {
        "striped": StripedLayout(world),
        "striped by 64": StripedLayout(world, 64),
        "zigzag": ZigZagLayout(world),
        "contiguous": ContiguousLayout(world),
    }
    gathered, circulated, double = (
        route_of(groups, name, per_launch)
        for groups, name in ((group, "allgather"), (group, "ring"), (nodes, "double_ring"))
    )
    for name, layout in layouts.items():
        yield Way(f"{name}, allgather", layout, gathered)
        if name == "striped" and world > 1:
            yield Way("striped, allgather, own chunk first", layout, gathered, True)
            yield Way("striped, allgather, kept", layout, gathered, kept=True)
        yield Way(f"{name}, ring", layout, circulated)
        if isinstance(layout, StripedLayout):
            yield Way(f"{name}, double ring", layout, double)
    if per_launch > 1 and world > 2:
        route = circulated._replace(per_launch=1)
        yield Way("striped, ring, a chunk a launch", layouts["striped"], route)
    if rate is not None:
        for name, route in (("allgather", gathered), ("ring", circulated), ("double ring", double)):
            links = slow(route, nodes.inner.size, rate * 1e9)
            what = f"{name}, emulated {rate:g} GB/s"
            yield Way(f"striped, {what}", layouts["striped"], links)


def timed(layer: Layer, way: Way, clock: Clock, one: float) -> Row:
    """`one`: milliseconds of both directions on one device."""
    world = way.layout.world
    forward, backward = map(clock.slowest, layer.calls(way))
    calls = layer.calls(way._replace(route=silent(way.route)))
    taken = [clock.each(call) for call in calls]
    compute = sum(slowest(x) for x in taken)  # by the same statistics as forward and backward
    of_ranks = [sum(x) for x in zip(*map(by_rank, taken), strict=True)]
    waits = Waits()
    calls = layer.calls(way._replace(route=watched(way.route, waits)))
    waited = [by_rank(clock.each(call, waits.taken)) for call in calls]
    of_both = [sum(of_rank) for of_rank in zip(*waited, strict=True)]
    _, k, v, _ = layer.tensors(world)
    sent = clock.slowest(lambda: transfers(way.route, k, v))
    sent += clock.slowest(lambda: transfers(way.route, k, v, gradients=False))
    both, least = forward + backward, min(of_both)
    return Row(
        way.what,
        layer.workload.tokens,
        world,
        forward,
        backward,
        layer.work / both / 1e9,
        overhead=both / (one / world) - 1,
        compute_ms=compute,
        transfers_ms=sent,
        makespan=max(of_ranks) / (sum(of_ranks) / world),
        least_wait_ms=least,
        mean_wait_ms=sum(of_both) / world,
        slowed_ms=both - compute - least if layer.device == "cuda" else None,
    )


def indices(
    layer: Layer, way: Way, index: Callable[[Tensor, Tensor], VSIndex], clock: Clock
) -> Iterator[Row]:
    """An index by itself, and what it adds to a forward, whose gather it hides."""
    q, k, _, _ = layer.tensors(way.layout.world)
    tokens, world = layer.workload.tokens, way.layout.world
    alone = clock.slowest(lambda: index(q, k))
    yield Row(f"index: {way.what}", tokens, world, alone, 0.0, 0.0)
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
