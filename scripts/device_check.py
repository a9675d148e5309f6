"""The steps of device_check.sh, their verdicts, and the record of them.

A step ends as ok, FAILED, TIMEOUT, or "not run" with the reason: some machines have no
compute-sanitizer, or one that refuses to work in a container. Only FAILED and TIMEOUT fail the
check, but the record shows every verdict.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import torch

from benchmarks.harness import records
from qla_kernels.lab import doctor
from qla_kernels.lab.doctor import families
from qla_kernels.runtime import device
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import CAPABILITY

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "out" / "device_check"
CHECKS = records.RESULTS / "checks.jsonl"

OK, FAILED, TIMEOUT, NOT_RUN = "ok", "FAILED", "TIMEOUT", "not run"
TIMED_OUT = (124, 137)  # exit codes of `timeout`: it ended the command, or had to kill it
TOTAL = 585.0  # seconds for all steps
WORKERS = 12  # test processes that share the GPU
PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "triton", "numpy")

Counts = dict[str, int]


@dataclass(frozen=True)
class Step:
    name: str
    limit: float  # seconds
    command: list[str]
    counts: Callable[[str], Counts | None]  # from the output; None when it is not there
    passed: Callable[[Counts], bool] = lambda _: True
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    seconds: float
    counts: Counts
    detail: str = ""

    def __str__(self) -> str:
        counts = ", ".join(f"{value} {name}" for name, value in self.counts.items())
        said = "; ".join(filter(None, (counts, self.detail)))
        return f"{self.name:14} {self.status:8} {self.seconds:5.0f} s  {said}"


def steps(family: str) -> list[Step]:
    python = sys.executable
    tests = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(f"tests/device/test_{family}*.py"))
    junit = LOGS / "tests.xml"
    workers = ["-n", str(min(WORKERS, os.cpu_count() or 1))] if find_spec("xdist") else []
    pytest = [python, "-m", "pytest", "-q", "-m", "hopper", *workers, f"--junitxml={junit}", *tests]
    benchmark = [python, "-m", "benchmarks.sm90", family, "--quick", "--impl", "ours", "--save"]
    rows = LOGS / f"{family}.json"
    return [
        Step("compile", 240, [python, "-m", "qla_kernels", "warmup"], compiled),
        Step("device tests", 300, pytest, lambda _: test_counts(junit), all_passed),
        sanitizer("memcheck", family, r"ERROR SUMMARY: (?P<errors>\d+) error"),
        sanitizer("racecheck", family, r"RACECHECK SUMMARY: (?P<hazards>\d+) hazard"),
        Step(
            "benchmark",
            100,
            [*benchmark, f"--out={os.path.relpath(LOGS, ROOT)}"],
            lambda _: benchmark_counts(rows),
            all_timed,
        ),
    ]


def sanitizer(tool: str, family: str, summary: str) -> Step:
    """The self-test of a family's kernels, in one process: several that share a GPU take longer."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    return Step(
        tool,
        220,
        [*command, sys.executable, "-m", "qla_kernels", "selftest", family],
        lambda output: found_in(output, summary),
        lambda counts: not any(counts.values()),
        # one allocation a tensor: inside torch's pools an access past the end goes unnoticed
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def compiled(output: str) -> Counts | None:
    return found_in(output, r"^(?P<kernels>\d+) (?:prebuilt )?kernels in")


def found_in(output: str, pattern: str) -> Counts | None:
    found = re.search(pattern, output, re.M)
    return found and {name: int(value) for name, value in found.groupdict().items()}


def test_counts(junit: Path) -> Counts | None:
    if not junit.exists():
        return None
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    if suite is None:
        return None
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {
        "passed": int(suite.get("tests", 0)) - bad - skipped, "failed": bad, "skipped": skipped
    }  # fmt: skip


def all_passed(counts: Counts) -> bool:
    """Skipped tests need what this machine lacks, such as a second GPU."""
    return counts["passed"] > 0 and not counts["failed"]


def benchmark_counts(rows: Path) -> Counts | None:
    """How many results have which status."""
    if not rows.exists():
        return None
    run = json.loads(rows.read_text())
    # a plain dict: dataclasses.asdict rebuilds a Counter from pairs, which it then counts
    return dict(Counter(result["status"] for row in run["rows"] for result in row["results"]))


def all_timed(counts: Counts) -> bool:
    bad = (records.WRONG, records.FAILED, records.MEMORY, records.TIME_LIMIT, records.DIED)
    return counts.get(records.OK, 0) > 0 and not any(counts.get(status) for status in bad)


def run(step: Step, remaining: float) -> Outcome:
    tool = step.command[0]
    if shutil.which(tool) is None:
        return Outcome(step.name, NOT_RUN, 0, {}, f"{tool} is not on PATH")
    limit = min(step.limit, remaining)
    if limit < 10:
        return Outcome(step.name, NOT_RUN, 0, {}, "no time left")
    started = time.monotonic()
    log = LOGS / f"{step.name.replace(' ', '_')}.log"
    command = ["timeout", "--kill-after=10", f"{limit:.0f}", *step.command]
    with log.open("w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | step.environment
        ).returncode
    seconds = time.monotonic() - started
    output = log.read_text(errors="replace")
    return Outcome(step.name, *verdict(step, code, output, seconds, log))


def verdict(
    step: Step, code: int, output: str, seconds: float, log: Path
) -> tuple[str, float, Counts, str]:
    counts = step.counts(output) or {}
    where = f"see {log.relative_to(ROOT)}"
    if code in TIMED_OUT:
        return TIMEOUT, seconds, counts, where
    if "Device not supported" in output:  # compute-sanitizer in a container that hides the GPU
        return NOT_RUN, seconds, {}, "compute-sanitizer does not support this machine"
    if code == 0 and counts and step.passed(counts):
        return OK, seconds, counts, ""
    return FAILED, seconds, counts, f"exit code {code}, {where}"


def record(family: str, outcomes: list[Outcome]) -> dict[str, object]:
    commit, dirty = records.git_state()
    date = records.now()
    return {
        "kind": "check",
        "id": f"check-{family}-{date:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        "family": family,
        "date": date.isoformat(timespec="seconds"),
        "fingerprint": doctor.fingerprint(family),
        "device": records.device_name("cuda"),
        "environment": records.device_environment("cuda"),
        "versions": records.package_versions(PACKAGES),
        "commit": commit,
        "dirty": dirty,
        "command": f"bash scripts/device_check.sh {family}",
        "steps": [asdict(outcome) for outcome in outcomes],
    }


def main() -> int:
    parser = argparse.ArgumentParser("bash scripts/device_check.sh", description=__doc__)
    parser.add_argument("family", nargs="?", default="gdn", choices=families())
    options = parser.parse_args()
    if refusal := no_hopper():
        print(refusal, file=sys.stderr)
        return 1
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    deadline = time.monotonic() + TOTAL
    planned, outcomes = steps(options.family), list[Outcome]()
    signal.signal(signal.SIGTERM, _stop)
    try:
        for step in planned:
            print(f"device_check: {step.name} ...", flush=True)
            outcomes.append(run(step, deadline - time.monotonic()))
            print(f"  {outcomes[-1]}", flush=True)
    finally:  # a time limit from outside keeps the steps there are
        for step in planned[len(outcomes) :]:
            outcomes.append(Outcome(step.name, TIMEOUT, 0, {}, "ended from outside"))
        append(record(options.family, outcomes), outcomes)
    return 1 if any(outcome.status in (FAILED, TIMEOUT) for outcome in outcomes) else 0


def _stop(*_: object) -> NoReturn:
    raise SystemExit(1)


def append(entry: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    CHECKS.parent.mkdir(parents=True, exist_ok=True)
    with CHECKS.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"\n{entry['id']}: {entry['device']}, fingerprint {entry['fingerprint']}")
    print("\n".join(map(str, outcomes)))
    print(f"appended to {CHECKS.relative_to(ROOT)}")


def no_hopper() -> str | None:
    got = "torch sees no GPU"
    if device.available():
        capability = device.capability(torch.device("cuda"))
        if capability == CAPABILITY:
            return None
        got = f"{device.name(torch.device('cuda'))} has capability {capability[0]}.{capability[1]}"
    return need("device_check", got, "an SM90 GPU (9.0)", "run it on an H100 or H200")


if __name__ == "__main__":
    sys.exit(main())
