"""Draws the results of `run`: losses over steps, and accuracy over density."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from benchmarks.report.style import STYLE, save

from .tasks import TASKS

COLOURS = ("#8a8a8a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def draw(results: dict[str, Any], file: Path) -> None:
    """Writes an SVG with a column for each task: losses above, accuracy below."""
    runs = {name: run for name, run in results["runs"].items() if name != "short"}
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, len(TASKS), figsize=(10, 5.5), layout="constrained")
        for column, task in enumerate(TASKS):
            above, below = panels[0][column], panels[1][column]
            for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
                steps = [x["step"] for x in run["evaluations"]]
                losses = [x["own"][task]["loss"] for x in run["evaluations"]]
                above.plot(steps, losses, color=colour, marker="o", ms=3, label=name)
            _accuracy(below, runs, task)
            above.set(title=task, xlabel="steps on long sequences", ylabel="loss, held out")
            below.set(xlabel="density", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
            below.xaxis.set_major_formatter(PercentFormatter(1))
        panels[0][0].legend(frameon=False)
        panels[1][-1].legend(*panels[1][0].get_legend_handles_labels(), frameon=False)
        save(figure, file, "Sparse ring: quality")


def _accuracy(panel: Any, runs: dict[str, Any], task: str) -> None:
    """Accuracy at the last step over density; of recall in the last block and elsewhere."""
    parts = ("last_block", "elsewhere") if task == "recall" else ("accuracy",)
    last = sorted((run["evaluations"][-1] for run in runs.values()), key=lambda x: x["density"])
    density = [x["density"] for x in last]
    for part, colour in zip(parts, COLOURS[1:], strict=False):
        label = part.replace("_", " ")
        values = [x["own"][task][part] for x in last]
        panel.plot(density, values, color=colour, marker="D", ms=4, label=label)
    untrained = sorted((run["evaluations"][0] for run in runs.values()), key=lambda x: x["density"])
    values = [x["own"][task]["accuracy"] for x in untrained]
    density = [x["density"] for x in untrained]
    panel.plot(density, values, color=COLOURS[0], ls="--", label="before long sequences")
