"""Draw how sparse attention spreads over a ring, from a simulator; no GPU is used or modelled.

    python scripts/sparse_ring_figures.py                    figures and tables into docs/
    python scripts/sparse_ring_figures.py --check            whether the tables there are current
    python scripts/sparse_ring_figures.py --dump heads.pt    of q and k that a model gave
    python scripts/sparse_ring_figures.py --rebuild 524288   choose the synthetic heads' lines anew

Needs the bench extra (matplotlib); the last takes 3 GB and minutes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import sparse_ring_heads as source
from matplotlib.colors import ListedColormap

from benchmarks.attention.workloads import VerticalSlash as Benchmark
from benchmarks.report.style import STYLE, save
from qla_kernels.sparse_ring import (
    ContiguousLayout,
    FixedVerticalSlash,
    StripedLayout,
    VerticalSlash,
    ZigZagLayout,
)
from qla_kernels.sparse_ring.balance import (
    PUBLISHED_BACKWARD,
    PUBLISHED_FORWARD,
    Balance,
    Lines,
    balance_report,
    token_stripe_tiles,
)
from qla_kernels.sparse_ring.index import known_index
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.shapes import BLOCK

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, FIGURES = ROOT / "docs" / "sparse_ring.md", ROOT / "docs" / "figures"
LINES = ROOT / "scripts" / "sparse_ring_heads.npz"  # of the synthetic heads
WORLDS = (4, 8, 16, 32, 64, 128)
LAYOUTS: dict[str, tuple[Callable[[int], Layout], str, str]] = {
    "contiguous": (ContiguousLayout, "#8a8a8a", "o"),
    "zigzag": (ZigZagLayout, "#0072b2", "s"),
    "stripe 64": (lambda world: StripedLayout(world, 64), "#009e73", "^"),
    "stripe 128": (StripedLayout, "#d55e00", "D"),
}
PATTERN = VerticalSlash(0.9, 0.9)
# Launches without transfers, slowest rank by mean: docs/notes/sparse-ring.md, sections 10, 12, 13
MEASURED = {
    "contiguous": {2: 1.454, 4: 1.720},
    "zigzag": {2: 1.009, 4: 1.044},
    "stripe 64": {2: 1.012, 4: 1.019},
    "stripe 128": {2: 1.005, 4: 1.012, 8: 1.02},
}


def lines_of(heads: Iterable[source.Head]) -> tuple[int, dict[str, Lines]]:
    """T, and the lines of each head by its name."""
    found: dict[str, Lines] = {}
    T = 0
    for head in heads:
        index = source.index_of(head, PATTERN)
        T, found[head.name] = index.T, index.to_lists()[0][0]
    return T, found


def described(T: int, heads: dict[str, Lines]) -> list[str]:
    """A table row about each head."""
    rows = []
    for name, (columns, diagonals) in heads.items():
        index = known_index(FixedVerticalSlash([columns], [diagonals]), 1, 1, T, "cpu")
        rows.append(
            f"| {name} | {len(columns)} | {len(diagonals)} | {float(index.runs()):.1f} "
            f"| {float(index.density()):.2%} |"
        )
    return rows


def imbalance(T: int, heads: Sequence[Lines]) -> tuple[Any, list[str]]:
    """Figure and table rows: every layout at every number of ranks."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    found: dict[tuple[int, str], Balance] = {}
    for world in WORLDS:
        for name, (layout, _, _) in LAYOUTS.items():
            found[world, name] = balance_report(heads, T, layout=layout(world))
    for name, (_, colour, marker) in LAYOUTS.items():
        for panel, of in zip(panels, ("id_step", "makespan"), strict=True):
            values = [getattr(found[world, name], of) for world in WORLDS]
            panel.plot(WORLDS, values, color=colour, marker=marker, ms=4, label=name)
    for panel, title in zip(panels, ("steps: max / mean", "makespan / ideal"), strict=True):
        panel.set(title=title, xlabel="ranks", xscale="log", xticks=WORLDS, xticklabels=WORLDS)
        panel.minorticks_off()
    panels[0].legend(frameon=False)
    rows = []
    for world in WORLDS:
        cells = (found[world, name] for name in LAYOUTS)
        said = (f"{b.id_total:.3f} / {b.id_step:.3f} / **{b.makespan:.3f}**" for b in cells)
        rows.append(f"| {world} | " + " | ".join(said) + " |")
    return figure, rows


def beside_measured(T: int = 131072) -> tuple[Any, list[str]]:
    """Figure and table rows: the benchmark's mask, simulated, and measured for up to 8 ranks."""
    diagonals, columns = Benchmark(T, 0.05, 4, heads=(2, 16), head_dim=128).mask()
    worlds = (2, *WORLDS)
    found = {
        (world, name): balance_report(
            [(columns, diagonals)], T, layout=layout(world), columns_last=True
        )
        for world in worlds
        for name, (layout, _, _) in LAYOUTS.items()
    }
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for name, (_, colour, marker) in LAYOUTS.items():
        for panel, of in zip(panels, ("id_total", "id_step"), strict=True):
            values = [getattr(found[world, name], of) for world in worlds]
            panel.plot(worlds, values, color=colour, lw=1, label=name)
        at, measured = zip(*MEASURED[name].items(), strict=True)
        panels[0].plot(at, measured, color=colour, marker=marker, ms=5, ls="", mfc="none")
    for panel, title in zip(
        panels, ("ranks: max / mean; marks: measured", "steps: max / mean"), strict=True
    ):
        panel.set(title=title, xlabel="ranks", xscale="log", xticks=worlds, xticklabels=worlds)
        panel.minorticks_off()
    panels[1].legend(frameon=False)
    rows = []
    for world in worlds:
        cells = []
        for name in LAYOUTS:
            b, point = found[world, name], MEASURED[name].get(world)
            said = "" if point is None else f" (**{point:.3f}**)"
            cells.append(f"{b.id_total:.3f}{said} / {b.id_step:.3f}")
        rows.append(f"| {world} | " + " | ".join(cells) + " |")
    return figure, rows


def timeline(T: int, heads: Sequence[Lines], world: int = 32, inner: int = 8) -> Any:
    """Which rank computes when, with transfers as slow as 1.9 chunks between nodes."""
    mean = balance_report(heads, T, layout=StripedLayout(world)).work.mean()
    slow = {"x": PUBLISHED_FORWARD.outer / PUBLISHED_FORWARD.chunk * mean}
    fast = PUBLISHED_FORWARD.inner / PUBLISHED_FORWARD.chunk * mean
    shown = {
        "zigzag, one ring": balance_report(heads, T, layout=ZigZagLayout(world), **slow),
        "stripes, one ring": balance_report(heads, T, layout=StripedLayout(world), **slow),
        "stripes, double ring": balance_report(
            heads, T, layout=StripedLayout(world), inner_size=inner, x=fast, x_outer=slow["x"]
        ),
    }
    figure, panels = plt.subplots(len(shown), figsize=(8, 5.4), sharex=True, layout="constrained")
    for panel, (title, b) in zip(panels, shown.items(), strict=True):
        for rank in range(0, world, 4):
            spans = np.stack([b.start[rank], b.end[rank] - b.start[rank]], 1) / mean
            panel.broken_barh(spans, (rank, 3), color="#d55e00", edgecolor="white", lw=0.4)
        panel.set(title=f"{title}: {b.end.max() / mean:.0f} steps' time", ylabel="rank")
    panels[-1].set_xlabel("time, in steps of mean work; white: waiting for a chunk")
    return figure


def mask_picture(world: int = 4, blocks: int = 64) -> Any:
    """One head's mask, each block in the colour of the rank that computes it."""
    diagonals, columns = (0, 1, 9, 10, 30), (0, 22)
    distance = np.arange(blocks)[:, None] - np.arange(blocks)
    active = np.isin(distance, diagonals) | ((distance >= 0) & np.isin(np.arange(blocks), columns))
    figure, panels = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
    colours = ListedColormap(["white", "#0072b2", "#d55e00", "#009e73", "#cc79a7"])
    for panel, name in zip(panels, ("contiguous", "zigzag", "stripe 128"), strict=True):
        layout = LAYOUTS[name][0](world)
        own = np.array([layout.owner(b * BLOCK, blocks * BLOCK) for b in range(blocks)])
        image = np.where(active, own[:, None] + 1, 0)
        panel.imshow(image, cmap=colours, vmin=0, vmax=4, interpolation="nearest")
        panel.set(title=name, xticks=[], yticks=[])
    panels[0].set(ylabel="queries", xlabel="keys")
    return figure


def trade(T: int = 32768) -> Any:
    """Density against recall of random rows, mean over heads, for targets from 0.5 to 0.99."""
    figure, panel = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    heads = list(source.heads(T, random_rows=64))
    for estimator, colour, marker in (
        ("residual", "#d55e00", "D"),
        ("independent", "#0072b2", "s"),
    ):
        points = []
        for target in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
            chosen = VerticalSlash(target, target, estimator=estimator)  # type: ignore[arg-type]
            indices = [source.index_of(head, chosen) for head in heads]
            density = np.mean([float(i.density()) for i in indices])
            held = [
                source.recall(h, i, slice(BLOCK, None)) for h, i in zip(heads, indices, strict=True)
            ]
            points.append((density, np.mean(held)))
        panel.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=4, label=estimator)
    panel.set(xlabel="density", ylabel="recall over random rows", xscale="log")
    panel.legend(frameon=False)
    return figure


def links(world: int = 32, inner: int = 8) -> tuple[Any, list[str]]:
    """One ring and the double ring over the speed of links between nodes; the published point."""
    figure, panel = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    factors = np.geomspace(0.2, 5, 60)
    for times, name, colour in (
        (PUBLISHED_FORWARD, "forward", "#d55e00"),
        (PUBLISHED_BACKWARD, "backward", "#0072b2"),
    ):
        slower = [times._replace(outer=times.outer * f) for f in factors]
        flat = [x.flat(world) for x in slower]
        nested = [x.hierarchical(world, inner) for x in slower]
        panel.plot(factors, flat, color=colour, ls="--", label=f"{name}, one ring")
        panel.plot(factors, nested, color=colour, label=f"{name}, double ring")
    panel.axvline(1, color="#8a8a8a", lw=0.8)
    panel.set(xscale="log", yscale="log", xlabel="transfer between nodes / published", ylabel="ms")
    shown = ((panel.set_xticks, (0.2, 0.5, 1, 2, 5)), (panel.set_yticks, (20, 50, 100, 200, 500)))
    for ticks, values in shown:
        ticks(values, [str(value) for value in values])
    panel.minorticks_off()
    panel.legend(frameon=False)
    rows = []
    for name, times in (("forward", PUBLISHED_FORWARD), ("backward", PUBLISHED_BACKWARD)):
        a, b = times.flat(world), times.hierarchical(world, inner)
        rows.append(f"| {name} | {a:.2f} | {b:.2f} | {1 - b / a:.1%} |")
    return figure, rows


def shredded(T: int, heads: Sequence[Lines]) -> list[str]:
    """How many tiles stripes of single tokens would touch."""
    mean = (np.mean([token_stripe_tiles(d, T, world) for _, d in heads]) for world in WORLDS[:-1])
    return ["| " + " | ".join(f"x{factor:.1f}" for factor in mean) + " |"]


def replaced(document: str, tables: dict[str, list[str]]) -> str:
    """The document with the rows of each named table exchanged."""
    for name, rows in tables.items():
        start, end = f"<!-- {name}:start -->\n", f"<!-- {name}:end -->"
        before, _, rest = document.partition(start)
        old, _, after = rest.partition(end)
        head = "\n".join(old.strip().splitlines()[:2])  # title and rule
        document = "\n".join([f"{before}{start}", head, *rows, "", f"{end}{after}"])
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--rebuild", type=int, metavar="TOKENS", help="choose the lines anew")
    heads.add_argument("--dump", type=Path, help="q and k of a model, see sparse_ring_heads.py")
    parser.add_argument("--check", action="store_true", help="only compare the tables")
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args()
    if options.dump or options.rebuild:
        given_heads = source.dumped(options.dump) if options.dump else source.heads(options.rebuild)
        T, by_name = lines_of(given_heads)
    else:
        T, by_name = source.load(LINES)
    lines = list(by_name.values())
    figures: dict[str, Any] = {}
    with plt.rc_context(STYLE):
        figures["links"], of_links = links()
        figures["imbalance"], of_imbalance = imbalance(T, lines)
        figures["measured"], of_measured = beside_measured()
        tables = {
            "heads": described(T, by_name),
            "imbalance": of_imbalance,
            "measured": of_measured,
            "shredded": shredded(T, lines),
            "links": of_links,
        }
        text = replaced(DOCUMENT.read_text(), tables)
        if options.check:
            return 0 if text == DOCUMENT.read_text() else 1
        figures["timeline"] = timeline(T, lines)
        figures["masks"] = mask_picture()
        figures["recall"] = trade()
        for name, figure in figures.items():
            save(figure, options.out / f"sparse-ring-{name}.svg", f"Sparse ring: {name}")
    if options.dump:
        sys.stdout.write("\n".join(row for rows in tables.values() for row in rows) + "\n")
        return 0
    DOCUMENT.write_text(text)
    if options.rebuild:
        source.save(LINES, T, by_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
