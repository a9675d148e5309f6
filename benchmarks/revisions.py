"""Times this package's operations in two checkouts against each other, on one Hopper GPU.

    git worktree add ../before HEAD~3
    python -m benchmarks.revisions ../before gdn:anchors gdn:decode dualkv:long --only '*16x32*'
    python -m benchmarks.revisions ../before gdn --heads 16/32 --lengths 4096x2,32768x1

A family with a set has the set's rows, a family alone the shapes that --heads, --lengths and the
like say, as those of benchmarks.sm90.

A process for each checkout holds the same row; bursts of the two alternate, so that a drift of the
clock meets both alike. Printed are CUDA graphs' times, the ratio before / after and its quartiles
over pairs of bursts; with `--eager` the time of eager calls, and how long the host is busy with
one, in multiples of an addition of eight floats. `--against .` shows the noise.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

Samples = dict[str, list[float]]
PACKAGES = ("qla_kernels", "benchmarks")  # of a checkout


def serve() -> None:
    """The process of one checkout: takes a row or a measure a line, answers in JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    served = Served()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(served, what)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def described(workload: Any) -> tuple[str, str, dict[str, Any]]:
    """Module, class, and the fields that are not as by default: what `made` takes."""
    values = {field: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    changed = {field.name: x for field, x in values.items() if x != field.default}
    return type(workload).__module__, type(workload).__name__, changed


def made(module: str, name: str, fields: dict[str, Any]) -> Any:
    """The workload by this checkout's class, or a TypeError where that lacks a field."""
    kind = getattr(importlib.import_module(module), name)
    return kind(**{field: _tuples(x) for field, x in fields.items()})


def _tuples(x: Any) -> Any:
    """JSON has lists instead."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


class Served:
    """Rows and measures of the checkout that this process imports."""

    def __init__(self) -> None:
        import torch

        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._few = torch.randn(8, device="cuda")

    def row(self, *workload: Any) -> None:
        import torch

        from benchmarks.harness import problems, timing

        self._graphs = self._eager = self._problem = None
        torch.cuda.empty_cache()
        of = made(*workload)
        home = "rivals" if importlib.util.find_spec("benchmarks.rivals") else "harness.adapters"
        known = importlib.import_module(f"benchmarks.{home}")  # the latter of older checkouts
        (ours,) = known.implementations(of.family, ["ours"])
        self._problem = problems.problem_of(of, torch.device("cuda"))
        calls = [ours.prepare(of, inputs) for inputs in self._problem.inputs]
        verdict = self._problem.truth().judge(calls[0].collect(calls[0].run()), self._problem.dtype)
        if verdict.complaint:
            raise ValueError(verdict.complaint)
        self._graphs = timing.GraphTimer([call.run for call in calls])
        self._eager = calls[0].eager and calls[0].eager()

    def graph(self, seconds: float) -> Samples:
        assert self._graphs is not None
        return {"graph": self._graphs.burst(seconds)}

    def eager(self, count: int) -> Samples:
        """Wall time of an eager call among `count`, the host's share, and an addition's."""
        from benchmarks.harness.timing import _in_a_row

        samples: Samples = {}
        for name, run in (("eager", self._eager), ("add", lambda: self._few + 1)):
            if run is not None:
                run()
                wall, host = _in_a_row(run, count)
                samples |= {name: [wall], f"{name} host": [host]}
        return samples


class Checkout:
    """A process that serves the package in a folder."""

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"], cwd=folder, text=True,
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, *message: Any) -> Any:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended: {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def rows(options: argparse.Namespace) -> list[Any]:
    """Workloads of the sets and of the families selected. Raises ValueError; the text says why."""
    from benchmarks.families import SETS
    from benchmarks.harness.own_shapes import asked, own_shapes
    from benchmarks.sm90 import select

    if asked(options).given and all(":" in selection for selection in options.selections):
        raise ValueError("--heads, --lengths or the like of a set; need FAMILY without a set")
    workloads: list[Any] = []
    for selection in options.selections:
        family, _, name = selection.partition(":")
        sets = SETS.get(family, {})
        own = own_shapes(family, asked(options)) if sets and not name else []
        if not own and name not in sets:
            known = f"one of {sorted(sets)}" if sets else f"a family of {sorted(SETS)}"
            raise ValueError(f"{selection}; need FAMILY:SET, or FAMILY and --lengths; {known}")
        more = {"family": family, "set": [name], "own": own, "quick": False}
        workloads += select(argparse.Namespace(**vars(options), **more))
    if not workloads:
        raise ValueError(f"--only {options.only} and --direction leave no workload")
    return workloads


def lacking(*folders: Path) -> str | None:
    """Why nothing can be timed here; None if nothing is in the way."""
    import torch

    for folder in folders:
        if not all((folder / package / "__init__.py").exists() for package in PACKAGES):
            fix = "`git worktree add ../before HEAD~3` makes one"
            return f"{folder} is not a checkout; need a folder with {' and '.join(PACKAGES)}; {fix}"
    if not torch.cuda.is_available():
        return "no GPU; need a Hopper GPU, on which both checkouts are timed; run it there"
    return None


def compare(before: Checkout, after: Checkout, options: argparse.Namespace) -> dict[str, Samples]:
    """Samples of the row that both processes hold, in bursts that alternate."""
    samples: dict[str, Samples] = {"before": {}, "after": {}}
    sides = [("before", before), ("after", after)]
    for i in range(options.rounds):
        for side, checkout in sides if i % 2 else sides[::-1]:
            time.sleep(options.idle)
            burst = checkout.ask("graph", options.burst)
            burst["burst"] = [median(burst["graph"])]
            if options.eager:
                burst |= checkout.ask("eager", options.eager)
            for name, values in burst.items():
                samples[side].setdefault(name, []).extend(values)
    return samples


def ratios(samples: dict[str, Samples]) -> list[float]:
    pairs = zip(samples["before"]["burst"], samples["after"]["burst"], strict=True)
    return [before / after for before, after in pairs]


def line(name: str, samples: dict[str, Samples]) -> str:
    low, middle, high = quantiles(ratios(samples), n=4, method="inclusive")
    p50 = [1e3 * median(side["graph"]) for side in samples.values()]
    said = f"{name:44} {p50[0]:8.4f} {p50[1]:8.4f} {middle:7.4f} [{low:.4f} {high:.4f}]"
    for side in samples.values():
        if "eager" in side:
            wall = [1e3 * x for x in quantiles(side["eager"], n=10, method="inclusive")]
            host, add = (median(side[k]) for k in ("eager host", "add host"))
            said += f" | {wall[1]:.4f} {wall[4]:.4f} {wall[7]:.4f}, host {1e6 * host:.0f} us"
            said += f" = {host / add:.1f}"
    return said


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.harness.own_shapes import add_options

    plain = argparse.RawDescriptionHelpFormatter
    program = "python -m benchmarks.revisions"
    parser = argparse.ArgumentParser(program, None, __doc__, formatter_class=plain)
    add = parser.add_argument
    add("before", type=Path, help="a checkout")
    said = "sets that benchmarks.sm90 --help lists, or families of your own shapes"
    add("selections", nargs="+", metavar="FAMILY[:SET]", help=said)
    add_options(parser)
    add("--against", type=Path, default=Path("."), help="the other checkout (default: .)")
    add("--only", metavar="PATTERN", default="*", help="workloads whose name matches")
    add("--rounds", type=int, default=16, help="pairs of bursts a row")
    add("--burst", type=float, default=0.02, help="seconds")
    add("--idle", type=float, default=0.04, help="seconds before each burst")
    add("--eager", type=int, default=0, metavar="CALLS", help="time so many eager calls, too")
    add("--out", type=Path, help="file for all samples, as JSON")
    options = parser.parse_args(arguments)
    try:
        options.workloads = rows(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return 0
    options = parse(arguments)
    if why := lacking(options.before, options.against):
        raise SystemExit(why)
    before, after = Checkout(options.before), Checkout(options.against)
    everything = {}
    print("row, ms before, after, before / after [quartiles] | eager p20 p50 p80 ms, host, in adds")
    for workload in options.workloads:
        name = workload.name
        try:
            for checkout in (before, after):
                checkout.ask("row", *described(workload))
            everything[name] = compare(before, after, options)
        except RuntimeError as error:
            print(f"{name:44} {error}", flush=True)
            continue
        print(line(name, everything[name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(everything))
    if every := sorted(chain.from_iterable(map(ratios, everything.values()))):
        print(f"{len(everything)} rows; ratios of bursts {every[0]:.4f} to {every[-1]:.4f}")
    return 0 if everything else 1


if __name__ == "__main__":
    sys.exit(main())
