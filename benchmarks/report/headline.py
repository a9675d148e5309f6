"""The generated parts of the front page: who gains what, and the table of times."""

from collections.abc import Sequence

from ..harness.records import Row, Run
from . import tables
from .figures import density_of, gain, rival_of, short
from .gains import gains
from .names import shape_of, title_of
from .pictures import shown
from .select import FLAS, OLMO, Digests, headline, lacks_values, names_of, of_sizes
from .slower import in_short
from .spread import spread
from .texts import (
    BEFORE_PROGRAMS,
    CURRENT,
    FAMILIES,
    MORE_LINES,
    OTHER_GPUS,
    STALE,
    TERMS,
    TWO_GROUPS,
)

NOTICE = "<!-- written by `python -m benchmarks.report` from benchmarks/results; do not edit -->"
ON_FRONT = ("gdn-fwd-16x32", "dualkv-step-8x32", "sparse_ring-fwd-8x32")  # figures
# the only lines of a family in the front page's table; of the others it has all
ON_FRONT_ONLY: dict[str, set[tuple[str, str]]] = {
    "gdn": {("both", "16/32")},
    "model": {("layers", "16/32")},
    "conv": set(),
}


def groups(run: Run) -> dict[tuple[str, str], list[Row]]:
    """Rows by direction and heads. Rows without a mask are no example of a mask."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        if run.family != "sparse_ring" or density_of(row):
            found.setdefault((row.kind, row.heads), []).append(row)
    return {key: rows for key, rows in found.items() if _ranked(run, rows)}


def _ranked(run: Run, rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of their ratios of CUDA graphs; if there are none, of eager calls."""
    for eager in (False, True):
        ratios = [(gain(run, row, eager), row) for row in rows]
        if found := [(ratio, row) for ratio, row in ratios if ratio is not None]:
            return [row for _, row in sorted(found, key=lambda pair: pair[0])]
    return []


def compared(run: Run, rows: Sequence[Row]) -> int:
    """How many of them a rival was timed at."""
    return sum(gain(run, row) is not None or gain(run, row, True) is not None for row in rows)


def tabled(run: Run) -> dict[tuple[str, str], list[Row]]:
    """Groups with a rival at half of their shapes: what the table has."""
    return {k: rows for k, rows in groups(run).items() if 2 * compared(run, rows) >= len(rows)}


def times(runs: Sequence[Run], digests: Digests, front: bool = False) -> str:
    """A line for each direction and number of heads: a typical shape, and how all shapes differ.

    `front`: those alone that the front page's gains stand on.
    """
    header = [
        "operation; heads; shapes", "a typical shape", "rival", "graph, ms: ours / rival",
        "faster (worst)", "eager, ms: ours / rival", "faster (worst)",
    ]  # fmt: skip
    body = []
    for family in FAMILIES:
        run = headline(runs, family, digests)
        for (kind, heads), rows in ({} if run is None else tabled(run)).items():
            assert run is not None
            if front and ON_FRONT_ONLY.get(family, {(kind, heads)}) != {(kind, heads)}:
                continue
            unit = "channels" if family == "conv" else "heads"
            shapes = count(rows, compared(run, rows))
            subject = f"{FAMILIES[family]}, {title_of(kind).lower()}; {heads} {unit}; {shapes}"
            body.append([subject, *_line(run, rows)])
        if family == "gdn" and run is not None:
            for sizes in (FLAS,) if front else (OLMO, FLAS):
                for kind, run in of_sizes(runs, *sizes).items():
                    heads = f"{run.rows[0].heads} heads of {sizes[0]}/{sizes[1]}"
                    subject = f"{FAMILIES[family]}, {title_of(kind).lower()}; {heads}"
                    shapes = count(run.rows, compared(run, run.rows))
                    body.append([f"{subject}; {shapes}", *_line(run, run.rows)])
    if not body and not any(headline(runs, family, digests) for family in FAMILIES):
        return "No record on an SM90 GPU yet."
    return tables.markdown(header, body, left=3) if body else ""


def count(rows: Sequence[object], compared: int | None = None) -> str:
    """`7 shapes`, or `1 of 7 shapes` where a rival was timed at so many."""
    some = f"{compared} of " if compared not in (None, len(rows)) else ""
    return f"{some}{len(rows)} shape{'' if len(rows) == 1 else 's'}"


def _line(run: Run, rows: Sequence[Row]) -> list[str]:
    ranked = _ranked(run, rows)
    typical = ranked[(len(ranked) - 1) // 2]
    rivals = [rival_of(run, typical, eager) for eager in (False, True)]
    if _uncaptured(run, typical):  # what was timed is an eager call
        rivals = [None, rivals[0]]
    names = dict.fromkeys(short(rival[0]) for rival in rivals if rival)
    which = " (graph), ".join(names) + (" (eager)" if len(names) > 1 else "")
    cells = [shape_of(typical), which]
    for eager, theirs in zip((False, True), rivals, strict=True):
        way = eager and not _uncaptured(run, typical)
        of_all = spread([gain(run, row, way) for row in rows])
        if of_all is None or theirs is None:
            cells += ["–", "–"]
            continue
        pair = []
        for time in (typical.time_ms("ours", way), theirs[1]):
            whose = [r.implementation for r in typical.results if r.time_ms(way) == time]
            star = tables.star(run, typical, whose[0]) if whose and not eager else ""
            pair.append(tables.number(time) + star)
        cells += [" / ".join(pair), f"{of_all.mean:.2f} x ({tables.marked(of_all.worst)})"]
    return cells


def _uncaptured(run: Run, row: Row) -> bool:
    """Whether ours ran in no graph, as steps of models do."""
    return bool(tables.star(run, row, "ours"))


def choice_of_lines(runs: Sequence[Run], digests: Digests) -> str:
    """What a mask costs besides the attention under it, if it was measured."""
    run = headline(runs, "sparse_ring", digests)
    for row in run.rows if run else ():
        if row.kind == "index" and (took := row.time_ms("ours")) is not None:
            said = (
                f"Choosing the mask of sparse attention takes {tables.number(took)} ms a call more"
            )
            return f"{said} ({shape_of(row)}), which these times leave out."
    return ""


def provenance(runs: Sequence[Run], digests: Digests, front: bool = False) -> str:
    """Which records the numbers are of; and that kernels changed since, if they did."""
    found = {family: headline(runs, family, digests) for family in FAMILIES}
    if front:
        empty = {family for family, lines in ON_FRONT_ONLY.items() if not lines}
        found = {f: run for f, run in found.items() if run and tabled(run) and f not in empty}
    sources: dict[str, list[str]] = {}
    for family, run in found.items():
        if run is not None:
            sources.setdefault(source(run), []).append(FAMILIES[family].lower())
    listed = [f"{', '.join(names)}: {where}" for where, names in sources.items()]
    if found.get("gdn"):
        listed[1:1] = _sources_of_sizes(runs, digests, (FLAS,) if front else (OLMO, FLAS))
    said = "; ".join(listed)
    text = f"Measured on: {said or 'nothing yet'}."
    if front and found.get("gdn"):
        text += f" {OTHER_GPUS}"
    stale = any(run is not None and not run.current(digests) for run in found.values())
    text += f" {STALE if stale else CURRENT}" if sources else ""
    if (gdn := found.get("gdn")) is not None and "our_kernels" not in gdn.environment:
        text += f" {BEFORE_PROGRAMS}"
    return text


def source(run: Run, digests: Digests | None = None) -> str:
    """Where and when; with today's digests also whether its kernels changed since."""
    dirty = " with changes" if run.dirty else ""
    stale = "" if digests is None or run.current(digests) else ", kernels changed since"
    return f"{run.device}, {run.date[:10]}, commit {run.commit[:10]}{dirty}{stale}"


def _sources_of_sizes(
    runs: Sequence[Run], digests: Digests, of: Sequence[tuple[int, int]]
) -> list[str]:
    """The records of other head sizes, and what ran since that digests do not tell."""
    said = dict[str, dict[str, list[str]]]()
    for K, V in of:
        for kind, run in of_sizes(runs, K, V).items():
            since = ", other kernels run since" if kind == "bwd" and lacks_values(run, K, V) else ""
            of_source = said.setdefault(source(run, digests) + since, {})
            of_source.setdefault(f"{K}/{V}", []).append(title_of(kind).lower())
    listed = []
    for where, sizes in said.items():
        each = ", ".join(f"{size} ({' and '.join(kinds)})" for size, kinds in sizes.items())
        listed.append(f"its heads of {each}: {where}")
    return listed


def two_groups(runs: Sequence[Run], digests: Digests) -> str:
    """Of forwards whose mean is of shapes that fill the GPU and of others: both spans."""
    run, filled = headline(runs, "gdn", digests), names_of("gdn", "filled")
    shapes, said = dict[str, None](), []
    for (kind, heads), rows in (groups(run) if run else {}).items():
        assert run is not None
        full = [row for row in rows if row.name in filled]
        few = [row for row in rows if row.name not in filled]
        spans = [spread([gain(run, row) for row in some]) for some in (few, full)]
        pair = [f"{s.worst:.2f} to {s.best:.2f} x" for s in spans if s]
        if kind == "fwd" and len(pair) == 2:
            said.append(f"{pair[0]} and {pair[1]} with {heads} heads")
            shapes |= dict.fromkeys(map(shape_of, full))
    return TWO_GROUPS.format(shapes=", ".join(shapes), spans="; ".join(said)) if said else ""


def front_page(runs: Sequence[Run], digests: Digests) -> dict[str, str]:
    """What stands between each pair of markers of README.md."""
    who, behind = gains(runs, digests)
    table = [NOTICE, behind]
    table += [times(runs, digests, front=True), MORE_LINES, TERMS]
    table += [in_short(runs, digests)]
    table += [choice_of_lines(runs, digests), provenance(runs, digests, front=True)]
    table += shown(runs, digests, "docs/figures/", *ON_FRONT)
    return {"gains": who, "performance": "\n\n".join(filter(None, table))}
