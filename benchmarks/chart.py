"""Bars as SVG: text stays text, colours follow a light or dark page, and a phone can show it."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from .harness.records import Row, Run
from .tables import OPERATIONS, lengths_of, number

WIDTH, BAR, LINE = 480, 22, 28
# Okabe and Ito's, which colour-blind readers tell apart: on light pages, and on dark ones
COLOURS = {"ours": ("#d55e00", "#c25600"), "rival": ("#c9d1d9", "#4d5761")}
STYLE = (
    "text{font:15px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
    ".title{font-size:18px;font-weight:600}.note{font-size:17px;font-weight:700;text-anchor:end}"
    ".label{font-size:14px}.faint{font-size:13px;fill:#59636e}%s.inside{fill:#fff;font-weight:600}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9198a1}%s}"
)


class Group(NamedTuple):
    """Bars that share a scale, the longest as wide as the chart: label, value, and whether ours."""

    title: str
    note: str  # at the right
    bars: Sequence[tuple[str, float, bool]]


def svg(title: str, caption: str, groups: Sequence[Group]) -> str:
    parts, y = [_text(0, 20, title, "title")], 28
    for group in groups:
        y += LINE
        parts += [_text(0, y - 6, group.title, ""), _text(WIDTH, y - 6, group.note, "note")]
        longest = max(value for _, value, _ in group.bars)
        for label, value, ours in group.bars:
            width, css = max(2.0, WIDTH * value / longest), "ours" if ours else "rival"
            size = f'width="{width:.1f}" height="{BAR - 3}"'
            parts.append(f'<rect class="{css}" y="{y}" {size} rx="2"/>')
            fits = width > 8.5 * len(label) + 12
            css = "label inside" if fits and ours else "label"
            parts.append(_text(6 if fits else width + 6, y + 14.5, label, css))
            y += BAR
    for line in textwrap.wrap(caption, 62):
        y += 18
        parts.append(_text(0, y + 2, line, "faint"))
    modes = ["".join(f".{n}{{fill:{pair[i]}}}" for n, pair in COLOURS.items()) for i in (0, 1)]
    size = f'viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" height="{y + 10}"'
    said = (f"{g.title} {g.note}: {', '.join(bar[0] for bar in g.bars)}" for g in groups)
    described = f"<title>{escape(title)}</title><desc>{escape('; '.join(said))}</desc>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{described}'
    return "\n".join([head, f"<style>{STYLE % (*modes,)}</style>", *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def draw(run: Run, folder: Path) -> Iterator[Path]:
    """Writes a chart for each kind and heads of a run's rows, with every implementation."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        groups.setdefault((row.kind, row.heads), []).append(row)
    for (kind, heads), rows in groups.items():
        drawn = [Group(lengths_of(x), x.what, bars) for x in rows if (bars := _bars(run, x))]
        if drawn:
            end, title = heads.replace("/", "x").replace(", ", "-"), OPERATIONS.get(kind, kind)
            path = folder / f"{run.family}-{kind}-{end}.svg"
            caption = f"{run.device}, {run.date[:10]}, {run.command}"
            path.write_text(svg(f"{run.family}, {title}, {heads}", caption, drawn))
            yield path


def _bars(run: Run, row: Row) -> list[tuple[str, float, bool]]:
    times = ((r.implementation, r.time_ms(r.p50_ms is None)) for r in row.results)
    return [(f"{run.labels[n]} {number(t)} ms", t, n.startswith("ours")) for n, t in times if t]
