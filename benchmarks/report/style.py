"""How figures of notes are drawn with matplotlib: readable on light and on dark pages."""

from pathlib import Path
from typing import Any

INK, FAINT = "#222222", "#d9d9d9"
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "svg.fonttype": "none",
    "svg.hashsalt": "qla", "figure.dpi": 110, "axes.spines.top": False,
    "axes.spines.right": False, "font.family": "DejaVu Sans",
}  # fmt: skip

# Rules of a stylesheet win over the style of an element if they are important.
DARK = """<style>
@media (prefers-color-scheme: dark) {
  [style*="fill: #222222"] { fill: #e6edf3 !important }
  [style*="stroke: #222222"] { stroke: #e6edf3 !important }
  [style*="stroke: #d9d9d9"] { stroke: #484f58 !important }
  [style*="stroke: #eeeeee"] { stroke: #21262d !important }
  [style*="stroke: #000000"] { stroke: #9198a1 !important }
  [style*="fill: #ffffff"] { fill: #0d1117 !important }
}
</style>
"""


def save(figure: Any, path: Path, title: str) -> Path:
    """Writes a figure as SVG: no background, a title for readers who do not see it, dark colours.

    The same figure gives the same file each time.
    """
    import matplotlib.pyplot as plt

    file = path.with_suffix(".svg")
    figure.savefig(file, transparent=True, metadata={"Date": None, "Title": title})
    plt.close(figure)
    file.write_text(on_dark_pages(file.read_text()))
    return file


def on_dark_pages(svg: str) -> str:
    """An SVG of matplotlib with the rules for dark pages, before its first definitions."""
    head, found, rest = svg.partition(" <defs>\n")
    return f"{head}{DARK}{found}{rest}" if found and DARK not in svg else svg
