"""A run as bar charts: a chart for each direction and number of heads, with every rival."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..harness.records import OK, Result, Row, Run
from .names import shape_of, title_of
from .svg import COLOURS, Bar, Chart, Group
from .tables import (
    UNFINISHED,
    best_rival,
    dense_times,
    number,
    our_names,
    timed,
)
from .texts import FAMILIES

# What a rival does that a label of the record does not say.
MEANS = {
    ("dualkv", "fa4"): "flash-attn-4, whole sequences",
    ("dualkv", "cudnn"): "cuDNN, whole sequences",
    ("dualkv", "fa4_shared"): "flash-attn-4, 3 calls a group",
    ("hybrid", "whole"): "whole sequences, same kernels",
    ("model", "fla"): "FLA, PyTorch's convolution",
    ("model", "fla_conv"): "FLA and causal-conv1d",
}
WHOLE = {"dualkv": "fa4", "hybrid": "whole"}  # what a user replaces: every sequence in full


def draw(run: Run, folder: Path) -> list[Path]:
    """Writes the charts of a run as SVG, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, chart in charts(run).items():
        written.append(folder / f"{stem}.svg")
        written[-1].write_text(chart.svg())
    return written


def charts(run: Run) -> dict[str, Chart]:
    """All charts of a run by file name; those with nothing to show are left out."""
    rows = [*run.rows, *steps(run)]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if run.family != "sparse_ring" or density_of(row):
            groups.setdefault((row.kind, row.heads, row.what), []).append(row)
    found = {}
    for (kind, heads, what), of_group in groups.items():
        several = len({w for k, h, w in groups if (k, h) == (kind, heads)}) > 1
        stem = "-".join([run.family, kind, *slug(heads), *(slug(what) if several else ())])
        chart = chart_of(run, of_group)
        if chart is not None:
            found[stem] = chart
    return found


def slug(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.replace("/", "x")).split()


def steps(run: Run) -> list[Row]:
    """Rows of forward plus backward, of shared prompts that have both: attention of a step."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in run.rows:
        if run.family == "dualkv" and row.kind in ("fwd", "bwd"):
            found.setdefault((row.heads, row.layout, row.what), []).append(row)
    pairs = [pair for pair in found.values() if {row.kind for row in pair} == {"fwd", "bwd"}]
    return [_sum(*sorted(pair, key=lambda row: row.kind)) for pair in pairs]


def _sum(backward: Row, forward: Row) -> Row:
    results = []
    for one in forward.results:
        other = backward.result(one.implementation)
        if other is None or {one.status, other.status} != {OK}:
            continue
        times = [
            None if a is None or b is None else a + b
            for a, b in ((one.p50_ms, other.p50_ms), (one.eager_ms, other.eager_ms))
        ]
        peaks = [x.peak_bytes or 0 for x in (one, other)]
        results.append(
            Result(one.implementation, OK, p50_ms=times[0], eager_ms=times[1],
                   peak_bytes=max(peaks) or None)
        )  # fmt: skip
    return replace(forward, kind="step", name=f"{forward.name}+bwd", results=tuple(results))


def chart_of(run: Run, rows: Sequence[Row]) -> Chart | None:
    """Rows of one direction and number of heads: bars in multiples of our time."""
    names = series_of(run, rows)
    if not names:
        return None
    labels = [label_of(run, name) for name in names]
    if any(without_mask(run, row) for row in rows):
        labels += [_without_mask(run), "ideal: that times the density"]
    groups = []
    for row in rows:
        times = {name: row.time_ms(name) for name in names}
        known = [t for t in times.values() if t is not None]
        if not known:
            continue
        one = times.get("ours") or min(known)
        bars = [
            Bar(i, time / one, _said(time, one, row.time_ms(name, eager=True)))
            for i, (name, time) in enumerate(times.items())
            if time is not None
        ]
        if whole := without_mask(run, row):
            density = density_of(row)
            bars.append(Bar(len(names), whole / one, _said(whole, one)))
            bars.append(Bar(len(names) + 1, density * whole / one, _said(density * whole, one)))
        groups.append(Group(shape_of(row), tuple(bars)))
    if not groups:
        return None
    return Chart(_title(run, rows), _subtitle(run), tuple(labels), tuple(groups))


def series_of(run: Run, rows: Sequence[Row]) -> list[str]:
    """Ours first; other forms of ours only if there are colours for them."""
    found = [n for n in timed(run) if any(row.time_ms(n) is not None for row in rows)]
    found = [n for n in found if n not in (*UNFINISHED, "ours_train")]
    found.sort(key=lambda name: name != "ours")
    if len(found) > len(COLOURS):
        found = [n for n in found if n == "ours" or not n.startswith("ours")]
    return found[: len(COLOURS)]


def label_of(run: Run, name: str) -> str:
    return MEANS.get((run.family, name), run.labels[name])


def short(label: str) -> str:
    """A label in a narrow column."""
    return label.replace("flash-attn-4", "FA4")


def density_of(row: Row) -> float:
    """Of a row with a mask; 0 of another."""
    found = re.match(r"([\d.]+)% dense", row.what)
    return float(found[1]) / 100 if found else 0.0


def without_mask(run: Run, row: Row, eager: bool = False) -> float | None:
    """The best rival's time without the mask that the row has; none if it has no mask."""
    alike = [other for other in run.rows if other.kind == row.kind]
    dense = dense_times(alike, our_names(run), eager)
    return dense.get((row.heads, row.tokens)) if density_of(row) else None


def _without_mask(run: Run) -> str:
    """The label of the best rival without a mask."""
    found = (best_rival(row, our_names(run)) for row in run.rows if row.what == "dense")
    names = [best[0] for best in found if best is not None]
    return f"{run.labels[names[0]]}, no mask"


def _said(ms: float, one: float, eager: float | None = None) -> str:
    multiple = "" if ms == one else f"{ms / one:.2f} x, "
    return f"{multiple}{number(ms)} ms" + ("" if eager is None else f" (eager {number(eager)})")


def _title(run: Run, rows: Sequence[Row]) -> str:
    first = rows[0]
    subject = f"{FAMILIES[run.family]}, {title_of(first.kind).lower()}, {heads_of(run, first)}"
    ratios = [r for row in rows if (r := gain(run, row)) is not None]
    rival = "the best rival takes"
    if any(row.time_ms(WHOLE.get(run.family, "")) for row in rows):
        rival = "whole sequences take"
    elif any(without_mask(run, row) for row in rows):
        rival = "all pairs take"
    if not ratios:
        return subject
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{subject}: {rival} {low if low == high else f'{low} to {high}'} times as long as ours"


def heads_of(run: Run, row: Row) -> str:
    a, _, b = row.heads.partition("/")
    if run.family == "gdn":
        return f"{a} key and {b} value heads"
    if run.family in ("dualkv", "sparse_ring"):
        return f"{b} query and {a} key heads"
    return f"{row.heads} channels" if run.family == "conv" else f"{row.heads} heads"


def _subtitle(run: Run) -> str:
    way = " in CUDA graphs (eager calls in brackets)" if run.device_kind == "cuda" else ""
    where = f"{run.device}, {run.date[:10]}, commit {run.commit[:10]}"
    said = f"Time of a call{way}; bars are multiples of ours, shorter is faster. {where}."
    return f"{said} {run.notes}".strip()


def rival_of(run: Run, row: Row, eager: bool = False) -> tuple[str, float] | None:
    """What the row is compared with on the front page: label and time.

    Whole sequences for shared prompts, no mask for a mask, else the best rival.
    """
    if time := row.time_ms(WHOLE.get(run.family, ""), eager):
        return label_of(run, WHOLE[run.family]), time
    if time := without_mask(run, row, eager):
        return _without_mask(run), time
    best = best_rival(row, our_names(run), eager)
    return None if best is None else (label_of(run, best[0]), best[1])


def gain(run: Run, row: Row, eager: bool = False) -> float | None:
    """The time of that, over ours."""
    rival, mine = rival_of(run, row, eager), row.time_ms("ours", eager)
    return None if rival is None or mine is None else rival[1] / mine
