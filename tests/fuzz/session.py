"""Many cases, one after the other: counts, and failures with all it takes to see them again."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.draw import Draw, shrunk
from tests.fuzz.target import Target

Machine = dict[str, Any]  # keywords of Draw: {} for the CPU


@dataclass
class Failure:
    target: str
    seed: int
    error: str
    choices: str
    smaller: str = ""  # choices of the same failure, where those were made simpler
    trace: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.target} fails with seed {self.seed}: {self.error}",
            f"    python -m tests.fuzz {self.target} --seed {self.seed} --count 1",
            f"    {self.choices}",
        ]
        return "\n".join([*lines, *([f"    simpler: {self.smaller}"] if self.smaller else [])])


@dataclass
class Tally:
    cases: int = 0
    seconds: float = 0.0  # of this process's CPU
    failures: list[Failure] = field(default_factory=list)


def attack(name: str, target: Target, seed: int, fixed: Any = None, **machine: Any) -> Any:
    """A failure of one case, or None."""
    d = Draw(name, seed, fixed, **machine)
    try:
        target.attack(d)
    except Exception as error:  # whatever it is, the case has failed
        return Failure(name, seed, said(error), str(d), trace=traceback.format_exc())
    return None


def said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def smaller(name: str, target: Target, failure: Failure, **machine: Any) -> str:
    """The choices that are left of a failure, once each is as simple as it can be."""
    kind = failure.error.partition(":")[0]

    def fails(d: Draw) -> bool:
        again = attack(name, target, d.seed, d.fixed, **machine)
        if again is None or again.error.partition(":")[0] != kind:
            return False
        try:
            target.attack(d)  # fills in what it chose
        except Exception:
            return True
        return False

    first = Draw(name, failure.seed, **machine)
    return str(shrunk(first, fails)) if fails(first) else "it does not repeat"


def run(
    targets: dict[str, Target],
    seeds: Callable[[str], Iterator[int]],
    going_on: Callable[[dict[str, Tally]], bool],
    fixed: Any = None,
    report: Callable[[Failure], None] = lambda failure: None,
    shares: Mapping[str, float] | None = None,
    **machine: Any,
) -> dict[str, Tally]:
    """Cases of all targets, which share the time: always one of that which had least of its own."""
    shares = shares or {}
    tallies = {name: Tally() for name in targets}
    left = {name: seeds(name) for name in targets}
    while left and going_on(tallies):
        name = min(left, key=lambda n: tallies[n].seconds / shares.get(n, 1))
        seed = next(left[name], None)
        if seed is None:
            del left[name]
            continue
        tally, started = tallies[name], time.process_time()
        failure = attack(name, targets[name], seed, fixed, **machine)
        tally.cases += 1
        tally.seconds += time.process_time() - started
        if failure is not None:
            tally.failures.append(failure)
            report(failure)
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    rows = [("function", "cases", "CPU s", "failures")]
    rows += [
        (name, str(t.cases), f"{t.seconds:.1f}", str(len(t.failures)))
        for name, t in tallies.items()
    ]
    total = (sum(t.cases for t in tallies.values()), sum(t.seconds for t in tallies.values()))
    failures = sum(len(t.failures) for t in tallies.values())
    rows.append(("all", str(total[0]), f"{total[1]:.1f}", str(failures)))
    return "\n".join(f"{a:32}{b:>9}{c:>9}{d:>10}" for a, b, c, d in rows)


def matching(targets: dict[str, Target], names: Iterable[str]) -> dict[str, Target]:
    """Those that begin with one of the names; all if there are none."""
    names = tuple(names)
    found = {n: t for n, t in targets.items() if not names or n.startswith(names)}
    if not found:
        sys.exit(f"no function begins with {', '.join(names)}; there are {', '.join(targets)}")
    return found
