"""Draw what segments of long sequences cost and gain, for docs/notes/gdn-segments.md.

    python scripts/gdn_segment_figures.py            both figures into docs/figures
    python scripts/gdn_segment_figures.py --tokens 8192 --out elsewhere

Windows come from the reference, on gates drawn as models and benchmarks draw them. Times come from
the newest records of one day and device that have rows with and without segments, forward and
backward each; without one that figure stays as it is.
Needs the bench extra (matplotlib).
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import NullLocator
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.records import ROOT, Row, load
from benchmarks.report.names import title_of
from benchmarks.report.style import STYLE, save
from reference.chunks import cut
from reference.gdn_segments import warm_windows

FIGURES = ROOT / "docs" / "figures"
CUT, WHOLE = "ours", "ours_whole"  # implementations of a record
CHUNK, HEADS = 64, 256
BOUNDS = ((-12.0, "-"), (-20.0, ":"))
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8a8a8a")


def initial_gates(tokens: int) -> Tensor:
    """Of a gated delta net before training: A in (0, 16), a step of 0.001 to 0.1 a token."""
    A = 16 * torch.rand(HEADS)
    step = torch.exp(torch.rand(HEADS) * math.log(100) + math.log(1e-3))
    bias = step + torch.log(-torch.expm1(-step))  # softplus(bias) = step
    return -A * softplus(0.5 * torch.randn(tokens, HEADS) + bias)


def published_gates(tokens: int) -> Tensor:
    """As FlashQLA's benchmark has them: every fourth head forgets nothing."""
    g = logsigmoid(torch.randn(tokens, HEADS)) / 16
    g[:, ::4] = 0
    return g


GATES: dict[str, Callable[[int], Tensor]] = {
    "a model's initialisation": initial_gates,
    "published benchmark": published_gates,
}


def windows(g: Tensor, bound: float) -> list[float]:
    """Tokens of the window at the end of a segment of all tokens, of each head; inf where cold."""
    tokens = len(g)
    chunks = cut(torch.tensor([[0, tokens]]), CHUNK, g.device)
    gamma = chunks.tiles(g[None], torch.float64).transpose(1, 2).cumsum(-1)[:, None]  # n h r i
    k = normalize(torch.randn(len(gamma), 1, CHUNK, 8, dtype=torch.float64), dim=-1)
    inside, warm = warm_windows(chunks, k, torch.rand_like(gamma), gamma, bound)
    length = CHUNK * inside.sum(0).flatten()
    return [n if w else math.inf for n, w in zip(length.tolist(), warm.flatten(), strict=True)]


def window_figure(tokens: int) -> Any:
    """How long windows are by what a head forgets a token, and how many heads are warm."""
    figure, (by_head, share) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for (name, draw), colour in zip(GATES.items(), COLOURS, strict=False):
        g = draw(tokens)
        for bound, line in BOUNDS:
            found = sorted(n for n in windows(g, bound) if n < math.inf)
            y = [100 * n / HEADS for n in range(1, len(found) + 1)]
            label = name if bound == BOUNDS[0][0] else None
            x, y = [*found, tokens], [*y, y[-1]]  # what is cold stays so
            share.step(x, y, where="post", color=colour, ls=line, label=label)
        mean = -g.mean(0)
        known = windows(g, BOUNDS[0][0])
        by_head.scatter(mean, known, s=5, color=colour, label=name)
    rates = torch.logspace(-3, 1, 50)
    by_head.plot(rates, (12 / rates).clamp(min=CHUNK), color="#8a8a8a", lw=0.8, zorder=0)
    by_head.set(xlabel="-log decay a token, mean of the head", ylabel="tokens of the window")
    by_head.set(xscale="log", yscale="log", xlim=(5e-4, 5), ylim=(CHUNK / 1.5, tokens * 1.5))
    share.set(xlabel="tokens a segment has", ylabel="heads that are warm, %")
    share.set(xscale="log", xlim=(CHUNK / 1.5, tokens), ylim=(0, 101))
    for panel, axis in ((by_head, by_head.yaxis), (share, share.xaxis)):
        ticks = [CHUNK * 4**n for n in range(8) if CHUNK * 4**n <= tokens]
        axis.set_ticks(ticks, [f"{t}" for t in ticks])
        axis.set_minor_locator(NullLocator())
        panel.grid(color="#eeeeee", lw=0.6)
        panel.set_axisbelow(True)
    share.plot([], [], color="#444444", ls=BOUNDS[1][1], label="for e^-20 instead of e^-12")
    share.legend(frameon=False, loc="lower right", fontsize=8, handlelength=1.2)
    return figure


def newest_rows() -> list[Row]:
    """Of each kind those of the newest run that has any; all of one device and day."""
    found: dict[str, list[Row]] = {}
    where = None
    for run in reversed(load()):
        rows = [row for row in run.rows if row.time_ms(CUT) and row.time_ms(WHOLE)]
        if rows and where in (None, (run.device, run.date[:10])):
            where = run.device, run.date[:10]
            for kind in {row.kind for row in rows} - found.keys():
                found[kind] = [row for row in rows if row.kind == kind]
    return [row for rows in found.values() for row in rows]


def gain_figure(rows: Sequence[Row]) -> Any:
    """Time of whole sequences over time in segments, by length, a line for each number of heads."""
    kinds = [kind for kind in ("fwd", "bwd") if any(row.kind == kind for row in rows)]
    size = (4 * len(kinds), 3.2)
    figure, panels = plt.subplots(
        1, len(kinds), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for panel, kind in zip(panels[0], kinds, strict=True):
        alone = [row for row in rows if row.kind == kind and row.layout.startswith("1x")]
        by_values = sorted({row.heads for row in alone}, key=_values)
        for heads, colour in zip(by_values, COLOURS, strict=False):
            points = sorted(
                (row.tokens, (row.time_ms(WHOLE) or 0) / (row.time_ms(CUT) or 1))
                for row in alone
                if row.heads == heads
            )
            panel.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4, label=heads)
        lengths = sorted({row.tokens for row in alone})
        panel.set(xscale="log", xlabel="tokens of the sequence", title=title_of(kind).lower())
        panel.set_xticks(lengths, [str(n) for n in lengths])
        panel.minorticks_off()
        panel.axhline(1, color="#8a8a8a", lw=0.8, zorder=0)
        panel.legend(frameon=False, title="heads")
    panels[0][0].set_ylabel("whole / in segments")
    return figure


def _values(heads: str) -> int:
    return int(heads.partition("/")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768, help="of the longest window")
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args()
    torch.manual_seed(0)
    with plt.rc_context(STYLE):
        figures = {"windows": window_figure(options.tokens)}
        if rows := newest_rows():
            figures["gain"] = gain_figure(rows)
        else:
            sys.stderr.write(f"no record has rows of both {CUT} and {WHOLE}\n")
        for name, figure in figures.items():
            save(figure, options.out / f"gdn-segment-{name}", f"Segments: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
