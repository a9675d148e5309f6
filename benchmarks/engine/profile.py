"""GPU time of the region of a gated-delta layer, between its projections, by kernel.

Each layer's forward and its projections stand in ranges of torch's profiler; a kernel belongs to
the innermost range in which it was launched. The engine has to be eager: a CUDA graph hides ranges.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from . import models

REGION, PROJECTION = "gdn.region", "gdn.projection"


def measure(worker: Any, shapes: list[list[int]], decodes: list[int]) -> dict[str, Any]:
    """Returns us a layer, in all and by kernel, of prefills [sequences, tokens] and decoding."""
    layers = worker.llm.apply_model(mark)[0]
    out = {}
    for count, length in shapes:
        out[f"prefill {count}x{length}"] = _take(worker, count, length, 1, layers)
    for count in decodes:
        out[f"decode {count}"] = _take(worker, count, 16, 5, layers)
    return out


def mark(model: Any) -> int:
    """Puts the layers' forwards and their projections into ranges; returns the number of layers."""
    from torch.profiler import record_function

    def within(module: Any, name: str) -> None:
        call = module.forward

        def forward(*args: Any, **named: Any) -> Any:
            with record_function(name):
                return call(*args, **named)

        if not hasattr(module, "qla_marked"):
            module.qla_marked, module.forward = True, forward

    layers = [x for x in model.modules() if models.is_layer(x)]
    for layer in layers:
        within(layer, REGION)
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            within(getattr(layer, name), PROJECTION)
    return len(layers)


def _take(worker: Any, count: int, length: int, new: int, layers: int) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    def run(seed: int) -> None:
        worker.llm.reset_prefix_cache()
        given = {str(i): models.tokens(seed * 7919 + i, length) for i in range(count)}
        worker.run(given, worker.params(max_tokens=new))
        torch.cuda.synchronize()

    for seed in range(2):
        run(seed)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        run(2)
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "trace.json"
        taken.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return of_region(events, layers, decoding=new > 1)


def of_region(events: list[dict[str, Any]], layers: int, decoding: bool = False) -> dict[str, Any]:
    """Returns the GPU's time in the region, in us a layer: in all, its span, and of each kernel.

    In decoding the forwards of prefill, those with the longest regions, do not count: the first
    `layers` regions are the prefill's.
    """
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for x in events:
        if x.get("cat") == "user_annotation" and x["name"] in (REGION, PROJECTION):
            ranges[x["tid"]].append((x["ts"], x["ts"] + x["dur"], x["name"]))
    for each in ranges.values():
        each.sort()
    regions = sorted(
        (begin, end) for each in ranges.values() for begin, end, name in each if name == REGION
    )
    wanted = regions[layers:] if decoding else regions
    launched: dict[int, float] = {}
    for x in events:
        if x.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in x.get("args", {}):
            inside = [r for r in ranges.get(x["tid"], []) if r[0] <= x["ts"] <= r[1]]
            if inside and max(inside)[2] == REGION:
                begin = next(r[0] for r in inside if r[2] == REGION)
                launched[x["args"]["correlation"]] = begin
    firsts = {begin for begin, _ in wanted}
    kernels: dict[str, float] = defaultdict(float)
    spans: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for x in events:
        if x.get("cat") not in ("kernel", "gpu_memset", "gpu_memcpy"):
            continue
        begin = launched.get(x.get("args", {}).get("correlation"), -1.0)
        if begin in firsts:
            kernels[x["name"][:80]] += x["dur"]
            spans[begin].append((x["ts"], x["ts"] + x["dur"]))
    count = max(len(wanted), 1)
    ordered = sorted(kernels.items(), key=lambda item: -item[1])
    return {
        "us": round(sum(kernels.values()) / count, 2),
        "busy_us": round(sum(map(_union, spans.values())) / count, 2),
        "regions": len(wanted),
        "launches": round(sum(map(len, spans.values())) / count, 1),
        "kernels": {name: round(us / count, 2) for name, us in ordered},
    }


def _union(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
