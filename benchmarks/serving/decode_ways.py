"""Decoding of large batches in several ways, in turn, beside the engines' kernels.

    python -m benchmarks.serving.decode_ways                       # on a GPU, about two minutes
    DECODE_WAYS=four,three python -m benchmarks.serving.decode_ways

Prints the time of each way in us, and its ratio to `four`. A way is in force while a graph of its
call is captured. docs/notes/gdn-decoding.md, section 7, has what is expected of each.

    plan              what the package launches
    four, three, two  so many CTAs an SM, by shared memory that they ask for
    by_registers      three, because the compiler may use 168 registers
    rows              four; a warp's accesses complete rows of 512 bytes one after another
    rows_three        the same with three
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from qla_kernels import jit
from qla_kernels.gdn.decode import launch
from qla_kernels.gdn.kernels import recurrent

from ..harness.adapters import Implementation
from ..harness.problems import problem_of
from ..harness.timing import GraphTimer, Timer
from .engines import VLLM, SGLang
from .ours import OursServing
from .workloads import DECODE, PoolDecode

ROUNDS, BURST, IDLE = 12, 0.02, 0.02  # seconds
ROWS = (
    "16x32-64of1", "16x32-256of1", "16x64-64of1", "16x64-256of1", "4x16-256of1", "4x16-512of1",
    "2x8-512of1",
)  # fmt: skip
BY_BLOCKS = """#pragma unroll
  for (int b = 0; b < Blocks; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i)
"""
BY_ROWS = """#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
"""


def resident(ctas: int) -> Callable[..., int]:
    """Instead of launch.room: of every call so many CTAs fit on an SM."""
    return lambda variant, *_: recurrent.schedule(variant).room_for(ctas)


@contextmanager
def by_rows(ctas: int = 4) -> Iterator[None]:
    """The columns that a lane shares with others, one after another, with all their keys."""
    assert BY_BLOCKS in recurrent.SOURCE, "the loops of move_blocks"
    source = recurrent.SOURCE.replace(BY_BLOCKS, BY_ROWS)
    with patch.object(recurrent, "SOURCE", source), of(ctas):
        yield


@contextmanager
def of(ctas: int) -> Iterator[None]:
    with patch.object(launch, "room", resident(ctas)):
        yield


@contextmanager
def by_registers() -> Iterator[None]:
    whole = recurrent.schedule

    def three(variant: Any) -> Any:
        plan = whole(variant)
        roles = tuple(replace(role, regs=168) for role in plan.roles)
        return replace(plan, roles=roles, ctas_per_sm=3)

    with patch.object(recurrent, "schedule", three), of(4):
        yield


@contextmanager
def plan() -> Iterator[None]:
    yield


WAYS: dict[str, Callable[[], Any]] = {
    "four": lambda: of(4),
    "plan": plan,
    "three": lambda: of(3),
    "two": lambda: of(2),
    "by_registers": by_registers,
    "rows": by_rows,
    "rows_three": lambda: by_rows(3),
}
ENGINES: dict[str, Implementation] = {"vllm": VLLM(), "sglang": SGLang()}


@contextmanager
def way(name: str) -> Iterator[Implementation]:
    """Who makes the call; kernels are compiled anew, because their code may differ."""
    if name in ENGINES:
        yield ENGINES[name]
        return
    jit.compile.cache_clear()
    with WAYS[name]():
        yield OursServing()
    jit.compile.cache_clear()


def timers(
    names: Sequence[str], workload: PoolDecode, device: torch.device, make: type[Timer] = GraphTimer
) -> dict[str, Timer]:
    """A graph of each way; raises RuntimeError for a wrong result."""
    problem = problem_of(workload, device)
    truth, found = problem.truth(), dict[str, Timer]()
    for name in names:
        with way(name) as who:
            calls = [who.prepare(workload, inputs) for inputs in problem.inputs]
            verdict = truth._replace(rounded=(*truth.rounded, *who.rounds)).judge(
                calls[0].collect(calls[0].run()), problem.dtype
            )
            if verdict.complaint is not None:
                raise RuntimeError(f"{name} of {workload.name}: {verdict.complaint}")
            found[name] = make([call.run for call in calls])  # type: ignore[call-arg]
    return found


def measured(graphs: dict[str, Timer], rounds: int = ROUNDS, burst: float = BURST) -> list[float]:
    """The median time of each, in us, of bursts in turn."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, timer in graphs.items():
            time.sleep(IDLE)
            samples[name] += timer.burst(burst)
    return [1e6 * median(found) for found in samples.values()]


def main() -> None:
    names = os.environ.get("DECODE_WAYS", ",".join(WAYS)).split(",")
    if "DECODE_WAYS" not in os.environ:
        names += [name for name, engine in ENGINES.items() if engine.missing() is None]
    print("row", *names)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # the default one cannot be captured
        for workload in DECODE:
            if workload.name.removeprefix("gdn-pool-decode-") in ROWS:
                times = measured(timers(names, workload, torch.device("cuda")))
                shown = [f"{us:.1f} ({us / times[0]:.3f})" for us in times]
                print(workload.name, *shown, flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    # programs would replay the first way; prebuilt kernels have the package's code
    os.environ |= {"QLA_PROGRAMS": "0", "QLA_PREBUILT": ""}
    main()
