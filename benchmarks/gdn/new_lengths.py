"""Calls whose lengths are new each time, as in training: time of the host, and by the clock.

    python -m benchmarks.gdn.new_lengths [--heads 16/32] [--tokens 8192] [--packs 64] [--save]

Packs of six sequences, each seen once, after as many others. A call is timed until it returns, in
bursts that the GPU's queue holds, and packs one after the other by the clock. Host times are in
multiples of an addition of eight numbers. `--save` adds a record to benchmarks/results.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import api, known

from ..harness import records
from ..harness.own_shapes import heads_of
from ..harness.records import Result, Row
from ..harness.timing import _in_a_row
from ..harness.workload import Heads

SEQUENCES, WARM, BURST = 6, 10, 8
WAYS = {
    "ours": "new lengths, known to the host",
    "ours_device": "new lengths, known to the device alone",
    "ours_same": "one pack again and again",
}
COLUMNS = "way", "host p50", "p95", "most", "ms after ten", "wall us"


class Pack(NamedTuple):
    bounds: torch.Tensor  # on the GPU
    on_host: torch.Tensor
    x: list[torch.Tensor]  # q, k, v, g, beta
    do: torch.Tensor


def packs(count: int, seed: int, tokens: int, vary: bool, heads: Heads) -> list[Pack]:
    """Returns packs whose tensors are slices of the same random memory."""
    rng = random.Random(seed)
    (H, HV), on = heads, torch.device("cuda")
    q, k, v, do = (torch.randn(1, tokens, h, 128, device=on) for h in (H, H, HV, HV))
    gates = [-torch.rand(1, tokens, HV, device=on), torch.rand(1, tokens, HV, device=on)]
    inputs = [normalize(q, dim=-1).bfloat16(), normalize(k, dim=-1).bfloat16(), v.bfloat16()]
    found = []
    for _ in range(count):
        total = rng.randrange(tokens // 2, tokens + 1) if vary else tokens
        ends = [0, *sorted(rng.sample(range(1, total), SEQUENCES - 1)), total]
        on_host = torch.tensor(ends, dtype=torch.int32)
        x = [t[:, :total].detach().requires_grad_() for t in (*inputs, *gates)]
        found.append(Pack(on_host.to(on), on_host, x, do[:, :total].bfloat16()))
    return found


def run(way: str, both: bool, pack: Pack) -> None:
    on_host, (q, k, v, g, beta) = None if way == "ours_device" else pack.on_host, pack.x
    with torch.set_grad_enabled(both):
        o, _ = chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=pack.bounds, cu_seqlens_cpu=on_host
        )
        if both:
            torch.autograd.grad(o, pack.x, pack.do)


def host_times(call: Callable[[Pack], None], of: list[Pack]) -> list[float]:
    """Returns the times until a call returns, in bursts, as layers follow each other."""
    times = []
    for i, pack in enumerate(of):
        if i % BURST == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call(pack)
        times.append(time.perf_counter() - begin)
    return times


def addition() -> float:
    """Seconds of the host."""
    few = torch.zeros(8, device="cuda")
    return sorted(_in_a_row(lambda: few + 1, 100)[1] for _ in range(30))[15]


def measured(way: str, both: bool, sets: list[list[Pack]], unit: float) -> Result:
    """Of three sets: the first warms, the second is timed call by call, the third by the clock."""
    api.CALLS.forget()
    known.forget()
    call = partial(run, way, both)
    if way == "ours_same":
        sets = [[sets[0][0]] * len(sets[0])] * 3
    gc.collect()
    gc.disable()  # a full collection takes a process that has imported torch 40 ms and more
    first, then = host_times(call, sets[0]), sorted(host_times(call, sets[1]))
    third = iter(sets[2])
    wall, _ = _in_a_row(lambda: call(next(third)), len(sets[2]))
    gc.enable()
    p50, p95, most = (round(then[int(x * (len(then) - 1))] / unit, 1) for x in (0.5, 0.95, 1))
    hiccup = round(max(first[WARM:]) * 1e3, 2)
    _print(way, p50, p95, most, hiccup, round(wall * 1e6))
    detail = f"host: p95 {p95}, most {most} additions; the slowest after ten calls {hiccup} ms"
    of_wall: dict[str, Any] = {"eager_ms": wall * 1e3, "eager_samples": len(sets[2])}
    return Result(way, "ok", detail, **of_wall, host_additions=p50)


def _print(*cells: object) -> None:
    print(("{:>16}" * len(COLUMNS)).format(*cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default="16/32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=64)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    heads, tokens, unit, rows = heads_of(options.heads), options.tokens, addition(), list[Row]()
    name = records.device_name("cuda")
    print(f"{name}, {options.heads} heads, {tokens} tokens, addition {unit * 1e6:.1f} us")
    for vary in (False, True):
        layout = f"{f'{tokens // 2}..' if vary else ''}{tokens} in {SEQUENCES}"
        for kind in ("fwd", "both"):
            print(f"{kind}, {layout} sequences")
            _print(*COLUMNS)
            results = []
            for way in WAYS:
                sets = [packs(options.packs, seed, tokens, vary, heads) for seed in range(3)]
                results.append(measured(way, kind == "both", sets, unit))
            label = f"{kind}-{options.heads.replace('/', 'x')}-{layout.replace(' ', '-')}"
            of = "new_lengths", kind, options.heads, layout, tokens
            what = "lengths new in every call, eager"
            rows.append(Row(f"new_lengths-{label}", *of, what, results=tuple(results)))
    if options.save:
        record = records.begun(
            "new_lengths", "cuda", records.command_line("python -m benchmarks.gdn.new_lengths"),
            device=name, environment=records.device_environment("cuda"), labels=dict(WAYS),
            versions=records.package_versions(("torch", "qla-kernels")), rows=tuple(rows),
            notes=f"an addition takes {unit * 1e6:.2f} us",
        )  # fmt: skip
        print(records.append(record))


if __name__ == "__main__":
    main()
