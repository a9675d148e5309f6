"""Calls whose lengths are new each time, as in training: time of the host, and by the clock.

    python -m benchmarks.gdn.new_lengths [--heads 16/32] [--tokens 8192] [--packs 64] [--save]

Packs of six sequences, each seen once, after as many others. A call is timed until it returns, in
bursts that the GPU's queue holds, and packs one after the other by the clock. Host times are in
multiples of an addition of eight numbers. `--save` adds a record to benchmarks/results.
"""

import argparse
import gc
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.harness import records
from benchmarks.harness.records import Result, Row, Run
from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import api, known

SEQUENCES, WARM, BURST = 6, 10, 8
WAYS = {
    "ours": "new lengths, known to the host",
    "ours_device": "new lengths, known to the device alone",
    "ours_same": "one pack again and again",
    "ours_by_lengths": "told apart by lengths, not by plans",
}
COLUMNS = "way", "host p50", "p95", "most", "ms after ten", "wall us"


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


def measured(vary: bool, both: bool, way: str, options: Any, unit: float) -> Result:
    api.CALLS.forget()
    known.forget()
    heads = tuple(map(int, options.heads.split("/")))
    sets = [packs(options.packs, seed, options.tokens, vary, heads) for seed in range(3)]
    if way == "ours_same":
        sets = [[sets[0][0]] * options.packs] * 3

    def call(pack: Pack) -> None:
        run(pack, way, both)

    gc.collect()
    gc.disable()  # a full collection takes a process that has imported torch 40 ms and more
    first, then = host_times(call, sets[0]), sorted(host_times(call, sets[1]))
    wall, last = wall_time(call, sets[2]), options.packs - 1
    gc.enable()
    p50, p95, most = (round(then[int(share * last)] / unit, 1) for share in (0.5, 0.95, 1))
    hiccup = round(max(first[WARM:]) * 1e3, 2)
    print(
        ("{:>16}" * len(COLUMNS)).format(way, p50, p95, most, hiccup, round(wall * 1e6)), flush=True
    )
    detail = f"host: p95 {p95}, most {most} additions; the slowest after ten calls {hiccup} ms"
    of_wall = {"eager_ms": wall * 1e3, "eager_samples": options.packs}
    return Result(way, "ok", detail, **of_wall, host_additions=p50)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default="16/32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=64)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    exchange, unit, rows = known.representative, addition(), []
    date, (commit, dirty) = records.now(), records.git_state()
    name = records.device_name("cuda")
    print(f"{name}, {options.heads} heads, {options.tokens} tokens, addition {unit * 1e6:.1f} us")
    for vary in (False, True):
        for kind in ("fwd", "both"):
            total = f"{options.tokens // 2}..{options.tokens}" if vary else str(options.tokens)
            layout = f"{total} in {SEQUENCES}"
            print(f"{kind}, {layout} sequences\n" + ("{:>16}" * len(COLUMNS)).format(*COLUMNS))
            results = []
            for way in WAYS:
                by_lengths = way == "ours_by_lengths"
                known.representative = (lambda *of: of[4]) if by_lengths else exchange
                results.append(measured(vary, kind == "both", way, options, unit))
            label = (
                f"new_lengths-{kind}-{options.heads.replace('/', 'x')}-{layout.replace(' ', '-')}"
            )
            what = "lengths new in every call, eager"
            of = label, "new_lengths", kind, options.heads, layout, options.tokens, what
            rows.append(Row(*of, results=tuple(results)))
    known.representative = exchange
    if options.save:
        environment = records.device_environment("cuda")
        record = Run(
            f"new_lengths-{date:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}", "new_lengths",
            date.isoformat(timespec="seconds"), name, "cuda", environment, {},
            records.package_versions(("torch", "qla-kernels")), dict(WAYS), {}, {}, commit, dirty,
            records.command_line("python -m benchmarks.gdn.new_lengths"), rows=tuple(rows),
            notes=f"an addition takes {unit * 1e6:.2f} us",
        )  # fmt: skip
        print(records.append(record))


if __name__ == "__main__":
    main()
