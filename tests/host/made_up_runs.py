"""Benchmark runs that nobody measured, for tests of tables, figures and reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gdn.problem import gdn_work
from benchmarks.gdn.workloads import GDN, Gdn
from benchmarks.harness.records import (
    FAILED,
    MEMORY,
    NOT_APPLICABLE,
    OK,
    TIME_LIMIT,
    UNSUPPORTED,
    WRONG,
    Result,
    Row,
    Run,
)
from benchmarks.harness.workload import Ceilings

CEILINGS = Ceilings(flops=790e12, bandwidth=4.3e12, matmul="8192^3 bfloat16")
LABELS = {
    "ours": "ours", "ours_train": "ours, training",
    "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fla": "FLA",
}  # fmt: skip
KERNELS = {"gdn.gate-fp32": "made-up"}
FAILURES = (WRONG, TIME_LIMIT, MEMORY, FAILED)


def run_of(
    workloads: Sequence[Gdn], *, with_ours: bool = True, failures: bool = False, **changes: object
) -> Run:
    rows = tuple(_row(w, i, with_ours, failures) for i, w in enumerate(workloads))
    values: dict[str, object] = {
        "id": "gdn-20260102T030405Z-beef", "family": "gdn", "date": "2026-01-02T03:04:05+00:00",
        "device": "NVIDIA H200", "device_kind": "cuda",
        "environment": {"driver": "580.0", "sm_clock": "1980 MHz"}, "environment_after": {},
        "versions": {"torch": "2.11.0", "flash_qla": "0.1.3"}, "labels": LABELS, "missing": {},
        "ceilings": {"flops": 790e12, "bandwidth": 4.3e12, "matmul": CEILINGS.matmul},
        "commit": "0" * 40, "dirty": False, "command": "python -m benchmarks.sm90 gdn --quick",
        "kernels": KERNELS, "rows": rows,
    }  # fmt: skip
    return Run(**{**values, **changes})  # type: ignore[arg-type]


def anchor_run(**options: object) -> Run:
    return run_of(GDN["anchors"], **options)  # type: ignore[arg-type]


SHARED_LABELS = {
    "ours": "ours", "fa4_shared": "flash-attn-4, 3 calls", "fa4_calls": "not merged",
    "fa4": "flash-attn-4", "whole": "whole sequences",
}  # fmt: skip


def shared_run(workloads: Sequence[Any], times: Mapping[str, float], **changes: object) -> Run:
    """Shared prompts; `times` in ms by implementation, or by direction and implementation."""

    def result(kind: str, name: str) -> Result:
        ms = times.get(f"{kind} {name}", times.get(name))
        if ms is None:
            return Result(name, NOT_APPLICABLE, "not asked for")
        known = {"samples": 9, "graph": True, "peak_bytes": 3 << 20}
        return Result(name, OK, p20_ms=ms, p50_ms=ms, p80_ms=ms, **known)

    rows = tuple(
        Row(
            name=w.name, family=w.family, kind=w.kind, heads=w.heads_label.replace("x", "/"),
            layout=w.layout, tokens=w.tokens, what=w.what, flops=2e12, bytes=1.0, floor_ms=0.5,
            results=tuple(result(w.kind, name) for name in SHARED_LABELS),
        )
        for w in workloads
    )  # fmt: skip
    return run_of([], family=workloads[0].family, rows=rows, **{"labels": SHARED_LABELS, **changes})


def _row(workload: Gdn, index: int, with_ours: bool, failures: bool) -> Row:
    work = gdn_work(workload)
    floor = 1e3 * max(work.flops / CEILINGS.flops, work.bytes / CEILINGS.bandwidth)
    chunks = max(workload.lengths) / 64
    base = 0.03 + floor * 1.6 + 0.0009 * chunks

    def result(name: str, factor: float) -> Result:
        if failures and (index + len(name)) % 5 == 0:
            status = FAILURES[index % len(FAILURES)]
            return Result(name, status, f"first call: made up for row {index % 3}")
        ms = base * factor
        return Result(
            name, OK, p20_ms=0.99 * ms, p50_ms=ms, p80_ms=1.02 * ms, samples=50, graph=True,
            eager_ms=ms + 0.04, first_call_s=12.0, peak_bytes=int(work.bytes), errors={"o": 4e-3},
        )  # fmt: skip

    backward = workload.direction != "fwd"
    only_qla = "it has no kernel that does only this" if workload.kernel else "it has no backward"
    ours = [result("ours", 1.0), result("ours_train", 1.06)]
    if not with_ours:
        ours = [Result(r.implementation, UNSUPPORTED, "no CUDA kernel yet") for r in ours]
    if backward or workload.kernel:
        ours[1] = Result("ours_train", NOT_APPLICABLE, "the same as ours")
    absent = Result("flashinfer", NOT_APPLICABLE, only_qla)
    rivals = [
        result("flash_qla", 1.2 + 0.15 * (index % 7)),
        absent if backward or workload.kernel else result("flashinfer", 0.92 + 0.2 * (index % 4)),
        result("fla", 2.1 + 0.3 * (index % 3)),
    ]
    return Row(
        name=workload.name, family="gdn", kind=workload.kind,
        heads="/".join(map(str, workload.heads)), layout=workload.layout, tokens=workload.tokens,
        what=workload.what, flops=work.flops, bytes=work.bytes, floor_ms=floor,
        input_sets=2, results=(*ours, *rivals),
    )  # fmt: skip
