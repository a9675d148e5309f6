"""Bars as plain SVG, for pages: text stays text, and colours follow a light or dark page.

A chart is as wide as GitHub shows a page, so that its text has the size of the text around it.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

WIDTH, MARGIN = 860, 8
NAMES = 262  # where bars begin: rows' names are left of it
LABELS = 215  # room for the text behind the longest bar
BAR, GAP, BETWEEN = 15, 3, 12  # heights of a bar, between bars, and between groups
LINE = 18  # of text

# Colours that colour-blind readers tell apart (Okabe and Ito); lighter ones on dark pages.
COLOURS = (
    ("#d55e00", "#ff8f3f"), ("#0072b2", "#56b4e9"), ("#009e73", "#4cc9a0"),
    ("#aa5a8e", "#e39ac6"), ("#8a8a8a", "#a8a8a8"),
)  # fmt: skip


class Bar(NamedTuple):
    series: int  # its colour, and its entry in the legend
    value: float
    label: str  # behind the bar


class Group(NamedTuple):
    name: str
    bars: tuple[Bar, ...]


class Chart(NamedTuple):
    title: str  # says what there is to see
    subtitle: str
    series: tuple[str, ...]  # the first is ours
    groups: tuple[Group, ...]

    @property
    def alt(self) -> str:
        """What a reader who does not see the chart is told: every number of it."""
        said = [
            f"{group.name}: "
            + ", ".join(f"{self.series[bar.series]} {bar.label}" for bar in group.bars)
            for group in self.groups
        ]
        return f"{self.title}. {'; '.join(said)}."

    def svg(self) -> str:
        parts: list[str] = []
        y = MARGIN
        for size, css, text in ((17, "title", self.title), (13, "faint", self.subtitle)):
            for line in textwrap.wrap(text, int(1.6 * WIDTH / size)):
                y += size + 6
                parts.append(_text(MARGIN, y, line, css))
        y += LINE + 6
        parts += _legend(self.series, y)
        y += BETWEEN
        longest = max(bar.value for group in self.groups for bar in group.bars)
        scale = (WIDTH - NAMES - LABELS) / longest
        for group in self.groups:
            names = textwrap.wrap(group.name, 32)
            top, height = y, max(len(group.bars) * (BAR + GAP), len(names) * LINE)
            for i, line in enumerate(names):
                parts.append(_text(NAMES - 10, top + LINE * i + 13, line, "name"))
            for i, bar in enumerate(group.bars):
                parts += _bar(bar, top + i * (BAR + GAP), scale)
            y += height + BETWEEN
        return _page(y, self.title, self.alt, parts)


def _legend(series: Sequence[str], y: int) -> list[str]:
    parts, x = [], float(MARGIN)
    for i, name in enumerate(series):
        parts.append(f'<rect class="s{i}" x="{x:g}" y="{y - 11}" width="12" height="12"/>')
        parts.append(_text(x + 17, y, name, "name start"))
        x += 17 + 7.2 * len(name) + 20
    return parts


def _bar(bar: Bar, y: int, scale: float) -> list[str]:
    width = max(1.0, bar.value * scale)
    rect = f'<rect class="s{bar.series}" x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
    css = "value ours" if bar.series == 0 else "value"
    return [rect, _text(NAMES + width + 6, y + 12, bar.label, css)]


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.4g}" y="{y:g}">{escape(text)}</text>'


def _page(height: float, title: str, alt: str, parts: Sequence[str]) -> str:
    light, dark = (
        "".join(f".s{i}{{fill:{pair[mode]}}}" for i, pair in enumerate(COLOURS)) for mode in (0, 1)
    )
    family = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    style = (
        f"text{{font:14px {family};fill:#1f2328}}"
        ".title{font-size:17px;font-weight:600}.faint{font-size:13px;fill:#59636e}"
        ".name{text-anchor:end}.start{text-anchor:start}.value{font-size:13px}"
        f".ours{{font-weight:600}}{light}"
        f"@media (prefers-color-scheme: dark){{text{{fill:#e6edf3}}.faint{{fill:#9198a1}}{dark}}}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img" aria-label={quoteattr(title)}>'
    )
    described = f"<title>{escape(title)}</title><desc>{escape(alt)}</desc>"
    return "\n".join([head, described, f"<style>{style}</style>", *parts, "</svg>"]) + "\n"
