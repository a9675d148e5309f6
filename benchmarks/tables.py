"""Records as Markdown tables: a record in full, and the newest times of each family."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from .attention.workloads import LONG_PROMPTS
from .harness.records import MISSING, NOT_APPLICABLE, OK, Result, Row, Run
from .harness.workload import POOLED

SLOWER = "▼"
UNFINISHED = ("fa4_calls",)  # parts of a result: no rival that anyone can use
TITLES = Path(__file__).with_name("operations.json")  # of kinds of rows, in the order of tables
OPERATIONS: dict[str, str] = json.loads(TITLES.read_text())
TABLES = ("trainer", "model", "gdn", "conv", "dualkv", "hybrid", "sparse_ring", "serving", "ranks")
EACH_RIVAL = ("trainer", "model", "dualkv", "serving")  # a line for each, not for the best alone
MOST = 3  # rows of a group that have a line each


class Pair(NamedTuple):
    """A row's times beside a rival's, ms: of CUDA graphs, else of eager calls; and eager ones."""

    run: Run
    row: Row
    rival: str
    ours: float
    theirs: float
    eager: tuple[float, float] | None


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if not value:
        return "–" if value is None else "0"
    return f"{value:.{max(0, min(4, 2 - math.floor(math.log10(value))))}f}"


def marked(ratio: float | None) -> str:
    """A ratio, with a mark if ours is slower to the two digits that are printed."""
    return "–" if ratio is None else f"{ratio:.2f}" + f" {SLOWER}" * (round(ratio, 2) < 1)


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def gpu(run: Run) -> str:
    return run.device.split()[1] if run.device.startswith("NVIDIA ") else run.device


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    lines = [[*header], [], *map(list, rows)]
    widths = [max(len(line[i]) for line in lines if line) for i in range(len(header))]
    lines[1] = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    form = "| " + " | ".join(f"{{:{'<' if i < left else '>'}{w}}}" for i, w in enumerate(widths))
    return "\n".join(f"{form.format(*line)} |" for line in lines)


def rivals(run: Run, row: Row, eager: bool = False) -> dict[str, float]:
    """The time of each implementation that is not ours; beside a mask also of those without it."""
    found = {r.implementation: r.time_ms(eager) for r in row.results}
    ours = {name for name in found if name.startswith("ours") or name in UNFINISHED}
    known = {name: time for name, time in found.items() if time and name not in ours}
    if re.match(r"[\d.]+% dense", row.what):
        same = row.kind, row.heads, row.tokens, "dense"
        for other in (x for x in run.rows if (x.kind, x.heads, x.tokens, x.what) == same):
            known |= {f"{n}, no mask": time for n, time in rivals(run, other, eager).items()}
    return known


def ratio(run: Run, row: Row, eager: bool = False) -> float | None:
    """The best rival's time over ours: above 1 ours is faster."""
    mine, theirs = row.time_ms("ours", eager), rivals(run, row, eager)
    return min(theirs.values()) / mine if mine and theirs else None


def page(run: Run) -> str:
    """What a record holds: where and how it was measured, and a table of each kind of row."""
    named = {f"missing, {run.labels.get(name, name)}": why for name, why in run.missing.items()}
    facts = {
        "device": run.device, "date": run.date, "commit": run.commit + " + changes" * run.dirty,
        "command": f"`{run.command}`", "versions": _listed(run.versions), "notes": run.notes,
        "before": _listed(run.environment), "after": _listed(run.environment_after),
        "ceilings, a second": _listed(run.ceilings), **named,
    }  # fmt: skip
    parts = [f"## {run.id}", "\n".join(f"- {k}: {x}" for k, x in facts.items() if x)]
    for kind in dict.fromkeys(row.kind for row in run.rows):
        rows = [row for row in run.rows if row.kind == kind]
        parts += [f"### {OPERATIONS.get(kind, kind)}, ms: CUDA graph / eager", _times(run, rows)]
    reasons = Counter(
        (run.labels.get(r.implementation, r.implementation), r.status, r.detail)
        for row in run.rows
        for r in row.results
        if r.detail and r.status != MISSING
    )
    parts.append("\n".join(f"- {n}: {s}: {why} ({i})" for (n, s, why), i in reasons.items()))
    return "\n\n".join(filter(None, parts))


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _times(run: Run, rows: Sequence[Row]) -> str:
    """`*`: not captured in a graph. Floor, memory and first calls are of ours."""
    stated = {r.implementation for x in rows for r in x.results if r.status != NOT_APPLICABLE}
    names = [name for name in run.labels if name in stated - {*run.missing}]
    header = ["heads", "lengths", "inputs", *(run.labels[name] for name in names)]
    header, body = [*header, "rival / ours", "of floor", "MiB", "first call, s", "worst error"], []
    for row in rows:
        ratios = [ratio(run, row, eager) for eager in (False, True)]
        mine = row.result("ours") or Result("ours", MISSING)
        floor = row.floor_ms / mine.p50_ms if mine.p50_ms else 0
        errors = [math.inf if e is None else e for r in row.results for e in r.errors.values()]
        cells = [_cell(run, row.result(name)) for name in names]
        cells += [" / ".join(map(marked, ratios)) if any(ratios) else "–"]
        cells += [f"{floor:.0%}" if floor else "–", f"{(mine.peak_bytes or 0) >> 20}"]
        cells += [number(mine.first_call_s), f"{max(errors):.1e}" if errors else "–"]
        body.append([row.heads, row.layout, row.what, *cells])
    return markdown(header, body, left=3)


def _cell(run: Run, result: Result | None) -> str:
    if result is None or result.status != OK:
        return "–" if result is None or result.status == NOT_APPLICABLE else result.status
    star = "*" * bool(run.device_kind == "cuda" and result.p50_ms and not result.graph)
    host = f" (host {number(result.host_ms)})" if result.host_ms else ""
    eager = f" / {number(result.eager_ms)}" if result.eager_ms else ""
    return number(result.p50_ms) + star + eager + host


def newest(runs: Sequence[Run], table: str) -> list[Pair]:
    """Of each row of a family's table the newest record of a GPU that has a rival."""
    found: dict[str, list[Pair]] = {}
    for run in reversed([run for run in runs if run.device_kind == "cuda"]):
        for row in with_sums(run):
            if table_of(row) == table and row.name not in found and (pairs := pairs_of(run, row)):
                found[row.name] = pairs if table in EACH_RIVAL else pairs[:1]
    return [pair for pairs in found.values() for pair in pairs]


def table_of(row: Row) -> str:
    of_kind = "serving" if row.kind in POOLED else row.kind.partition("_")[0]
    return of_kind if row.family == "gdn" and of_kind in TABLES else row.family


def pairs_of(run: Run, row: Row) -> list[Pair]:
    """The row beside each rival, the fastest first; none if ours or all have no time."""
    graph, eager = (rivals(run, row, way) for way in (False, True))
    mine, called = row.time_ms("ours"), row.time_ms("ours", eager=True)
    found = []
    for name in dict.fromkeys((*graph, *eager)):
        both = (called, eager[name]) if called and name in eager else None
        if pair := (mine, graph[name]) if mine and name in graph else both:
            rival, comma, mask = name.partition(",")
            found.append(Pair(run, row, run.labels[rival] + comma + mask, *pair, both))
    return sorted(found, key=lambda pair: pair.theirs)


def with_sums(run: Run) -> Iterator[Row]:
    """The rows; of shared prompts also forward plus backward, attention of a training step."""
    yield from run.rows
    rows = {row.name: row for row in run.rows if row.family == "dualkv" and row.kind != "layer"}
    for name, row in rows.items():
        backward = rows.get(name.replace("-fwd-", "-bwd-"))
        if backward and backward is not row:
            both = [(a, backward.result(a.implementation)) for a in row.results]
            sums = tuple(_sum(a, b) for a, b in both if b and a.status == b.status == OK)
            yield replace(row, name=name.replace("-fwd-", "-both-"), kind="both", results=sums)


def _sum(a: Result, b: Result) -> Result:
    times = (a.p50_ms, b.p50_ms), (a.eager_ms, b.eager_ms)
    graph, eager = (x + y if x and y else None for x, y in times)
    return replace(a, p50_ms=graph, eager_ms=eager)


def family(runs: Sequence[Run], table: str) -> str:
    """The table of a family, and the records that it is of; empty without any."""
    pairs = sorted(newest(runs, table), key=_order)
    several = len({pair.row.what for pair in pairs}) > 1
    header = ["operation", *["inputs"] * several, "heads", "lengths"]
    left = len(header)
    header += ["ours, ms", "best rival", "its ms", "ratio", "eager ratio", "GPU", "records"]
    body = []
    for _, of in groupby(pairs, key=lambda pair: _group(table, pair)):
        group = [*of]
        for some in [group] if len(group) > MOST else [[pair] for pair in group]:
            row, heads = some[0].row, list(dict.fromkeys(pair.row.heads for pair in some))
            names = dict.fromkeys(pair.rival for pair in some)
            lengths = lengths_of(row) if len(some) == 1 else f"{len(some)} shapes"
            body.append([
                OPERATIONS.get(row.kind, row.kind), *[row.what] * several,
                " to ".join(heads[:: max(1, len(heads) - 1)]), lengths,
                _range([pair.ours for pair in some]), ", ".join(names),
                _range([pair.theirs for pair in some]),
                _ratios([pair.theirs / pair.ours for pair in some]),
                _ratios([pair.eager[1] / pair.eager[0] for pair in some if pair.eager]),
                ", ".join(sorted({gpu(pair.run) for pair in some})),
                ", ".join(sorted({pair.run.id[-4:] for pair in some})),
            ])  # fmt: skip
    return f"{markdown(header, body, left)}\n\n{sources(pairs)}" if body else ""


def _group(table: str, pair: Pair) -> tuple[str, ...]:
    heads = "" if table == "serving" else pair.row.heads
    return pair.row.kind, pair.row.what, heads, pair.rival if table in EACH_RIVAL else ""


def _order(pair: Pair) -> tuple[object, ...]:
    row, heads = pair.row, [int(n) for n in re.findall(r"\d+", pair.row.heads)]
    kind, served = [*OPERATIONS].index(row.kind), table_of(row) == "serving"
    return kind, row.what, *((pair.rival, heads) if served else (heads, pair.rival)), row.tokens


def lengths_of(row: Row) -> str:
    """The row's lengths; those of a batch whose responses are alike in place of its letter."""
    groups = LONG_PROMPTS.get(row.layout)
    return row.layout if not groups else f"{len(groups[0][1])}x{groups[0][0]}+{groups[0][1][0]}"


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((number(min(values)), number(max(values)))))


def _ratios(ratios: Sequence[float]) -> str:
    """The ratio, or the geometric mean and the range."""
    if len(ratios) < 2:
        return marked(ratios[0] if ratios else None)
    return f"{mean(ratios):.2f} ({marked(min(ratios))} to {max(ratios):.2f})"


def sources(pairs: Iterable[Pair]) -> str:
    """Each record's last letters, GPU and date."""
    runs = sorted({pair.run.id[-4:]: pair.run for pair in pairs}.items())
    return f"Records: {', '.join(f'{id} ({gpu(run)}, {run.date[:10]})' for id, run in runs)}."
