"""What the records say about one sequence over several GPUs: ours beside FLA's, eager calls."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..gdn.ranks import DIRECTIONS, KINDS
from ..harness.records import Row, Run
from . import tables
from .names import gpu
from .select import Digests, Section, on_a_gpu
from .texts import SEVERAL_GPUS


class Line(NamedTuple):
    """A shape in a layout on so many GPUs: both directions, of the newest record that has it."""

    run: Run
    rows: dict[str, Row]  # by kind


def lines(runs: Sequence[Run]) -> list[Line]:
    """Of every kind of GPU; alike shapes stand together."""
    found: dict[tuple[str, ...], Line] = {}
    for run in reversed(on_a_gpu(runs, "gdn")):
        of_run: dict[tuple[str, ...], Line] = {}
        for row in run.rows:
            if row.kind in KINDS.values() and row.time_ms("ours", eager=True):
                key = gpu(run), row.heads, row.what, row.layout
                of_run.setdefault(key, Line(run, {})).rows[row.kind] = row
        found = {**of_run, **found}
    return [line for _, line in sorted(found.items(), key=lambda x: (x[0][:3], _split(x[0][3])))]


def _split(layout: str) -> tuple[int, int, str]:
    """Returns tokens, GPUs, and the layout's own name."""
    tokens, world, name = re.findall(r"(\d+)x1 over (\d+), (\w+)", layout)[0]
    return int(tokens), int(world), name


def several_gpus(runs: Sequence[Run], digests: Digests) -> list[str]:
    """A table; nothing without a record."""
    body = []
    for run, rows in lines(runs):
        row = next(iter(rows.values()))
        tokens, world, split = _split(row.layout)
        cells, alone = list[str](), list[str]()
        for kind in map(KINDS.__getitem__, DIRECTIONS):
            cells += _times(run, rows.get(kind))
            alone.append(_python(rows.get(kind)))
        stale = "" if run.current(digests) else ", stale"
        when = f"{world} {gpu(run)}, {run.date[:10]}{stale}"
        body.append([f"{tokens} tokens, {_heads(row)}", split, when, *cells, " / ".join(alone)])
    header = ["one sequence", "layout", "GPUs, record"]
    for said in ("forward", "forward + backward"):
        header += [f"{said}, ms: ours / FLA", "faster"]
    table = tables.markdown([*header, "Python alone, ms"], body, left=3)
    return [SEVERAL_GPUS, table] if body else []


def _heads(row: Row) -> str:
    """`30/30 heads of 96/192, model gates`; what most rows have goes without saying."""
    sizes = re.search(r", K (\d+), V (\d+)", row.what)
    gates = row.what.partition(",")[0]
    said = f"{row.heads} heads" + (f" of {sizes[1]}/{sizes[2]}" if sizes else "")
    return said if gates == "published gates" else f"{said}, {gates}"


def _times(run: Run, row: Row | None) -> tuple[str, str]:
    if row is None:
        return "–", "–"
    rival = tables.best_rival(row, tables.our_names(run), eager=True)
    pair = (row.time_ms("ours", eager=True), rival and rival[1])
    ratio = tables.ratio(row, tables.our_names(run), eager=True)
    return " / ".join(map(tables.number, pair)), tables.marked(ratio)


def _python(row: Row | None) -> str:
    result = row and row.result("ours")
    return tables.number(result.host_ms if result else None)


def records_of(runs: Sequence[Run]) -> list[Run]:
    """The records that the table is of, each once."""
    return list({run.id: run for run, _ in lines(runs)}.values())


def sections(runs: Sequence[Run]) -> list[Section]:
    """The table's rows by record and kind, among which slower ones are looked for."""
    found: dict[tuple[str, str], Section] = {}
    for run, rows in lines(runs):
        for kind, row in rows.items():
            section = Section(", one sequence", kind, run, [])
            found.setdefault((run.id, kind), section).rows.append(row)
    return list(found.values())
