"""Time the gated delta net's forward with and without equal shares, for docs/lessons.md.

    python scripts/gdn_shares.py                              the rows of the lessons
    python scripts/gdn_shares.py 16/48:8192x4 16/48:9000+7000+8768+8000

Per row the CUDA graphs of four plans run in turn, so that a drift of the clock meets all alike, and
their median times are printed, in us, and their ratios to `known`:

    whole    lengths that the host knows; the best plan without equal shares
    shares   equal shares, whatever the plan says
    known    lengths that the host knows
    device   lengths that the device alone knows
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.launch.tensors import plan_shape
from qla_kernels.gdn.times import SHARING

ROWS = (
    # chosen, and measured to gain; then chosen for lengths of the host alone
    *("16/48:8192x4", "16/64:8192x3", "16/32:8192x5", "8/24:8192x6", "16/48:4096x8"),
    *("16/48:2048x4", "16/48:4096x4"),
    # not chosen
    *("16/48:1024x8", "16/48:2048x16", "16/64:8192x4", "16/64:4096x8", "16/32:8192x4"),
    # ragged, and some that are longer than a share
    *("16/48:8192+8192+8192+6000", "16/48:8192+6000+4000+9000+2000", "16/48:16000+6768+10000+0"),
    *("16/64:12655+7352+4569", "16/32:16384+8192+8192+4096+4096"),
)
ROUNDS, REPLAYS = 40, 5
new_event: Any = torch.cuda.Event
PLANS = "whole", "shares", "known", "device"


def parsed(row: str) -> tuple[int, int, list[int]]:
    """Returns key heads, value heads and lengths of a row."""
    heads, lengths = row.split(":")
    H, HV = map(int, heads.split("/"))
    if "x" in lengths:
        tokens, count = map(int, lengths.split("x"))
        return H, HV, [tokens] * count
    return H, HV, [int(length) for length in lengths.split("+")]


def call(row: str, on: str = "cuda") -> Call:
    """Returns a call with start states, whose lengths the host knows."""
    (H, HV, lengths), K = parsed(row), 128
    T, make = sum(lengths), partial(torch.randn, device=on, dtype=torch.bfloat16)
    q, k = (torch.nn.functional.normalize(make(1, T, H, K), dim=-1) for _ in "qk")
    v, beta = make(1, T, HV, K), make(1, T, HV).sigmoid()
    g = -torch.rand(1, T, HV, device=on) * 0.1
    h0 = torch.randn(len(lengths), HV, K, K, device=on)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return Call(q, k, v, g, beta, K**-0.5, h0, bounds.to(on), bounds)


@contextmanager
def planned(name: str, x: Call) -> Iterator[Call]:
    """The call that has such a plan; `whole` and `shares` put it in place of the launch code's."""
    if name in ("known", "device"):
        yield x if name == "known" else x._replace(cu_seqlens_cpu=None)
        return
    chunks, shape = plan_shape(x)
    found: Any = gdn_plan.Plan(SHARING, shares=True)
    if name == "whole":
        found = gdn_plan.forward(chunks, shape, shares=False)
    alike = name == "whole" and len(chunks) == 1 and found.segment_chunks is None
    with mock.patch.object(launch, "planned", return_value=(found, alike)):
        yield x


def graph_of(name: str, x: Call) -> torch.cuda.CUDAGraph:
    options = Options(output_final_state=True)
    with planned(name, x) as given:
        launch.gdn_fwd(given, options)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch.gdn_fwd(given, options)
    return graph


def times(row: str) -> dict[str, float]:
    """Returns the median time of each plan, in us."""
    x = call(row)
    graphs = {name: graph_of(name, x) for name in PLANS}
    found: dict[str, list[float]] = {name: [] for name in PLANS}
    for turn in range(ROUNDS):
        for name in PLANS[turn % 4 :] + PLANS[: turn % 4]:
            begin, end = (new_event(enable_timing=True) for _ in range(2))
            graphs[name].replay()
            begin.record()
            for _ in range(REPLAYS):
                graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return {name: median(each) for name, each in found.items()}


def main() -> None:
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    for row in sys.argv[1:] or ROWS:
        found = times(row)
        ratios = (f"{name} {us:.1f} ({us / found['known']:.3f})" for name, us in found.items())
        print(f"{row:32}", "  ".join(ratios), flush=True)


if __name__ == "__main__":
    main()
