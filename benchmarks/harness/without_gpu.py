"""Workloads on a machine without a GPU: shorter, so that a row takes seconds, or left out.

Times there say nothing about a GPU. They show that the calls run, and that results are right.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..gdn.workloads import GDN, Gdn
from .problems import work_of

FACTOR = 64  # of named workloads: a chunk of 64 tokens becomes one token
WHOLE = GDN["cpu"]  # never shortened
MOST_FLOPS, MOST_BYTES = 1e11, 1e9  # of a row, that the CPU path and the truth run in a minute
MOST_TOKENS = 8192  # of a gated delta net, whose truth is a loop over tokens
OWN_FLOPS = 2e10  # in seconds: these can be shortened to fit
MOST_FACTOR = 1 << 16
DECODING = ("decode", "pool_decode", "drafts", "decoding")
SMALL = ("hybrid", "model")  # families that take a small model


class Shortened(NamedTuple):
    workloads: list[Any]
    said: str  # sentences


def for_cpu(workloads: Sequence[Any], own: bool = False) -> Shortened:
    """Returns the workloads that a CPU can run.

    Named workloads are shortened alike. Those of one's own (`own`) keep their lengths if these are
    short enough, and else are halved until they are.
    """
    found: dict[str, Any] = {}
    factors, left_out = [1] * (not workloads), Counter[str]()
    for workload in workloads:
        factor = _factor(workload) if own else FACTOR
        if workload in WHOLE:
            found[workload.name] = workload
        elif getattr(workload, "kernel", ""):
            left_out["single kernels have no CPU path"] += 1
        elif workload.kind == "fla_layer":
            left_out["FLA's layer runs on a GPU alone"] += 1
        elif _too_long(short := workload.reduced(factor), MOST_FLOPS):
            left_out["they would take minutes each"] += 1
        else:
            found[short.name] = short
            factors.append(factor)
    low, high = min(factors, default=1), max(factors, default=1)
    times = f"{high}" if low == high else f"{low} to {high}"
    said = "No GPU: float32 on the CPU path"
    if high > 1:
        decodes = any(workload.kind in DECODING for workload in found.values())
        fewer = f", {times} times fewer sequences to decode" if decodes else ""
        said += f", lengths {times} times shorter{fewer}"
    if any(workload.family in SMALL for workload in found.values()):
        said += ", layers of a small model"
    lines = [f"{n} of {len(workloads)} workloads are left out: {x}." for x, n in left_out.items()]
    return Shortened([*found.values()], " ".join([f"{said}.", *lines]))


def _factor(workload: Any) -> int:
    factor = 1
    while _too_long(workload.reduced(factor), OWN_FLOPS) and factor < MOST_FACTOR:
        factor *= 2
    return factor


def _too_long(workload: Any, most_flops: float) -> bool:
    work = work_of(workload)
    held = work.bytes
    if isinstance(workload, Gdn):
        if workload.tokens > MOST_TOKENS:
            return True
        if workload.direction != "fwd":
            # autograd through the truth keeps the state after each token, of two key heads in fp64
            heads = 2 * workload.heads[1] // workload.heads[0]
            held = 8.0 * workload.tokens * heads * workload.head_dim * workload.V
    return work.flops > most_flops or held > MOST_BYTES
