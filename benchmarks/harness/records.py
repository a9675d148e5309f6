"""Records: what was measured, where and on which code, one JSON object a line.

A run is a line `{"entry": "run", "id": ...}`, then its rows, `{"entry": "row", "run": id, ...}`.
Files lie in benchmarks/results, one per machine and date, and are only ever appended to. Lines of
another kind (device checks) may stand between and are passed over.
"""

import dataclasses
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from qla_kernels.runtime.native import prebuilt

from .workload import Ceilings, Work

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

OK = "ok"
# why a row has no time, as the tables say it
MISSING, NOT_APPLICABLE, UNSUPPORTED = "missing", "not applicable", "unsupported"
WRONG = "wrong"
RANKS = {"fwd": "ranks_fwd", "both": "ranks_both"}  # kinds of rows over GPUs, by direction
FAILED, MEMORY, TIME_LIMIT, DIED = "failed", "out of memory", "time limit", "died"
# ours with a choice undone, and the day since which eager calls of these undo it
VARIANTS = ("ours_train", "ours_whole", "ours_exact", "ours_kept", "ours_alone")
VARIANTS_ARE_CALLED = "2026-11-25"
SEGMENTS_ARE_KEPT = "2026-11-23T12"  # by FlashQLA for its backward, in graphs too
# what records until 2026-11-27 say of a library that is missing, and the page that has it
WRONG_PAGE = "docs/performance.md says how to install rivals"
RIGHT_PAGE = "docs/install.md#compare-with-other-libraries says what installs it"


@dataclass(frozen=True)
class Result:
    """One implementation on one workload."""

    implementation: str
    status: str
    detail: str = ""
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    graph: bool = False  # replayed from a CUDA graph
    eager_p20_ms: float | None = None  # through the public Python entry point, without a graph
    eager_ms: float | None = None  # p50
    eager_p80_ms: float | None = None
    eager_samples: int = 0
    host_additions: float | None = None  # host time of such a call, in additions of eight floats
    host_ms: float | None = None  # the host's time itself, of calls over several GPUs
    first_call_s: float | None = None  # compilation included where it was not cached
    peak_bytes: int | None = None  # beyond the inputs
    errors: dict[str, float | None] = field(default_factory=dict)  # None: not finite

    def time_ms(self, eager: bool) -> float | None:
        if self.status != OK:
            return None
        return self.eager_ms if eager else self.p50_ms


def rounded(errors: dict[str, float]) -> dict[str, float | None]:
    """As a result has them; what is not finite is None."""
    return {n: float(f"{x:.3g}") if math.isfinite(x) else None for n, x in errors.items()}


@dataclass(frozen=True)
class Row:
    """One workload and everyone's result."""

    name: str
    family: str
    kind: str  # fwd, bwd, both, decode, or the name of a kernel timed alone
    heads: str
    layout: str
    tokens: int
    what: str = ""  # gates, initial state
    flops: float = 0.0
    bytes: float = 0.0
    floor_ms: float = 0.0
    input_sets: int = 1
    results: tuple[Result, ...] = ()

    def result(self, implementation: str) -> Result | None:
        return next((r for r in self.results if r.implementation == implementation), None)

    def time_ms(self, implementation: str, eager: bool = False) -> float | None:
        """The median of graph replays, or of eager calls."""
        found = self.result(implementation)
        return found.time_ms(eager) if found is not None else None


def row_of(
    workload: Any, work: Work, ceilings: Ceilings, results: Iterable[Result], **changes: Any
) -> Row:
    """A workload's row; `changes` are fields that are not as the workload says."""
    fields = {
        "heads": workload.heads_label.replace("x", "/"), "flops": work.flops, "bytes": work.bytes,
        "floor_ms": 1e3 * work.floor_seconds(ceilings), "results": tuple(results),
        **{n: getattr(workload, n) for n in ("name", "family", "kind", "layout", "tokens", "what")},
    }  # fmt: skip
    return Row(**{**fields, **changes})


@dataclass(frozen=True)
class Run:
    """What a run's rows have in common."""

    id: str
    family: str
    date: str
    device: str
    device_kind: str  # cuda or cpu
    environment: dict[str, Any]  # at the start
    environment_after: dict[str, Any]  # and at the end: clocks, power, temperature
    versions: dict[str, str]
    labels: dict[str, str]  # of implementations
    missing: dict[str, str]  # implementations that could not run here, and why
    ceilings: dict[str, Any]
    commit: str
    dirty: bool
    command: str
    kernels: dict[str, str] = field(default_factory=dict)  # digests of those that ran, by label
    rows: tuple[Row, ...] = ()
    notes: str = ""

    def current(self, digests: dict[str, str]) -> bool:
        """Every kernel that ran is, by these digests, generated as it was. On a CPU none ran."""
        known = bool(self.kernels) or self.device_kind == "cpu"
        return known and all(digests.get(name) == of for name, of in self.kernels.items())


def git_state() -> tuple[str, bool]:
    """Commit and whether the working tree differs from it; records themselves do not count."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    status = _output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results"
    )
    return commit or "unknown", bool(status)


def device_environment(kind: str) -> dict[str, Any]:
    """Driver, clocks, power and temperature of the first GPU; how ours run there. Or CPU cores."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    if kind == "cuda":
        fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
        line = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0")
        names = ("driver", "sm_clock", "max_sm_clock", "memory_clock", "power", "temperature")
        found.update(zip(names, (part.strip() for part in line.split(",")), strict=False))
        found["cuda"] = torch.version.cuda
        found["our_kernels"] = _our_kernels()
    else:
        found["cores"] = len(os.sched_getaffinity(0))
    return found


def _our_kernels() -> str:
    """How ours are launched: eager times depend on it."""
    file = prebuilt.in_use()
    if isinstance(file, str):
        return "compiled"
    off = ", QLA_PROGRAMS=0" if os.environ.get("QLA_PROGRAMS") == "0" else ""
    return f"prebuilt by nvcc {file.manifest['set']}{off}"


def device_name(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores"
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def package_versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def begun(family: str, device_kind: str, command: str, **known: Any) -> Run:
    """A run without rows, of this moment and commit; `known` are its other fields."""
    (commit, dirty), date = git_state(), now()
    unknown: dict[str, Any] = {"environment_after": {}, "missing": {}, "ceilings": {}}
    return Run(
        id=f"{family}-{date:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}", family=family,
        date=date.isoformat(timespec="seconds"), device_kind=device_kind, commit=commit,
        dirty=dirty, command=command, **{**unknown, **known},
    )  # fmt: skip


def now() -> datetime:
    return datetime.now(timezone.utc)


def command_line(program: str = "python -m benchmarks.sm90") -> str:
    """Without --out: where this machine keeps files is no part of what was measured."""
    command = " ".join([program, *sys.argv[1:]])
    return re.sub(r" --out[ =]\S+", "", command)


def write_whole(path: Path, text: str) -> Path:
    """In one step: whoever is killed meanwhile leaves what was there before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text + "\n")
    part.replace(path)
    return path


def append(run: Run, folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[\W_]+", "-", run.device.lower()).strip("-")
    path = folder / f"{run.date[:10]}-{slug}.jsonl"
    head = dataclasses.asdict(run)
    rows = head.pop("rows")
    with path.open("a") as file:
        file.write(json.dumps({"entry": "run", **head}) + "\n")
        for row in rows:
            file.write(json.dumps({"entry": "row", "run": run.id, **row}) + "\n")
    return path


def load(folder: Path = RESULTS) -> list[Run]:
    """All runs on record, oldest first."""
    runs: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            values = json.loads(line)
            entry = values.pop("entry", None)
            if entry == "run":
                values.pop("fingerprint", None)  # of source text: records before November 23
                runs[values["id"]] = values
            elif entry == "row":
                rows.setdefault(values.pop("run"), []).append(row_from_json(values))
    found = [Run(**{**values, "rows": tuple(rows.get(id, ()))}) for id, values in runs.items()]
    return sorted(map(as_called, found), key=lambda run: run.date)


def read(path: Path) -> Run:
    """The run of a file of `--out`. Raises ValueError, or OSError, if it holds none."""
    try:
        return run_from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, AttributeError) as error:
        got = f"{path}: it holds no record ({type(error).__name__}: {error})"
        raise ValueError(f"{got}; need one, such as FAMILY.json of --out") from error


def run_from_json(values: dict[str, Any]) -> Run:
    """A run as `--out` has it, in one piece."""
    return Run(**{**values, "rows": tuple(row_from_json(row) for row in values["rows"])})


def row_from_json(values: dict[str, Any]) -> Row:
    # one sequence was 1x8192 in records before November 24, beside 8192x4
    if found := re.fullmatch(r"1x(\d+)", values["layout"]):
        layout = f"{found[1]}x1"
        name = values["name"].replace(f"-{values['layout']}-", f"-{layout}-")
        values = {**values, "name": name, "layout": layout}
    results = tuple(Result(**result) for result in values.pop("results"))
    return Row(**values, results=results)


def as_called(run: Run) -> Run:
    """Mends two names, and leaves out times that are not of what their rows say.

    Of layers, the version of transformers stood in the place of torch's until 2026-11-26. A page
    was named for what installs a rival that does not have it. Of gated delta nets, see `_mended`.
    """
    told = {name: why.replace(WRONG_PAGE, RIGHT_PAGE) for name, why in run.missing.items()}
    run = dataclasses.replace(run, missing=told)
    if run.family == "model" and "transformers" not in run.versions and "torch" in run.versions:
        versions = {"transformers" if n == "torch" else n: v for n, v in run.versions.items()}
        return dataclasses.replace(run, versions=versions)
    if run.family != "gdn" or run.date >= VARIANTS_ARE_CALLED:
        return run
    again = run.date < SEGMENTS_ARE_KEPT and "flash_qla" in run.labels

    def mended(row: Row) -> Row:
        return dataclasses.replace(row, results=tuple(_mended(r, row, again) for r in row.results))

    return dataclasses.replace(run, rows=tuple(map(mended, run.rows)))


def _mended(result: Result, row: Row, again: bool) -> Result:
    """A result without eager times of `VARIANTS`, which were the default's.

    `again`: graphs had FlashQLA's backward without the segments that its public function keeps, so
    that it computed them again. Without the best rival's time a row has no ratio.
    """
    if result.implementation in VARIANTS:
        return dataclasses.replace(
            result, eager_p20_ms=None, eager_ms=None, eager_p80_ms=None, host_additions=None
        )
    if again and row.kind == "bwd" and not result.implementation.startswith("ours"):
        return dataclasses.replace(result, p20_ms=None, p50_ms=None, p80_ms=None, samples=0)
    return result
