"""Times this package's operations against whatever rivals are installed.

    python -m benchmarks.sm90                        gated delta net, all default workloads
    python -m benchmarks.sm90 gdn --quick --plot     the anchor rows; a table and figures in out/
    python -m benchmarks.sm90 gdn --set backward,short --impl ours,flash_qla --save
    python -m benchmarks.sm90 gdn --set serving --quick   what engines call, on pools of states
    python -m benchmarks.sm90 model                       layers of transformers; --set fla: FLA's
    python -m benchmarks.sm90 gdn --quick --against H100  beside the newest times on record

Shapes of your own, in any family:

    python -m benchmarks.sm90 gdn --heads 16/32 --lengths 4096x2,32768x1 --head-dim 64
    python -m benchmarks.sm90 gdn --heads 8/24 --lengths 1x100 --direction decode
    python -m benchmarks.sm90 dualkv --heads 8/32 --lengths 16x4096+512
    python -m benchmarks.sm90 sparse_ring --lengths 128k --density 0.05 --run 4
    python -m benchmarks.sm90 conv --heads 16/32 --lengths 4096x8          its channels
    python -m benchmarks.sm90 hybrid --lengths 8x16384+2048                a block of four layers

Heads are key heads / value heads of a gated delta net, key-value heads / query heads of attention.
Lengths are LENGTHxCOUNT: 4096x2 is two sequences of 4096 tokens, 1x64 is 64 of one, 8192 is one of
8192, and 6144+2048 is a pack of two; commas separate workloads. In dualkv, conv and hybrid
16x4096+512 is 16 responses of 512 tokens to a prompt of 4096, and `4 of 16x4096+512` four of these.
Check with `--list`, which says it in words, as does a run.

Without a GPU workloads run through the CPU path, shortened or left out, and the table says which.
Heads stay as they are, and a row of many may take a minute and more. To see it run take few, and
one direction: `--heads 2/6 --lengths 512x2 --direction fwd`.
Results are checked before they are timed; what is wrong, missing or too slow to compile says so in
the table. Installed from a wheel, the package is without benchmarks: run them in a checkout.
`bash scripts/setup_env.sh --rivals` installs most libraries to compare with into .venv, whose
Python is then the one to use: `.venv/bin/python -m benchmarks.sm90`. docs/install.md says what
installs the others.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import chart, show, tables
from .against import compared
from .families import DEFAULT, QUICK, SETS
from .gdn.workloads import Gdn
from .harness import records
from .harness.messages import Machine, Options
from .harness.own_shapes import DIRECTIONS, add_options, asked, names, own_shapes, remark
from .harness.records import Run, write_whole
from .harness.watchdog import LIMITS, Harness
from .harness.without_gpu import WHOLE, for_cpu
from .harness.workload import words
from .rivals import implementations, names_for


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    plain, program = argparse.RawDescriptionHelpFormatter, "python -m benchmarks.sm90"
    usage = f"{program} [FAMILY] [OPTIONS]   --help lists them"
    parser = argparse.ArgumentParser(program, usage, __doc__, formatter_class=plain)
    add = parser.add_argument
    add("family", nargs="?", default="gdn", choices=sorted(SETS))
    add("--quick", action="store_true", help="the anchor rows, fewer repetitions")
    said = "; ".join(f"{family}: {', '.join(sets)}" for family, sets in SETS.items())
    add("--set", metavar="NAME,...", type=names, default=[], help=said)
    add_options(parser)
    add("--only", metavar="PATTERN", help="workloads whose name in --list matches, e.g. '*16x32*'")
    said = "e.g. ours,flash_qla,fla,flashinfer"
    add("--impl", metavar="NAME,...", type=names, default=[], help=said)
    add("--save", action="store_true", help="append the record to benchmarks/results")
    said = "compare with records: words or files as benchmarks.show takes them; exit 1 if a time "
    said += "of ours is above the newest of theirs by more than --threshold"
    add("--against", metavar="FILTER,...", type=names, help=said)
    add("--threshold", type=float, default=3.0, metavar="PERCENT", help="(default: 3)")
    add("--json", action="store_true", help="print the record as JSON instead of a table")
    add("--plot", action="store_true", help="draw figures, SVG in --out")
    said = "folder for FAMILY.md (tables), FAMILY.json (the record), FAMILY.log (what libraries "
    said += "print) and figures; the next run of the family replaces them (default: out)"
    add("--out", type=Path, default=Path("out"), help=said)
    add("--list", action="store_true", help="print the workloads and stop")
    add("--limit", type=float, default=LIMITS["first call"], help="seconds for a first call")
    add("--recover", type=Path, metavar="FILE", help="put on record a run that was cut off")
    options = parser.parse_args(arguments)
    known = SETS[options.family]
    if unknown := sorted(set(options.set) - set(known)):
        parser.error(f"no set {unknown} in {options.family}; {sorted(known)}")
    if set(options.direction) - {*DIRECTIONS}:
        parser.error(f"--direction {','.join(options.direction)}; need {', '.join(DIRECTIONS)}")
    try:
        implementations(options.family, options.impl)
        options.own = own_shapes(options.family, asked(options))
        options.against = show.matching(options.against) if options.against else []
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.own and options.set:
        fix = "--direction decode, for one, decodes shapes of your own"
        parser.error(f"--set with your own shapes; need one of them: a set has its shapes. {fix}")
    if options.own and options.save:
        record = options.out / f"{options.family}.json"
        fix = f"leave it out: your record will be {record}; --out names the folder"
        parser.error(f"--save with your own shapes; need named workloads, as pages have; {fix}")
    return options


def select(options: argparse.Namespace) -> list[Any]:
    """The workloads asked for, each once, in order."""
    if options.own:
        return [w for w in options.own if fnmatch(w.name, options.only or "*")]
    of_family = SETS[options.family]
    sets = options.set or (QUICK if options.quick else DEFAULT)[options.family]
    if options.quick:  # of a set with few rows for that
        sets = [f"{n}-quick" if f"{n}-quick" in of_family else n for n in sets]
    workloads: dict[str, Any] = {}
    for workload in (w for name in sets for w in of_family[name]):
        for wanted in options.direction or [workload.direction]:
            if wanted == "both" and isinstance(workload, Gdn) and workload.direction == "bwd":
                workload = replace(workload, direction="both")
            matches = fnmatch(workload.name, options.only or "*")
            if wanted in (workload.direction, workload.kind) and matches:
                workloads[workload.name] = workload
    return list(workloads.values())


def measure(options: argparse.Namespace, workloads: list[Any]) -> tuple[Run, bool]:
    """The run, and whether it went to the end: Ctrl-C keeps the rows there are."""
    log = options.out / f"{options.family}.log"
    log.unlink(missing_ok=True)
    if options.own and (said := remark(options.family, workloads)):
        say(said)
    settings = Options(rounds=3 if options.quick else 5)
    names, limit = options.impl, {"first_call_limit": options.limit}
    with Harness(options.family, names, settings, log, **limit) as harness:
        notes, machine = [], harness.machine
        if machine.kind == "cpu":
            if options.family == "gdn" and not (options.own or options.set or options.only):
                workloads = [*workloads, *WHOLE]
            workloads, said = for_cpu(workloads, bool(options.own))
            if not workloads:
                raise SystemExit(said)
            notes.append(said)
            say(said)
        run = describe_run(options, machine, notes)
        say(f"running {len(workloads)} workloads on {machine.device}")
        for name, reason in machine.missing.items():
            say(f"missing: {machine.labels.get(name, name)} ({reason})")
        try:
            for number, workload in enumerate(workloads, 1):
                say(f"[{number}/{len(workloads)}] {workload.name}  {words(workload)}")
                rows = (*run.rows, harness.row(workload))
                run = replace(run, rows=rows, kernels=dict(harness.kernels))
                _write_record(options, run)
        except KeyboardInterrupt:
            say(f"stopped after {len(run.rows)} of {len(workloads)} workloads")
    run = replace(run, environment_after=records.device_environment(machine.kind))
    return run, len(run.rows) == len(workloads)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_run(options: argparse.Namespace, machine: Machine, notes: list[str]) -> Run:
    """A run without rows."""
    if options.head_dim:
        K, V = options.head_dim
        notes.append(f"Head size {K}." if K == V else f"Head sizes K {K}, V {V}.")
    return records.begun(
        options.family, machine.kind, records.command_line(), device=machine.device,
        environment=machine.environment, versions=machine.versions, labels=machine.labels,
        missing=machine.missing, ceilings=dataclasses.asdict(machine.ceilings),
        notes=" ".join(notes),
    )  # fmt: skip


def _stop(*_: object) -> None:
    """SIGTERM is Ctrl-C: a time limit from outside keeps the rows there are, too."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _stop)
    options = parse(arguments)
    workloads = select(options)
    if not workloads:
        print(_nothing_matches(options), file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{w.name:44} {words(w)}" for w in workloads))
        return 0
    options.impl = options.impl or names_for(options.family, workloads)
    if options.recover:
        return _recover(options.recover)
    options.out.mkdir(parents=True, exist_ok=True)
    # for the worker: OpenMP threads that spin while they wait cost 10x where cores are shared
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    started = time.monotonic()
    run, complete = measure(options, workloads)
    files = [write_whole(options.out / f"{run.family}.md", tables.page(run))]
    files += [_write_record(options, run), *([records.append(run)] if options.save else [])]
    files += chart.draw(run, options.out) if options.plot else []
    print(json.dumps(dataclasses.asdict(run)) if options.json else "\n" + tables.page(run))
    took = f"in {time.monotonic() - started:.0f} s."
    lines = [f"Ran {len(run.rows)} workloads on {run.device} {took}", *(f"  {x}" for x in files)]
    slower = 0
    if options.against:
        text, slower = compared(run, options.against, options.threshold)
        lines.append(text)
    print("\n".join(lines), file=sys.stderr if options.json else sys.stdout)
    return slower if complete else 130


def _nothing_matches(options: argparse.Namespace) -> str:
    """Names the sets that have what was asked for, if any has."""
    wanted = set(options.direction or ())
    sets = SETS[options.family].items()
    names = [n for n, of_set in sets if any({w.direction, w.kind} & wanted for w in of_set)]
    fix = f"--set {' or '.join(names)}" if names else "another --only"
    return f"no workload matches; need one of those that --list prints; try {fix}"


def _recover(path: Path) -> int:
    """Appends the run that a file of `--out` holds to the records, once, if pages can show it."""
    try:
        run = records.read(path)
    except (OSError, ValueError) as error:
        print(f"--recover {path}: {error}; need the FAMILY.json of --out", file=sys.stderr)
        return 2
    known = {w.name for of_set in SETS[run.family].values() for w in of_set}
    if any(row.name not in known and row.kind not in records.RANKS.values() for row in run.rows):
        got, fix = "a run of your own shapes", "it stays where it is"
    elif any(of.id == run.id for of in records.load()):
        got, fix = f"{run.id}, which is on record", "there is nothing to do"
    else:
        print(records.append(run))
        return 0
    print(f"--recover {path}: {got}; need a new run of named workloads; {fix}", file=sys.stderr)
    return 2


def _write_record(options: argparse.Namespace, run: Run) -> Path:
    """After every row: whatever ends the process, `--recover` finds what was measured."""
    return write_whole(options.out / f"{run.family}.json", json.dumps(dataclasses.asdict(run)))


if __name__ == "__main__":
    raise SystemExit(main())
