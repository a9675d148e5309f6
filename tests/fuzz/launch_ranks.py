"""Starts the ranks of tests/fuzz/ranks.py, and gathers what they say."""

import json
import tempfile
import time
from pathlib import Path

from tests.ranks import forked

WORLD = 4
BATCH = 60  # cases of a function before processes are started anew
LOST = 1800  # seconds until ranks that wait for each other are given up; no case is timed
FUNCTIONS = ("ranks.context_parallel", "ranks.ring")
COVERS = (
    "CPContext",
    "RingGroups",
    "build_cp_context",
    "sparse_ring_attention",
)


def failures(plan: list[tuple[str, int]], world: int = WORLD) -> list[str]:
    """Of these cases (function, seed), in one start of the processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        said, codes = forked("tests.fuzz.ranks", folder, world, LOST)
    found = []
    for rank, (what, code) in enumerate(zip(said, codes, strict=True)):
        if code != 0 or "no end" in what:
            at = what.get("at", what.get("no end"))
            found.append(f"rank {rank} ended with {code} at {at}")
        for function, seed, error, choices in what.get("failures", ()):
            found.append(
                f"{function} fails with seed {seed}: {error}\n"
                f"    python -m tests.fuzz --ranks {function} --seed {seed} --count 1\n"
                f"    {choices}"
            )
    return found


def session(first: int, count: int | None, minutes: float | None, functions: list[str]) -> int:
    """Cases until there were `count` of each function, or the time is over; 1 if any failed."""
    names = [n for n in FUNCTIONS if not functions or n.startswith(tuple(functions))]
    end = None if minutes is None else time.monotonic() + 60 * minutes
    left = 1 if count is None and end is None else count
    seed, wrong = first, 0
    while (left is None or left > 0) and (end is None or time.monotonic() < end):
        size = BATCH if left is None else min(BATCH, left)
        found = failures([(n, s) for s in range(seed, seed + size) for n in names])
        print("\n".join(found) if found else f"{size} cases of each from {seed}", flush=True)
        seed, wrong = seed + size, wrong + len(found)
        left = None if left is None else left - size
    for name in names:
        print(f"{name:32}{seed - first:>9}")
    print(f"{wrong} failures")
    return int(wrong > 0)
