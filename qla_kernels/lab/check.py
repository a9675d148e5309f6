"""Checks an edited kernel: against its schedule, in the emulator, and on a Hopper GPU.

    python -m qla_kernels check gdn.fused_fwd                              its first variant
    python -m qla_kernels check gdn.fused_fwd --variant bf16-k128-v64      another one
    python -m qla_kernels check gdn.fused_fwd --all                        every variant

Inspection and emulation run at the same time and need no GPU. Of the emulated tests that launch the
kernel, its cases and those of fewest seconds run first, until one fails or the budget is spent;
tests that are left out are named. The cases are in lab/selftest; the emulated tests are in
the repository and not in the wheel. The exit status is 1 if something that ran failed.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from qla_kernels.lab import command_line
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported, need

ROOT = Path(__file__).resolve().parents[2]
EMULATED = ROOT / "tests" / "emulated"
NO_TESTS = 5  # pytest's exit status when nothing was selected
BUDGET = 100  # CPU seconds of emulated tests
LAUNCH = "30"  # CPU seconds that an emulated launch may take: an endless loop is a mistake to show


class Outcome(NamedTuple):
    what: str
    status: int | None  # of the process; None: did not run
    seconds: float
    said: str

    def __str__(self) -> str:
        result = "NOT RUN" if self.status is None else "FAILED" if self.status else "ok"
        return f"{result:8}{self.what}, {self.seconds:.0f} s"


def check(kernel: str, variant: str, budget: float = BUDGET) -> list[Outcome]:
    """Runs inspection, emulated tests and self-test at the same time; returns their outcomes.

    `variant` is an id, or "" for all variants; `budget` is the CPU seconds of emulated tests.
    """
    inspect = [sys.executable, "-m", "qla_kernels", "inspect", kernel, "--exact", variant]
    selftest = [sys.executable, "-m", "qla_kernels", "selftest", kernel, variant]
    with ThreadPoolExecutor() as pool:
        outcomes = [
            pool.submit(_ran, f"inspect {kernel} {variant}".strip(), inspect),
            pool.submit(emulated, kernel, variant, budget),
            pool.submit(_on_a_gpu, f"selftest {kernel} {variant}".strip(), selftest),
        ]
        return [outcome.result() for outcome in outcomes]


def emulated(kernel: str, variant: str, budget: float = BUDGET) -> Outcome:
    """Runs the emulated tests alone."""
    wanted = [f"--kernel={kernel}", *([f"--variant={variant}"] if variant else [])]
    what = f"pytest tests/emulated {' '.join(wanted)}"
    if not EMULATED.exists():
        return Outcome(what, None, 0, f"no {EMULATED}: clone the repository to run them")
    options = ["-qx", "--tb=short", "-rfE", "-p", "no:cacheprovider", f"--budget={budget:g}"]
    outcome = _ran(what, [sys.executable, "-m", "pytest", *options, str(EMULATED), *wanted])
    if left := re.findall(r"^LEFT OUT (.*)$", outcome.said, re.MULTILINE):
        outcome = outcome._replace(what=f"{what}, {len(left)} tests left out")
    if outcome.status == NO_TESTS:
        return outcome._replace(status=None, said="no emulated test has this variant; try --all")
    return outcome


def _on_a_gpu(what: str, command: list[str]) -> Outcome:
    outcome = _ran(what, command)
    skipped = any(line.startswith("skip") for line in outcome.said.splitlines())
    return outcome._replace(status=None) if skipped else outcome


def _ran(what: str, command: list[str]) -> Outcome:
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"EMU_TIMEOUT": LAUNCH} | os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Outcome(what, done.returncode, time.monotonic() - started, done.stdout)


def chosen(kernel: str, variant: str, every: bool) -> str:
    """Returns the id of the variant to check, "" for all; ValueError if it is unknown."""
    kernels = [k for k in jit.kernel_modules() if str(k) == kernel]
    if not kernels:
        known = ", ".join(map(".".join, jit.kernel_names()))
        raise ValueError(need("check", f"no kernel {kernel!r}", f"one of {known}", "choose one"))
    ids = [jit.variant_id(v) for v in kernels[0].module.VARIANTS]
    if variant and variant not in ids:
        raise ValueError(need("check", f"no variant {variant!r}", f"one of {ids}", "choose one"))
    return "" if every else variant or ids[0]


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("check", __doc__)
    parser.add_argument("kernel", help="family.kernel")
    parser.add_argument("--variant", default="", metavar="ID", help="default: the first one")
    parser.add_argument("--all", action="store_true", help="every variant")
    said = f"of CPU time of emulated tests; default: {BUDGET}"
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help=said)
    options = parser.parse_args(arguments)
    try:
        variant = chosen(options.kernel, options.variant, options.all)
    except (Unsupported, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    outcomes = check(options.kernel, variant, options.budget)
    sys.stdout.writelines(f"--- {outcome.what}\n{outcome.said}\n" for outcome in outcomes)
    sys.stdout.writelines(f"{outcome}\n" for outcome in outcomes)
    return 1 if any(outcome.status for outcome in outcomes) else 0
