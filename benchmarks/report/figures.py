"""A run as figures: latency, ratio to the best rival, share of the floor; PNG and SVG of each.

And, for shared prompts, time against the number of responses.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from ..harness.records import Row, Run
from .tables import our_names, ratio, timed, title_of

# Colours that colour-blind readers tell apart (Okabe and Ito), and a shape besides.
OURS = ("#d55e00", "D")
OTHERS = (("#0072b2", "o"), ("#009e73", "s"), ("#cc79a7", "^"), ("#56b4e9", "v"), ("#8a8a8a", "P"))
INK, FAINT = "#222222", "#d9d9d9"
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "svg.fonttype": "none",
    "svg.hashsalt": "qla", "figure.dpi": 110, "axes.spines.top": False,
    "axes.spines.right": False, "font.family": "DejaVu Sans",
}  # fmt: skip


# by ending: what is said when a figure is saved
ENDINGS: dict[str, dict[str, Any]] = {"png": {"dpi": 130}, "svg": {"metadata": {"Date": None}}}


def draw(run: Run, folder: Path, endings: Iterable[str] = ENDINGS) -> list[Path]:
    """All figures of a run; those there is nothing to show in are left out."""
    written: list[Path] = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        groups.setdefault((row.kind, row.what), []).append(row)
    # a lone row needs no picture, unless it is all there is
    groups = {key: rows for key, rows in groups.items() if len(rows) > 1} or groups
    kinds = [kind for kind, _ in groups]
    with plt.rc_context(STYLE):
        for (kind, what), rows in groups.items():
            stem = f"{run.family}-{kind}"
            if kinds.count(kind) > 1:
                stem += "-" + "".join(c if c.isalnum() else "-" for c in what).replace("--", "-")
            subject = f"{title_of(kind)}, {what}"
            for name, figure in (
                ("latency", latency(run, rows, subject)),
                ("ratio", ratios(run, rows, subject)),
                ("floor", floor_share(run, rows, subject)),
            ):
                if figure is not None:
                    written += save(figure, folder / f"{stem}-{name}", endings)
    return written + draw_growth(run, folder, endings)


def draw_growth(run: Run, folder: Path, endings: Iterable[str] = ENDINGS) -> list[Path]:
    """Time against the number of responses, if enough rows differ only in that."""
    with plt.rc_context(STYLE):
        figure = growth(run)
        return [] if figure is None else save(figure, folder / f"{run.family}-responses", endings)


def growth(run: Run) -> Any:
    """Milliseconds over the number of responses, both log: a panel for each direction."""
    by_shape: dict[str, dict[str, dict[int, Row]]] = {}
    for row in run.rows:
        found = re.fullmatch(r"(\d+)x(\d+\+\d+)", row.layout)
        if run.family == "dualkv" and found is not None:
            kinds = by_shape.setdefault(found[2], {})
            kinds.setdefault(row.kind, {})[int(found[1])] = row
    many = [(s, kinds) for s, kinds in by_shape.items() if max(map(len, kinds.values())) > 2]
    if not many:
        return None
    (shape, kinds), *_ = many
    figure: Any
    figure, grid = plt.subplots(
        1, len(kinds), figsize=(1.5 + 3.2 * len(kinds), 3.9), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    looks, shown = _looks(run), {}
    for axes, (kind, rows) in zip(grid.flat, kinds.items(), strict=True):
        axes.set_title(title_of(kind), loc="left")
        axes.grid(color=FAINT, linewidth=0.6)
        for name in timed(run):
            times = {n: t for n, row in sorted(rows.items()) if (t := row.time_ms(name))}
            if times:
                colour, marker = looks[name]
                (shown[name],) = axes.loglog(
                    list(times), list(times.values()), color=colour, marker=marker,
                    markersize=5, linewidth=1.4, label=run.labels[name],
                )  # fmt: skip
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sorted(rows), [str(n) for n in sorted(rows)])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_xlabel("responses")
        axes.set_ylabel("ms")
    prompt, response = shape.split("+")
    _head(figure, run, f"Responses of {response} tokens to a prompt of {prompt}: time per call")
    figure.legend(handles=list(shown.values()), loc="outside lower left", ncols=4, frameon=False)
    return figure


def latency(run: Run, rows: Sequence[Row], subject: str) -> Any:
    """Milliseconds, log scale: a panel for each head configuration, a line for each length."""

    def finish(axes: Any) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))

    title = f"{subject}: time per call"
    return _dots(run, rows, title, "ms, log scale; left is faster", Row.time_ms, finish)


def floor_share(run: Run, rows: Sequence[Row], subject: str) -> Any:
    """The floor's time over each time, in percent."""

    def share(row: Row, name: str) -> float | None:
        time = row.time_ms(name)
        return None if not time or not row.floor_ms else 100 * row.floor_ms / time

    def finish(axes: Any) -> None:
        axes.set_xlim(0, 103)
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))

    title = f"{subject}: share of the memory or compute floor"
    return _dots(run, rows, title, "of the floor; right is better", share, finish)


def _dots(
    run: Run,
    rows: Sequence[Row],
    title: str,
    unit: str,
    value: Callable[[Row, str], float | None],
    finish: Callable[[Any], None],
) -> Any:
    names = [n for n in timed(run) if any(value(row, n) is not None for row in rows)]
    if not names:
        return None
    heads = list(dict.fromkeys(row.heads for row in rows))
    layouts = list(dict.fromkeys(row.layout for row in rows))
    columns = min(3, len(heads))
    lines = math.ceil(len(heads) / columns)
    height = 0.24 * len(layouts) + 0.7
    figure: Any
    figure, grid = plt.subplots(
        lines, columns, figsize=(2.2 + 3.1 * columns, height * lines + 1.2),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    looks = _looks(run)
    for axes, configuration in zip(grid.flat, heads, strict=False):
        found = {row.layout: row for row in rows if row.heads == configuration}
        axes.set_title(f"{configuration} heads", loc="left")
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        for y, layout in enumerate(layouts):
            row = found.get(layout)
            values = {} if row is None else {n: value(row, n) for n in names}
            known = [v for v in values.values() if v is not None]
            if known:
                axes.plot([min(known), max(known)], [y, y], color=FAINT, linewidth=2, zorder=1)
            for name, v in values.items():
                if v is not None:
                    colour, marker = looks[name]
                    big = name.startswith("ours")
                    axes.scatter(
                        v, y, s=40 if big else 26, color=colour, marker=marker,
                        zorder=4 if big else 3, linewidth=0.6, edgecolor="white",
                    )  # fmt: skip
        finish(axes)
        axes.set_yticks(range(len(layouts)), layouts)
        axes.tick_params(length=0, labelbottom=True)
        axes.set_ylim(len(layouts) - 0.4, -0.6)
    for axes in grid.flat[len(heads) :]:
        axes.set_visible(False)
    for axes in grid[-1, :]:
        axes.set_xlabel(unit)
    figure.get_layout_engine().set(wspace=0.04)
    _head(figure, run, title)
    figure.legend(
        handles=[
            Line2D([], [], color=looks[n][0], marker=looks[n][1], linestyle="none",
                       markersize=6, label=run.labels[n])
            for n in names
        ],
        loc="outside lower left", ncols=2 * columns, frameon=False, handletextpad=0.2,
    )  # fmt: skip
    return figure


def ratios(run: Run, rows: Sequence[Row], subject: str) -> Any:
    """Best rival over ours: lengths down, head configurations across."""
    ours = our_names(run)
    found = {(row.layout, row.heads): ratio(row, ours) for row in rows}
    if all(value is None for value in found.values()):
        return None
    heads = list(dict.fromkeys(row.heads for row in rows))
    layouts = list(dict.fromkeys(row.layout for row in rows))
    figure, axes = plt.subplots(
        figsize=(2.6 + 0.72 * len(heads), 1.5 + 0.3 * len(layouts)), layout="constrained"
    )
    # symmetric in the logarithm: twice as fast is as far from white as half as fast
    colours = LinearSegmentedColormap.from_list("ratio", ["#b2182b", "#f7f7f7", "#2166ac"])
    reach = max(math.log(2), *(abs(math.log(v)) for v in found.values() if v))
    scale = Normalize(-reach, reach)
    for y, layout in enumerate(layouts):
        for x, configuration in enumerate(heads):
            value = found.get((layout, configuration))
            position = math.log(value) if value else 0.0
            face = colours(scale(position)) if value else "#ffffff"
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", lw=1.5))
            dark = abs(position) > 0.65 * reach
            axes.text(
                x + 0.5, y + 0.5, f"{value:.2f}" if value else "–",
                ha="center", va="center", color="white" if dark else INK, fontsize=8.5,
            )  # fmt: skip
    axes.set_xlim(0, len(heads))
    axes.set_ylim(len(layouts), 0)
    axes.set_xticks([i + 0.5 for i in range(len(heads))], heads)
    axes.set_yticks([i + 0.5 for i in range(len(layouts))], layouts)
    axes.xaxis.tick_top()
    axes.set_xlabel("key heads / value heads")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _head(figure, run, f"{subject}: best rival / ours; above 1 we are faster")
    return figure


def _looks(run: Run) -> dict[str, tuple[str, str]]:
    others = iter(OTHERS * 2)
    return {
        name: (("#f0a35e", "d") if name != "ours" else OURS)
        if name.startswith("ours")
        else next(others)
        for name in run.labels
    }


def _head(figure: Any, run: Run, title: str) -> None:
    width = int(13 * figure.get_figwidth())  # characters of this font that fit
    said = (title, f"{run.device}, {run.date[:10]}", run.notes)
    lines = [line for text in said for line in textwrap.wrap(text, width)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)


def save(figure: Any, path: Path, endings: Iterable[str]) -> list[Path]:
    paths = [path.with_suffix(f".{ending}") for ending in endings]
    for file in paths:
        figure.savefig(file, **ENDINGS[file.suffix[1:]])
    plt.close(figure)
    return paths
