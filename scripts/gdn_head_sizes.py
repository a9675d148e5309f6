"""Time the gated delta net's plans at K = 256, and backwards of V = 192, for docs/lessons.md.

    python scripts/gdn_head_sizes.py                     all rows below
    python scripts/gdn_head_sizes.py fwd:6/6:256/512:32768x1 bwd:30/30:96/192:8192x1

Per row CUDA graphs run in turn, so that a drift of the clock meets all alike. Their median times
are printed, in us, then the times of some of their kernels.

    fwd   whole sequences; then segments of so many chunks, with the default bound and with none
    bwd   by wide_grads; and by chunk_grads, on value heads in parts of 64 columns
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gdn.problem import gdn_inputs
from benchmarks.gdn.workloads import Gdn, parse_lengths
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.launch import backward as launch_backward
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch import states
from qla_kernels.gdn.launch.tensors import plan_shape
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import ForwardChoice

ROWS = (
    *("fwd:6/6:256/512:8192x1", "fwd:6/6:256/512:16384x1", "fwd:6/6:256/512:32768x1"),
    *("fwd:6/6:256/512:65536x1", "fwd:2/2:256/512:32768x1", "fwd:16/16:256/256:32768x1"),
    *("bwd:30/30:96/192:8192x1", "bwd:30/30:96/192:8192x4", "bwd:16/16:128/192:8192x1"),
)
PIECES = (2, 3, 4, 5, 8, 11)  # segments of the longest sequence
ROUNDS, REPLAYS, PROFILED = 20, 3, 5
new_event: Any = torch.cuda.Event
Ways = dict[str, Callable[[], Any]]


def call(row: str) -> tuple[str, Call, Incoming]:
    """Returns a row's direction, its call and gradients that a backward starts from."""
    direction, heads, sizes, lengths = row.split(":")
    (H, HV), (K, V) = (tuple(map(int, pair.split("/"))) for pair in (heads, sizes))
    workload = Gdn((H, HV), parse_lengths(lengths), "bwd", "model", True, K, V)
    x = gdn_inputs(workload, torch.device("cuda"), torch.bfloat16)
    on_host = torch.tensor([0, *workload.lengths]).cumsum(0)
    made = Call(x.q, x.k, x.v, x.g, x.beta, K**-0.5, x.initial_state, x.cu_seqlens, on_host)
    assert x.do is not None
    return direction, made, Incoming(x.do, x.dht)


def forwards(x: Call) -> Ways:
    """Returns the forward by each plan; `chosen` is that of the model."""
    chunks, shape = plan_shape(x)
    (HV, _, V, sm_count), chosen = shape, gdn_plan.forward(chunks, shape)
    longest = max(count for count, _ in chunks)
    plans = {"whole": gdn_plan.wide(sum(n for _, n in chunks), HV, V, sm_count)}
    plans |= {"chosen " + said(chosen): chosen} if chosen.segment_chunks else {}
    for width in (128, 64):
        for most in (-(-longest // n) for n in PIECES):
            for bound in (WARM_LOG_BOUND, -math.inf):
                found = Plan(ForwardChoice(width, False), most, bound)
                plans |= {said(found): found} if V % width == 0 else {}

    def run(plan: Plan) -> None:
        with mock.patch.object(launch, "planned", return_value=(plan, False)):
            launch.gdn_fwd(x, Options(output_final_state=True))

    return {name: partial(run, plan) for name, plan in plans.items()}


def said(plan: Plan) -> str:
    return f"v{plan.kernel.tile_v} {plan.segment_chunks} {plan.warm_log_bound:g}"


def backwards(x: Call, incoming: Incoming) -> Ways:
    options = Options(is_train=True)
    done = launch.gdn_fwd(x, options)
    assert done.g_cum is not None
    assert done.A is not None
    saved = SavedForward(done.g_cum, done.A, [])

    def run(leaves: bool) -> None:
        with mock.patch.object(states, "leaves_values", return_value=leaves):
            launch_backward.gdn_bwd(x, saved, incoming, options)

    return {"wide_grads": partial(run, True), "chunk_grads": partial(run, False)}


@contextmanager
def seconds(found: list[float]) -> Iterator[None]:
    begin, end = (new_event(enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    end.synchronize()
    found.append(begin.elapsed_time(end) / 1e3)


def times(ways: Ways) -> dict[str, float]:
    """Returns the median time of each way, in us."""
    graphs = {}
    for name, run in ways.items():
        run()  # compiles
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            with seconds(found[name]):
                for _ in range(REPLAYS):
                    graph.replay()
    return {name: median(each) * 1e6 / REPLAYS for name, each in found.items()}


def kernels(run: Callable[[], Any]) -> str:
    """Returns the time of each kernel, in us, in the order of time."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    found = [(event.device_time_total / PROFILED, event.key) for event in seen.key_averages()]
    return "  ".join(f"{name[:40]} {us:.1f}" for us, name in sorted(found, reverse=True) if us > 1)


def main() -> None:
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    for row in sys.argv[1:] or ROWS:
        direction, x, incoming = call(row)
        ways = forwards(x) if direction == "fwd" else backwards(x, incoming)
        found = times(ways)
        best = min(found, key=lambda name: found[name])
        first = next(iter(found))
        print(row, *(f"{name}: {us:.0f}" for name, us in found.items()), sep="; ", flush=True)
        print(f"  best {best}, {found[first] / found[best]:.2f} times as fast as {first}")
        for name in dict.fromkeys((first, best, *list(ways)[1:2])):
            print(f"  {name}: {kernels(ways[name])}", flush=True)


if __name__ == "__main__":
    main()
