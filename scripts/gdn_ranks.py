"""Time the gated delta net over several GPUs in both layouts, beside FLA's context parallelism.

    torchrun --nproc-per-node 2 scripts/gdn_ranks.py                      131072 tokens, 16/32 heads
    torchrun --nproc-per-node 4 scripts/gdn_ranks.py --tokens 524288 --heads 4/8 --without-fla
    torchrun --nproc-per-node 2 scripts/gdn_ranks.py --tokens 256 --heads 1/2 --cpu     does it run?

One sequence, gates as FlashQLA publishes its times with. Eager calls in turn; of each repetition
the time of the slowest rank counts, by CUDA events, and medians are printed, in ms, with the time
that Python alone takes: where it is as long, the host is what is timed. Before that o and all
gradients are compared with ours in the contiguous layout. FLA's kernels take minutes to compile and
to tune.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gdn.inputs import gdn_inputs
from benchmarks.gdn.workloads import Gdn
from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from qla_kernels.gdn.sharded.layouts import LAYOUTS, STRETCHES, held_by

GIVEN = ("q", "k", "v", "g", "beta")
WARM, REPEATED, TOLERANCE = 3, 20, 1e-2
new_event: Any = torch.cuda.Event
Function = Callable[..., Any]


def parse() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131072, help="of all ranks together")
    parser.add_argument("--heads", default="16/32", help="key / value heads")
    parser.add_argument("--without-fla", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="over gloo, on CPU tensors, in fp32")
    return parser.parse_args()


def part(x: Tensor, layout: str) -> Tensor:
    """Returns this rank's stretches of a batch, one after the other."""
    rank, world, each = dist.get_rank(), dist.get_world_size(), STRETCHES[layout]
    stretches = x.chunk(each * world, 1)
    return torch.cat([stretches[n] for n in held_by(rank, world, each)], 1).contiguous()


def forward(function: Function, x: dict[str, Tensor], context: Any) -> Any:
    with torch.no_grad():
        return function(*(x[name] for name in GIVEN), cp_context=context)[0]


def both(function: Function, x: dict[str, Tensor], context: Any) -> list[Tensor]:
    """Returns o and the gradients of a forward and backward."""
    inputs = [x[name].detach().requires_grad_() for name in GIVEN]
    o = function(*inputs, cp_context=context)[0]
    return [o.detach(), *torch.autograd.grad(o, inputs, x["do"])]


def slowest(values: Sequence[float], like: Tensor) -> list[float]:
    """Returns the largest of all ranks."""
    x = torch.tensor(values, dtype=torch.float64, device=like.device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    found: list[float] = x.tolist()
    return found


def once(run: Function, like: Tensor) -> tuple[float, float]:
    """Returns the ms of a call, of the GPU and of Python alone. All ranks begin together."""
    if not like.is_cuda:
        dist.barrier()
        begin = time.perf_counter()
        run()
        return (1e3 * (time.perf_counter() - begin),) * 2
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    first, last = (new_event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    first.record()
    kept = run()  # freed only after the end was recorded
    last.record()
    python = 1e3 * (time.perf_counter() - begin)
    last.synchronize()
    del kept
    return first.elapsed_time(last), python


def times(ways: dict[str, Function], like: Tensor) -> dict[str, list[float]]:
    """Returns of each way the medians of the GPU's and of Python's time."""
    for run in ways.values():
        for _ in range(WARM):
            run()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(REPEATED):
        for name, run in ways.items():
            found[name].append(once(run, like))
    columns = {name: list(zip(*each, strict=True)) for name, each in found.items()}
    return {name: [median(slowest(x, like)) for x in both] for name, both in columns.items()}


def differ(got: Sequence[Tensor], want: Sequence[Tensor], layout: str) -> float:
    """Returns the largest relative L2 error of o and the gradients, over all ranks' tokens."""
    errors = []
    for a, b in zip(got, want, strict=True):
        x, y = a.double(), part(b, layout).double()
        sums = torch.stack([(x - y).square().sum(), y.square().sum()])
        dist.all_reduce(sums)
        errors.append(float((sums[0] / sums[1]).sqrt()))
    return max(errors)


def gathered(x: Tensor) -> Tensor:
    """Returns the batch whose stretches the ranks hold in the contiguous layout."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def functions(given: argparse.Namespace) -> dict[str, tuple[Function, Function]]:
    """Returns of each library the rule, and what makes a context of bounds and a layout."""
    found: dict[str, tuple[Function, Function]] = {
        "ours": (chunk_gated_delta_rule, lambda x, y: build_cp_context(x, layout=y))
    }
    if not given.without_fla and not given.cpu:
        from fla.ops.cp import build_cp_context as of_fla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule_of_fla

        found["FLA"] = rule_of_fla, lambda x, y: of_fla(x, group=dist.group.WORLD, layout=y)
    return found


def main() -> None:
    given = parse()
    if "RANK" not in os.environ:
        raise SystemExit("started by itself; need torchrun --nproc-per-node 2 scripts/gdn_ranks.py")
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels: FlashQLA takes no contexts
    dist.init_process_group("gloo" if given.cpu else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if given.cpu else torch.device("cuda", rank)
    if not given.cpu:
        torch.cuda.set_device(device)
    H, HV = map(int, given.heads.split("/"))
    workload = Gdn((H, HV), (given.tokens,), "bwd", "published")
    made = gdn_inputs(workload, device, torch.float32 if given.cpu else torch.bfloat16)
    batch = {name: getattr(made, name) for name in (*GIVEN, "do")}
    for x in batch.values():
        dist.broadcast(x, 0)
    bounds, ways, want = torch.tensor([0, given.tokens], device=device), {}, list[Tensor]()
    for library, (function, make) in functions(given).items():
        for layout in LAYOUTS:
            parts = {name: part(x, layout) for name, x in batch.items()}
            call = function, parts, make(bounds, layout)
            got = both(*call)
            want = want or [gathered(x) for x in got]
            error = differ(got, want, layout)
            if not rank:
                print(f"{library}, {layout}: off by {error:.1e}", flush=True)
            assert error < TOLERANCE, "a wrong result is not timed"
            ways[f"{library}, {layout}"] = call
    of = {
        title: times({name: partial(run, *call) for name, call in ways.items()}, bounds)
        for title, run in (("forward", forward), ("forward and backward", both))
    }
    if not rank:
        print(f"{given.tokens} tokens over {world} ranks, {given.heads} heads, ms (Python alone)")
        for name in ways:
            print(
                f"{name:18}", *(f"{t}: {x[name][0]:.3f} ({x[name][1]:.2f})" for t, x in of.items())
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
