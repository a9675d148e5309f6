"""Change the sources in small ways, and see whether the tests notice.

    python -m tests.mutants                 60 mutants of the usual seed, in minutes to an hour
    python -m tests.mutants --seed 7 --count 100 --jobs 4
    python -m tests.mutants --only programs.c
    python -m tests.mutants --list          names the mutants, and runs none

Mutants are drawn by the seed: half of them of host code, the others of C and of device code. Each
is made in a copy of the checkout, where the tests of its file run (covered.py) until one fails.
One that no test can notice is listed in equivalent.py. Exits with 1 if fewer than 95 % of the
others are caught.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from qla_kernels.runtime.native.launcher import FLAGS
from tests.mutants.covered import AREAS
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.generate import KINDS, Mutant, of_file

ROOT = Path(__file__).resolve().parents[2]
WANTED, NO_TESTS = 0.95, 5
STRICT = ("-fsyntax-only", "-Werror=int-conversion", "-Werror=incompatible-pointer-types")


passing: set[str] = set()  # tests that pass without a mutant


class Result(NamedTuple):
    mutant: Mutant
    verdict: str  # caught, late, survived or equivalent
    by: str  # the test that caught it, or the reason
    seconds: float


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draws an area's share of mutants: a file first, then a kind, then one of them."""
    found = []
    for area, (files, tenths) in AREAS.items():
        draw, seen = random.Random(f"{area} {seed}"), set[Mutant]()
        every = {path: of_file(ROOT, path) for path in (f"qla_kernels/{name}" for name in files)}
        wanted = min(round(count * tenths / 10), sum(map(len, every.values())) // 2)
        while len(seen) < wanted:
            path, kind = draw.choice([*every]), draw.choice(KINDS)
            of_kind = [m for m in every[path] if m.kind == kind]
            if of_kind and (mutant := draw.choice(of_kind)) not in seen and compiles(mutant):
                seen.add(mutant)
                found.append(mutant)
    return found


def compiles(mutant: Mutant) -> bool:
    """Returns whether a C compiler takes it; Python says so when it runs."""
    if not mutant.path.endswith(".c"):
        return True
    import sysconfig

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "qla_kernels" / "runtime" / "native", folder, dirs_exist_ok=True)
        name = Path(folder) / Path(mutant.path).name
        name.write_bytes(mutant.applied(name.read_bytes()))
        flags = *FLAGS, *STRICT, f"-I{sysconfig.get_paths()['include']}"
        command = ["cc", *flags, f"{folder}/launcher.c"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def copied() -> Path:
    """Returns a copy of the checkout as git would have it."""
    folder = Path(tempfile.mkdtemp(prefix="qla-mutants-"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def noticed(folder: Path, test: str, limit: float) -> str:
    """Runs a test in a copy; returns "caught" if it fails, "late" past the limit, else ""."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("QLA_")}
    env |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "EMU_CACHE": str(ROOT / "build" / "emulator")}
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *test.split()]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            return "late"
    assert running.returncode != NO_TESTS, f"{test} has no tests:\n{said}"
    return "caught" if running.returncode else ""


def tried(mutant: Mutant, folders: "Queue[Path]", limit: float) -> Result:
    name, started = mutant.path.removeprefix("qla_kernels/"), time.monotonic()
    data = (ROOT / mutant.path).read_bytes()
    if (reason := EQUIVALENT.get((name, *mutant.lines(data)))) is not None:
        return Result(mutant, "equivalent", reason, 0)
    tests = next(files[name] for files, _ in AREAS.values() if name in files)
    folder, verdict, by = folders.get(), "survived", ""
    try:
        (folder / mutant.path).write_bytes(mutant.applied(data))
        for test in tests:
            if said := noticed(folder, test, limit):
                verdict, by = said, test
                break
    finally:
        (folder / mutant.path).write_bytes(data)
    if by and by not in passing:
        assert not noticed(folder, by, limit), f"{by} fails without a mutant, too"
        passing.add(by)
    folders.put(folder)
    return Result(mutant, verdict, by, time.monotonic() - started)


def shown(result: Result) -> str:
    mutant, verdict, by, seconds = result
    before, after = mutant.lines((ROOT / mutant.path).read_bytes())
    head = f"{verdict:10} {seconds:4.0f} s  {mutant.path}:{mutant.line}  {mutant.kind}  {by}"
    return f"{head}\n    - {before}\n    + {after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="in a mutant's place or line")
    parser.add_argument("--list", action="store_true", help="run none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of one test")
    asked = parser.parse_args()
    every = [Result(mutant, "", "", 0) for mutant in drawn(asked.seed, asked.count)]
    only = asked.only or [""]
    mutants = [r.mutant for r in every if any(text in shown(r) for text in only)]
    if asked.list:
        print(*(shown(result) for result in every if result.mutant in mutants), sep="\n")
        return 0
    folders: Queue[Path] = Queue()
    for _ in range(asked.jobs):
        folders.put(copied())
    results = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for result in pool.map(lambda m: tried(m, folders, asked.limit), mutants):
            results.append(result)
            print(shown(result), flush=True)
    while not folders.empty():
        shutil.rmtree(folders.get())
    counts = {v: sum(r.verdict == v for r in results) for v in ("caught", "late", "equivalent")}
    others = len(results) - counts["equivalent"]
    share = (counts["caught"] + counts["late"]) / max(others, 1)
    print(f"{len(results)} mutants of seed {asked.seed}: {counts}; {share:.1%} of {others} caught")
    return int(share < WANTED)


if __name__ == "__main__":
    sys.exit(main())
