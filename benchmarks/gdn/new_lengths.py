"""Calls whose lengths are new each time, as in training: time of the host, and by the clock.

    python -m benchmarks.gdn.new_lengths [--heads 16/32] [--tokens 8192] [--packs 64] [--save]

Packs of six sequences, each seen once, after as many others. A call is timed until it returns, in
bursts that the GPU's queue holds, and packs one after the other by the clock. Host times are in
multiples of an addition of eight numbers. `--save` adds a line to benchmarks/results.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qla_kernels import __version__, chunk_gated_delta_rule
from qla_kernels.gdn import api, known

SEQUENCES, WARM, BURST = 6, 10, 8
WAYS = {
    "same": "one pack again and again, its lengths known to the host",
    "device": "new lengths, known to the device alone",
    "known": "new lengths, known to the host",
    "by lengths": "the same, told apart by their lengths and not by their plans",
}
COLUMNS = "total", "call", "way", "p50", "p95", "most", "ms after ten", "wall us"
RESULTS = Path(__file__).parents[1] / "results" / "new_lengths.jsonl"


class Pack(NamedTuple):
    bounds: torch.Tensor  # on the GPU
    on_host: torch.Tensor
    x: list[torch.Tensor]  # q, k, v, g, beta
    do: torch.Tensor


def packs(count: int, seed: int, tokens: int, vary: bool, heads: Sequence[int]) -> list[Pack]:
    """Returns packs whose tensors are slices of the same random memory."""
    rng = random.Random(seed)
    (H, HV), on = heads, torch.device("cuda")
    q, k, v, do = (torch.randn(1, tokens, h, 128, device=on) for h in (H, H, HV, HV))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    gates = [-torch.rand(1, tokens, HV, device=on), torch.rand(1, tokens, HV, device=on)]
    inputs = [*(t.bfloat16() for t in (q, k, v)), *gates]
    found = []
    for _ in range(count):
        total = rng.randrange(tokens // 2, tokens + 1) if vary else tokens
        ends = [0, *sorted(rng.sample(range(1, total), SEQUENCES - 1)), total]
        on_host = torch.tensor(ends, dtype=torch.int32)
        x = [t[:, :total].detach().requires_grad_() for t in inputs]
        found.append(Pack(on_host.to(on), on_host, x, do[:, :total].bfloat16()))
    return found


def run(pack: Pack, way: str, both: bool) -> None:
    on_host, (q, k, v, g, beta) = None if way == "device" else pack.on_host, pack.x
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


def wall_time(call: Callable[[Pack], None], of: list[Pack]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for pack in of:
        call(pack)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(of)


def addition() -> float:
    x, times = torch.zeros(8, device="cuda"), []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            x + 1
        times.append((time.perf_counter() - begin) / 100)
    return statistics.median(times)


def row(vary: bool, both: bool, way: str, options: Any, unit: float) -> tuple[Any, ...]:
    api.CALLS.forget()
    known.forget()
    heads = tuple(map(int, options.heads.split("/")))
    sets = [packs(options.packs, seed, options.tokens, vary, heads) for seed in range(3)]
    if way == "same":
        sets = [[sets[0][0]] * options.packs] * 3

    def call(pack: Pack) -> None:
        run(pack, way, both)

    gc.collect()
    first, then = host_times(call, sets[0]), sorted(host_times(call, sets[1]))
    wall, last = wall_time(call, sets[2]), options.packs - 1
    p50, p95, most = (round(then[int(share * last)] / unit, 1) for share in (0.5, 0.95, 1))
    names = "varies" if vary else "same", "both" if both else "fwd", way
    return *names, p50, p95, most, round(max(first[WARM:]) * 1e3, 2), round(wall * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default="16/32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=64)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    exchange, unit, rows = known.representative, addition(), []
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, {options.heads} heads, {options.tokens} tokens, addition {unit * 1e6:.1f} us")
    print(("{:>14}" * len(COLUMNS)).format(*COLUMNS))
    for vary in (False, True):
        for both in (False, True):
            for way in WAYS:
                known.representative = exchange if way != "by lengths" else lambda *of: of[4]
                rows.append(row(vary, both, way, options, unit))
                print(("{:>14}" * len(COLUMNS)).format(*rows[-1]), flush=True)
    known.representative = exchange
    if options.save:
        versions = {"torch": torch.__version__, "qla_kernels": __version__}
        shape = {"heads": options.heads, "tokens": options.tokens, "packs": options.packs}
        about = {"gpu": gpu, "date": time.strftime("%Y-%m-%d"), **shape, "versions": versions}
        record = {**about, "addition_us": round(unit * 1e6, 2), "columns": COLUMNS, "rows": rows}
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
