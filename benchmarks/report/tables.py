"""A run as Markdown: ours, the best rival and the ratio, row by row; slower rows are marked."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ..harness.records import MISSING, NOT_APPLICABLE, OK, Result, Row, Run
from .drafts import drafts
from .method import COMPILED
from .names import title_of

SLOWER = "▼"
OTHER_WORK = {("drafts", "ours_step")}  # timed beside a row's, and never its best
UNFINISHED = ("fa4_calls",)  # parts of a result, for comparison: no rival that anyone can use


def best_rival(row: Row, ours: Sequence[str], eager: bool = False) -> tuple[str, float] | None:
    """Name and time of the fastest correct implementation that is not ours."""
    times = [
        (time, r.implementation)
        for r in row.results
        if r.implementation not in (*ours, *UNFINISHED)
        if (time := r.time_ms(eager)) is not None
    ]
    return None if not times else (min(times)[1], min(times)[0])


def ratio(row: Row, ours: Sequence[str], eager: bool = False) -> float | None:
    """Time of the best rival over ours: above 1 we are faster."""
    mine, rival = row.time_ms("ours", eager), best_rival(row, ours, eager)
    return None if mine is None or rival is None else rival[1] / mine


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def our_names(run: Run) -> tuple[str, ...]:
    return tuple(name for name in run.labels if name.startswith("ours"))


def timed(run: Run) -> list[str]:
    """Implementations that this machine has, in order."""
    return [name for name in run.labels if name not in run.missing]


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f}"


def is_slower(ratio: float) -> bool:
    """Whether ours is, to the two digits that are printed."""
    return round(ratio, 2) < 1


def marked(value: float | None) -> str:
    """A ratio, with a mark if ours is slower."""
    if value is None:
        return "–"
    return f"{value:.2f} {SLOWER}" if is_slower(value) else f"{value:.2f}"


def star(run: Run, row: Row, name: str) -> str:
    """A star where launch gaps are in a graph's time, because it was not captured."""
    result, timed = row.result(name), row.time_ms(name) is not None
    return "*" if run.device_kind == "cuda" and result and timed and not result.graph else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def render(cells: Sequence[str]) -> str:
        sized = list(zip(cells, widths, strict=True))
        padded = [c.ljust(w) for c, w in sized[:left]] + [c.rjust(w) for c, w in sized[left:]]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(render, [lines[0], rule, *lines[1:]]))


def page(run: Run) -> str:
    """What the benchmark prints."""
    ceilings = run.ceilings
    rates = f"{ceilings['flops'] / 1e12:.3g} TFLOP/s ({ceilings['matmul']})"
    copy = f"{ceilings['bandwidth'] / 1e9:.0f} GB/s (copy)"
    head = f"{run.device}, record {run.id}. Ceilings of this run: {rates}, {copy}."
    if launched := run.environment.get("our_kernels"):
        head += f" Our kernels: {launched}."
        if run.device_kind == "cuda" and not launched.startswith("prebuilt"):
            head += f" {COMPILED}"
    return "\n\n".join([f"{head} {run.notes}".strip(), summary(run)])


def summary(run: Run) -> str:
    """Milliseconds (medians) of everyone, one table a direction, geometric mean last."""
    parts = []
    unit = "ms, CUDA graph replays / eager calls" if run.device_kind == "cuda" else "ms"
    for kind in dict.fromkeys(row.kind for row in run.rows):
        rows = [row for row in run.rows if row.kind == kind]
        whats = {row.what for row in rows}
        common = f", {rows[0].what}" if len(whats) == 1 else ""
        parts.append(f"{title_of(kind)}{common}; {unit}")
        parts.append(_summary_table(run, rows, with_what=not common))
        if kind in ("both", "layer") or run.family != "gdn":
            parts.append(f"{title_of(kind)}; useful TFLOP/s, and peak MiB beyond the inputs")
            parts.append(_rates_and_memory(run, rows))
    return "\n\n".join(filter(None, [*parts, steps(run), drafts(run), footnotes(run)]))


def _summary_table(run: Run, rows: Sequence[Row], with_what: bool) -> str:
    """A cell has graph and eager time; so have the ratios, and what compares without a mask."""
    ours = our_names(run)
    names = [n for n in timed(run) if any(_worth_a_column(r.result(n)) for r in rows)]
    ways = (False, True) if run.device_kind == "cuda" else (False,)  # whether calls are eager
    dense = [dense_times(rows, ours, eager) for eager in ways]
    said = ["heads", "lengths", "inputs"][: 3 if with_what else 2]
    header = [*said, *(run.labels[n] for n in names), "rival / ours", "of floor"]
    header += ["first call s, ours / rival", *(["dense rival / ours"] if dense[0] else [])]
    body, ratios = [], [[ratio(row, ours, eager) for eager in ways] for row in rows]
    for row, of_row in zip(rows, ratios, strict=True):
        cells = [_cell(run, row, name, names, ways) for name in names]
        subject = [row.heads, row.layout, row.what][: len(said)]
        last = _both(of_row), _floor(row), _first_calls(row, ours)
        body.append([*subject, *cells, *last])
        if dense[0]:
            body[-1].append(_both([dense_ratio(row, *w) for w in zip(dense, ways, strict=True)]))
    counts = [[r for r in of_way if r is not None] for of_way in zip(*ratios, strict=True)]
    if len(counts[0]) > 1:
        mean = [f"geometric mean of {' / '.join(str(len(found)) for found in counts)}"]
        mean += [""] * (len(said) + len(names) - 1)
        mean.append(_both([geometric_mean(found) for found in counts]))
        body.append([*mean, *[""] * (len(header) - len(mean))])
    return markdown(header, body, left=len(said))


def _both(ratios: Iterable[float | None]) -> str:
    """Of graphs and of eager calls."""
    return " / ".join(map(marked, ratios))


def _first_calls(row: Row, ours: Sequence[str]) -> str:
    """Ours and that of the best rival: seconds, compilation included where it was not cached."""
    rival = best_rival(row, ours)
    found = [row.result(name) for name in ("ours", rival[0] if rival else "")]
    times = [None if result is None else result.first_call_s for result in found]
    return " / ".join(_number(time, ".1f") for time in times)


def _rates_and_memory(run: Run, rows: Sequence[Row]) -> str:
    """Operations that the problem has, not those that someone computes."""
    names = [n for n in timed(run) if any(row.time_ms(n) for row in rows)]
    body = []
    for row in rows:
        cells = []
        for name in names:
            time, result = row.time_ms(name), row.result(name)
            peak = None if result is None or result.peak_bytes is None else result.peak_bytes >> 20
            rate = number(None if not time else row.flops / time / 1e9)
            cells.append("–" if not time else f"{rate}, {'–' if peak is None else peak}")
        body.append([row.heads, row.layout, *cells])
    return markdown(["heads", "lengths", *(run.labels[n] for n in names)], body, left=2)


def steps(run: Run) -> str:
    """Shared prompts that have both directions in this run: flash-attn-4's times over ours.

    The sum is a training step's.
    """
    directions: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in run.rows:
        if run.family == "dualkv" and row.kind in ("fwd", "bwd"):
            directions.setdefault((row.heads, row.layout, row.what), {})[row.kind] = row
    found = [
        (pair["fwd"], pair["bwd"])
        for pair in directions.values()
        if len(pair) == 2 and all(row.time_ms("ours") for row in pair.values())
    ]
    rows = [row for pair in found for row in pair]
    known = ("fa4_shared", "fa4_calls", "fa4")
    rivals = [name for name in known if any(row.time_ms(name) for row in rows)]
    if not rivals:
        return ""
    several = len({row.heads for row in rows}) > 1
    header = ["heads", "lengths"] if several else ["lengths"]
    left = len(header)
    for name in rivals:
        header += [f"{run.labels[name]}: forward", "backward", "sum"]
    body = []
    for pair in found:
        cells = [_step_cells(pair, name) for name in rivals]
        subject = [pair[0].heads, pair[0].layout][-left:]
        body.append([*subject, *(c for three in cells for c in three)])
    title = "Forward, backward and their sum; time of flash-attn-4 / ours"
    return "\n\n".join([title, markdown(header, body, left)])


def _step_cells(pair: tuple[Row, Row], rival: str) -> list[str]:
    """Ratios forward, backward and of the sums."""
    ours, theirs = ([row.time_ms(name) or 0.0 for row in pair] for name in ("ours", rival))
    if not all((*ours, *theirs)):
        return ["–"] * 3
    cells = [marked(b / a) for a, b in zip(ours, theirs, strict=True)]
    return [*cells, marked(sum(theirs) / sum(ours))]


def dense_times(
    rows: Sequence[Row], ours: Sequence[str], eager: bool = False
) -> dict[tuple[str, int], float]:
    """By heads and tokens: the best rival's time without the mask that other rows have."""
    found = {
        (row.heads, row.tokens): best_rival(row, ours, eager) for row in rows if row.what == "dense"
    }
    return {key: rival[1] for key, rival in found.items() if rival is not None}


def dense_ratio(row: Row, dense: dict[tuple[str, int], float], eager: bool = False) -> float | None:
    """That time over ours."""
    without, mine = dense.get((row.heads, row.tokens)), row.time_ms("ours", eager)
    return None if without is None or mine is None else without / mine


def _worth_a_column(result: Result | None) -> bool:
    return result is not None and result.status != NOT_APPLICABLE


def _cell(run: Run, row: Row, name: str, names: Sequence[str], ways: Iterable[bool]) -> str:
    """The medians; bold if it is the row's best, with a star if launch gaps are in a graph's."""
    result = row.result(name)
    if result is None:
        return ""
    if result.status != OK:
        return "–" if result.status == NOT_APPLICABLE else result.status
    cells, same = [], [n for n in names if (row.kind, n) not in OTHER_WORK]
    for eager in ways:
        time = result.time_ms(eager)
        best = min((t for n in same if (t := row.time_ms(n, eager)) is not None), default=None)
        is_best = time and time == best and name in same
        said = f"**{number(time)}**" if is_best else number(time)
        cells.append(said if eager else said + star(run, row, name))
    return " / ".join(cells)


def _floor(row: Row) -> str:
    """How near the floor the row's fastest of ours, or else the fastest of all, comes."""
    times = [row.time_ms(r.implementation) for r in row.results]
    mine = row.time_ms("ours")
    best = mine if mine is not None else min((t for t in times if t is not None), default=None)
    return "–" if best is None or row.floor_ms == 0 else f"{row.floor_ms / best:.0%}"


def footnotes(run: Run) -> str:
    """What is missing and why a cell has no number; each reason once.

    What a library does not have by design is said where it has no time at all.
    """
    others = [name for name in timed(run) if name not in our_names(run)]
    idle = {name for name in others if not any(row.time_ms(name) for row in run.rows)}
    lines = [f"- {run.labels.get(n, n)} is missing: {why}" for n, why in run.missing.items()]
    reasons = Counter(
        (r.implementation, r.status, r.detail)
        for row in run.rows
        for r in row.results
        if r.detail and r.status != MISSING
        if r.status != NOT_APPLICABLE or r.implementation in idle
    )
    for (name, status, detail), count in reasons.items():
        rows = "1 row" if count == 1 else f"{count} rows"
        said = "" if status == OK else f" {status}:"
        lines.append(f"- {run.labels.get(name, name)}, {rows}:{said} {detail}")
    return "\n".join(lines)


def details(run: Run) -> str:
    """Everything that was measured, one line for each implementation of each row."""
    header = [
        "workload", "implementation", "p20", "p50", "p80", "eager p20", "p50", "p80",
        "host, additions", "TFLOP/s", "GB/s", "of floor", "peak MiB", "first call s", "worst error",
    ]  # fmt: skip
    body = []
    for row in run.rows:
        for r in row.results:
            if r.status != OK or r.p50_ms is None:
                continue
            worst = max((e for e in r.errors.values() if e is not None), default=None)
            times = (r.p20_ms, r.p50_ms, r.p80_ms, r.eager_p20_ms, r.eager_ms, r.eager_p80_ms)
            body.append([
                row.name, run.labels.get(r.implementation, r.implementation),
                *map(number, times), _number(r.host_additions, ".1f"),
                number(row.flops / r.p50_ms / 1e9), number(row.bytes / r.p50_ms / 1e6),
                f"{row.floor_ms / r.p50_ms:.0%}",
                _number(None if r.peak_bytes is None else r.peak_bytes / 2**20, ".0f"),
                _number(r.first_call_s, ".1f"), _number(worst, ".1e"),
            ])  # fmt: skip
    return markdown(header, body, left=2)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
