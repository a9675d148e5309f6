"""Prints the records of benchmarks/results, and fills the tables of README.md and docs.

    python -m benchmarks.show                     a list of all records
    python -m benchmarks.show gdn H100 short      records of a family, a GPU, a set, a date, an id
    python -m benchmarks.show out/gdn.json        the record in a file of --out
    python -m benchmarks.show --newest gdn        of each row the newest record that has a rival
    python -m benchmarks.show --write             fills the marked tables, and draws the figure
    python -m benchmarks.show --check             exit 1 if they are not what the records say

Every word of FILTER has to match; an id may be its last letters. --full prints more than a few.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from qla_kernels.runtime.digests import recorded

from . import chart, tables
from .families import sets_of
from .harness import records
from .harness.records import ROOT, Run

README, PERFORMANCE = Path("README.md"), Path("docs/performance.md")
SUMMARY = Path("docs/figures/summary.svg")
CLAIMS = Path(__file__).with_name("claims.jsonl")  # the rows of the front page


class Claim(NamedTuple):
    """A row of the front page: what it is, its row of the records, and a rival, else the best."""

    operation: str
    shape: str
    row: str
    rival: str = ""
    eager: bool = False  # as training calls it
    figure: bool = False


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.show", None, __doc__, formatter_class=plain)
    add = parser.add_argument
    add("filter", nargs="*", metavar="FILTER", help="family, set, GPU, date, id, or a file")
    add("--full", action="store_true", help="print all records that match in full")
    add("--newest", action="store_true", help="print tables of docs/performance.md")
    add("--write", action="store_true", help="fill the marked tables, draw the figure")
    add("--check", action="store_true", help="compare them with the records")
    options = parser.parse_args(arguments)
    try:
        if options.write or options.check:
            return _update(pages(records.load(), root), options.check)
        if options.newest:
            names = [x for x in tables.TABLES if not options.filter or x in options.filter]
            said = [f"## {name}\n\n{tables.family(records.load(), name)}" for name in names]
        else:
            runs = matching(options.filter)
            full = options.full or (options.filter and len(runs) <= 3)
            said = [tables.page(run) for run in runs] if full else [listed(runs)]
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(said))
    return 0


def matching(words: Sequence[str]) -> list[Run]:
    """The records that all words match, newest last. Raises ValueError if none does."""
    if any(word.endswith(".json") or "/" in word for word in words):
        return [records.read(Path(word)) for word in words]
    found = [run for run in records.load() if all(_matches(run, word.lower()) for word in words)]
    if not found:
        need = "a family, set, GPU, date or id of `python -m benchmarks.show`, or a file of --out"
        raise ValueError(f"{' '.join(words)}: no record matches; need {need}")
    return found


def _matches(run: Run, word: str) -> bool:
    names = {run.family, *sets_of(run), *map(tables.table_of, run.rows)}
    starts = run.date.startswith(word) or word in run.device.lower()
    return word in names or starts or (len(word) > 3 and run.id.lower().endswith(word))


def listed(runs: Sequence[Run]) -> str:
    """A line for each record."""
    digests, body = recorded(), []
    for run in runs:
        both = [[tables.ratio(run, row, eager) for eager in (False, True)] for row in run.rows]
        ratios = [x for graph, eager in both if (x := graph or eager)]
        timed = {r.implementation for x in run.rows for r in x.results if r.status == records.OK}
        others = [run.labels[n] for n in run.labels if n in timed and not n.startswith("ours")]
        state = "current" if run.current(digests) else "older" if run.kernels else "not named"
        sets, mean = ", ".join(sets_of(run)), f"{tables.mean(ratios):.2f}" if ratios else "–"
        known = run.id, run.device, run.date[:10], sets, ", ".join(others), state
        body.append([*known, str(len(run.rows)), mean])
    header = ["record", "device", "date", "sets", "rivals", "kernels", "rows", "mean rival / ours"]
    return tables.markdown(header, body, left=6)


def _update(found: dict[Path, str], check: bool) -> int:
    stale = [path for path, x in found.items() if not path.exists() or path.read_text() != x]
    for path in stale:
        if check:
            print(f"{path}: not what the records say; --write corrects it", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found[path])
            print(f"wrote {path}")
    return int(check and bool(stale))


def pages(runs: Sequence[Run], root: Path) -> dict[Path, str]:
    """What each file with marked tables has to contain. Raises ValueError if a marker lacks."""
    readme = between_markers(README, (root / README).read_text(), "results", results(runs))
    text = (root / PERFORMANCE).read_text()
    for table in tables.TABLES:
        if body := tables.family(runs, table):
            text = between_markers(PERFORMANCE, text, table, body)
    return {root / README: readme, root / PERFORMANCE: text, root / SUMMARY: summary(runs)}


def between_markers(path: Path, text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of that name replaced."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, start, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise ValueError(f"{path}: no table {name}; need {first} and {last} around it; add both")
    return f"{before}{first}\n{body}\n{last}{after}"


def claimed(runs: Sequence[Run]) -> Iterator[tuple[Claim, tables.Pair, float, float]]:
    """Each claim with its newest times. Raises ValueError if no record has one."""
    for claim in [Claim(**json.loads(line)) for line in CLAIMS.read_text().splitlines()]:
        for run in reversed(runs):
            rows = (row for row in tables.with_sums(run) if row.name == claim.row)
            pairs = [pair for row in rows for pair in tables.pairs_of(run, row)]
            if found := [pair for pair in pairs if claim.rival in ("", pair.rival)]:
                pair = min(found, key=lambda pair: pair.theirs)
                times = (claim.eager and pair.eager) or (pair.ours, pair.theirs)
                yield claim, pair, *times
                break
        else:
            rival = claim.rival or "a rival"
            raise ValueError(f"no record of {claim.row} beside {rival}; need one")


def results(runs: Sequence[Run]) -> str:
    """The table of the front page, and where its times are from."""
    rows, dates = [], defaultdict(list)
    for claim, pair, ours, theirs in claimed(runs):
        times = tables.number(ours), pair.rival, tables.number(theirs), tables.marked(theirs / ours)
        rows.append([claim.operation, claim.shape, *times])
        dates[tables.gpu(pair.run)].append(pair.run.date[:10])
    header = ["operation", "model, shape", "ours, ms", "rival", "its ms", "ratio"]
    table = [f"| {' | '.join(x)} |" for x in (header, ["---"] * 2 + ["---:"] * 4, *rows)]
    measured = [f"{name}, {min(days)} to {max(days)}" for name, days in dates.items()]
    return "\n".join([*table, "", f"{'; '.join(measured)}."])


def summary(runs: Sequence[Run]) -> str:
    """The figure of the front page: ours against a rival, in the order of the claims."""
    groups, dates, gpus = [], [], []
    for claim, pair, ours, theirs in claimed(runs):
        if claim.figure:
            rival = f"{pair.rival} {tables.number(theirs)} ms", theirs, False
            mine = f"ours {tables.number(ours)} ms", ours, True
            groups.append(chart.Group(claim.operation, f"{theirs / ours:.3g}x", [rival, mine]))
            dates.append(pair.run.date[:10])
            gpus.append(tables.gpu(pair.run))
    caption = f"{', '.join(sorted({*gpus}))}, {min(dates)} to {max(dates)}"
    return chart.svg("Time: shorter is faster", caption, groups)


if __name__ == "__main__":
    raise SystemExit(main())
