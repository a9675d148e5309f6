"""Goldens: records of what the host does, which a change that moves code leaves as they are.

    python -m tests.goldens --check                          all of them, 4 minutes of a CPU
    python -m tests.goldens --check launches/gdn refusals    keys that begin so, or fit a pattern
    python -m tests.goldens --show "launches/gdn/gdn-fwd-16x32-8192x1-model-h0"
    python -m tests.goldens --write launches                 after a change that is meant

    launches    what the driver is given by every workload: launches, fills, copies, waits
    planners    plans of random batches
    refusals    what public functions say to wrong arguments

`--check` prints differences and exits with 1 if there are any. `--show` prints what the code does
now, without a comparison; `xzcat tests/goldens/launches.txt.xz` has what was recorded. What kernels
are is recorded in runtime/digests.json: `python -m qla_kernels digests`. Nothing depends on a GPU,
on the machine, or on PYTHONHASHSEED. `launches` needs a C compiler.
"""

import argparse
import difflib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tests.goldens import store
from tests.native import standin

PARTS = "launches", "planners", "refusals"
SHOWN = 60  # lines of a difference


def computed(part: str, patterns: Sequence[str], full: bool = False) -> dict[str, str]:
    """Returns the texts of a part as they are now."""
    command = [sys.executable, "-m", f"tests.goldens.{part}", *patterns]
    if full and part == "planners":
        command.insert(3, "full")
    env = standin.environment(standin.built()) if part == "launches" else None
    done = subprocess.run(command, env=env, cwd=standin.ROOT, stdout=subprocess.PIPE, check=True)
    return store.parsed(done.stdout.decode())


def differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yields a text for each key that differs."""
    for key in recorded.keys() | now.keys():
        old, new = recorded.get(key, ""), now.get(key, "")
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{key}, recorded", "now", n=0, lineterm=""
            )
            yield "\n".join(islice(lines, SHOWN))


def check(part: str, patterns: Sequence[str]) -> list[str]:
    """Returns differences from what is recorded."""
    recorded = {k: x for k, x in store.read(part).items() if store.chosen(k, patterns)}
    if not recorded:
        return [f"{part}: nothing is recorded for {' '.join(patterns) or part}"]
    return sorted(differences(recorded, computed(part, patterns)))


def write(part: str, patterns: Sequence[str]) -> None:
    kept = store.read(part) if patterns else {}
    store.write(part, kept | computed(part, patterns))


def patterns_of(keys: Sequence[str]) -> dict[str, list[str]]:
    """Returns the patterns of each part among keys such as launches/gdn; all parts if no keys."""
    found: dict[str, list[str]] = {}
    for part, _, pattern in (key.partition("/") for key in keys or PARTS):
        if part not in PARTS:
            raise SystemExit(f"{part} is none of {', '.join(PARTS)}")
        found.setdefault(part, []).extend([pattern] if pattern else [])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.goldens", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "write", "show"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("keys", nargs="*", help="PART, or PART/PATTERN")
    asked = parser.parse_args()
    found: list[str] = []
    for part, patterns in patterns_of(asked.keys).items():
        if asked.write:
            write(part, patterns)
        elif asked.show:
            store.printed(computed(part, patterns, full=True).items())
        else:
            differ = check(part, patterns)
            print(*differ, f"{part}: {len(differ)} differ", sep="\n", flush=True)
            found += differ
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
