"""Attack the public functions for as long as asked.

    python -m tests.fuzz --minutes 120               all functions, which share the time
    python -m tests.fuzz gdn --count 500             500 cases of each function of a family
    python -m tests.fuzz gdn.chunk --seed 7 --count 1 --set dtype=torch.float64
    python -m tests.fuzz --wrong                     wrong arguments, and what happens
    python -m tests.fuzz --ranks --minutes 10        context parallelism and rings, over gloo
    python -m tests.fuzz gdn --emulated --count 5    the generated sm_90a code, on CPU tensors
    python -m tests.fuzz --device cuda --minutes 10  the kernels on a GPU

Prints each failure with its seed, its choices and simpler ones that fail, too, and counts at the
end. Exits with 1 if anything failed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.fuzz import session, wrong
from tests.fuzz.session import Failure, Tally
from tests.fuzz.targets import ON_KERNELS, SHARES, TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("functions", nargs="*", help="names, or what they begin with; all if none")
    parser.add_argument("--seed", type=int, help="of the first case; one of the clock if not given")
    parser.add_argument("--count", type=int, help="cases of each function")
    parser.add_argument("--minutes", type=float, help="of all functions together")
    parser.add_argument("--set", action="append", default=[], metavar="CHOICE=VALUE")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--remember", action="store_true", help="with --wrong: write known.txt")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.wrong:
        return wrong_arguments(asked)
    first = int(time.time()) % 10**6 * 1000 if asked.seed is None else asked.seed
    print(f"seeds from {first}", flush=True)
    if asked.ranks:
        from tests.fuzz import launch_ranks

        return launch_ranks.session(first, asked.count, asked.minutes, asked.functions)
    kernels = asked.emulated or asked.device != "cpu"
    machine = {"kernels": kernels, "device": asked.device}
    if asked.emulated:
        from tests.fuzz import emulated

        emulated.install()
    targets = session.matching(TARGETS, asked.functions)
    if kernels:
        targets = {n: t for n, t in targets.items() if n in ON_KERNELS}
    fixed = dict(choice.split("=", 1) for choice in asked.set)
    end = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    count = 1 if asked.count is None and end is None else asked.count

    def seeds(_: str) -> Iterator[int]:
        return iter(range(first, first + count)) if count else itertools.count(first)

    def going_on(_: dict[str, Tally]) -> bool:
        return end is None or time.monotonic() < end

    def report(failure: Failure) -> None:
        failure.smaller = session.smaller(
            failure.target, targets[failure.target], failure, **machine
        )
        trace = failure.trace if "AssertionError" not in failure.error else ""
        print(f"{failure}\n{trace}", flush=True)

    tallies = session.run(targets, seeds, going_on, fixed, report, SHARES, **machine)
    print(session.table(tallies))
    return int(any(tally.failures for tally in tallies.values()))


def wrong_arguments(asked: Any) -> int:
    found: dict[str, str] = {}
    targets = session.matching(TARGETS, asked.functions)
    for name, target in targets.items():
        seeds = wrong.SEEDS if asked.seed is None else range(asked.seed, asked.seed + 1)
        found |= wrong.problems(name, target, seeds)
    for case, what in found.items():
        print(f"{case}: {what}")
    known = wrong.known()
    if asked.remember:
        others = {case for case in known if case.partition("(")[0] not in targets}
        wrong.remember([*found, *others])
    new = found.keys() - known
    print(f"{len(found)} wrong arguments are not refused clearly; {len(new)} are not in known.txt")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
