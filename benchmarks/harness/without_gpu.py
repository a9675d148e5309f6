"""Workloads on a machine without a GPU: shorter, so that a row takes seconds, or left out.

Times there say nothing about a GPU. They show that the calls run, and that results are right.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..gdn.workloads import GDN, Gdn
from ..hybrid.workloads import HybridPart
from ..model.workloads import ModelStep
from .problems import work_of

FACTOR = 64  # of named workloads: a chunk of 64 tokens becomes one token
WHOLE = GDN["cpu"]  # never shortened

MOST_FLOPS, MOST_BYTES = 1e11, 1e9  # of a row, that the CPU path and the truth run in a minute
MOST_TOKENS = 8192  # of a gated delta net, whose truth is a loop over tokens
OWN_FLOPS = 2e10  # in seconds: these can be shortened to fit
MOST_FACTOR = 1 << 16
DECODING = ("decode", "pool_decode", "drafts", "decoding")
NO_KERNELS = "single kernels have no CPU path"
NEEDS_TRITON = "FLA's layer runs on a GPU alone"
TOO_LONG = "they would take minutes each"


class Shortened(NamedTuple):
    workloads: list[Any]
    said: str  # sentences


def for_cpu(workloads: Sequence[Any], own: bool = False) -> Shortened:
    """Returns the workloads that a CPU can run.

    Named workloads are shortened alike. Those of one's own (`own`) keep their lengths if these are
    short enough, and else are halved until they are.
    """
    found: dict[str, Any] = {}
    factors: list[int] = []
    left_out = Counter[str]()
    for workload in workloads:
        if workload in WHOLE:
            found[workload.name] = workload
            continue
        if isinstance(workload, Gdn) and workload.kernel:
            left_out[NO_KERNELS] += 1
            continue
        if workload.kind == "fla_layer":
            left_out[NEEDS_TRITON] += 1
            continue
        factor = _factor(workload) if own else FACTOR
        short = workload.reduced(factor)
        if _too_long(short, MOST_FLOPS):
            left_out[TOO_LONG] += 1
            continue
        found[short.name] = short
        factors.append(factor)
    said = [f"No GPU: float32 on the CPU path{_how_much([*found.values()], factors)}."]
    for reason, count in left_out.items():
        said.append(f"{count} of {len(workloads)} workloads are left out: {reason}.")
    return Shortened([*found.values()], " ".join(said))


def _how_much(found: Sequence[Any], factors: Sequence[int]) -> str:
    low, high = min(factors, default=1), max(factors, default=1)
    times = f"{high}" if low == high else f"{low} to {high}"
    said = f", lengths {times} times shorter" if high > 1 else ""
    if high > 1 and any(workload.kind in DECODING for workload in found):
        said += f", {times} times fewer sequences to decode"
    if any(isinstance(workload, (HybridPart, ModelStep)) for workload in found):
        said += ", layers of a small model"
    return said


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
