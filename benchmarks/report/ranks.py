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

LAYOUTS = ("contiguous", "zigzag")


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
    """A table, with both layouts of a shape in one line; nothing without a record."""
    shapes = dict[tuple[str, str], dict[str, Line]]()
    for line in lines(runs):
        run, rows = line
        row = next(iter(rows.values()))
        tokens, world, layout = _split(row.layout)
        stale = "" if run.current(digests) else ", stale"
        when = f"{world} {gpu(run)}, {run.date[:10]}{stale}"
        shapes.setdefault((f"{tokens} tokens, {_heads(row)}", when), {})[layout] = line
    header, body = ["one sequence", "GPUs, record"], []
    for said in ("forward", "forward + backward"):
        header += [f"{said}, ms", "Python alone", "FLA, times as long: contiguous / zigzag"]
    for shape, found in shapes.items():
        cells = list[str]()
        for kind in map(KINDS.__getitem__, DIRECTIONS):
            each = [_times(found.get(layout), kind) for layout in LAYOUTS]
            cells += [" / ".join(of_both) for of_both in zip(*each, strict=True)]
        body.append([*shape, *cells])
    table = tables.markdown(header, body, left=2)
    return [SEVERAL_GPUS, table] if body else []


def _heads(row: Row) -> str:
    """`30/30 heads of 96/192, model gates`; what most rows have goes without saying."""
    sizes = re.search(r", K (\d+), V (\d+)", row.what)
    gates = row.what.partition(",")[0]
    said = f"{row.heads} heads" + (f" of {sizes[1]}/{sizes[2]}" if sizes else "")
    return said if gates == "published gates" else f"{said}, {gates}"


def _times(line: Line | None, kind: str) -> tuple[str, str, str]:
    """Ours, the host's share of it, and the rival's over ours."""
    row = line and line.rows.get(kind)
    if line is None or row is None:
        return "–", "–", "–"
    mine, result = row.time_ms("ours", eager=True), row.result("ours")
    ratio = tables.ratio(row, tables.our_names(line.run), eager=True)
    host = result.host_ms if result else None
    return tables.number(mine), tables.number(host), tables.marked(ratio)


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
