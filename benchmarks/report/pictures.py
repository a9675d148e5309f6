"""The figures that pages show."""

from collections.abc import Sequence

from ..harness.records import Run
from .figures import charts
from .select import Digests, aside, headline
from .svg import Chart

FIGURES = {  # of each family's headline record, as the page shows them
    "gdn": ("gdn-fwd-16x32", "gdn-both-16x32"),
    "dualkv": ("dualkv-step-8x32",),
    "hybrid": ("hybrid-block-16x32-2x16",),
    "sparse_ring": ("sparse_ring-fwd-8x32",),
    "conv": (),
}
RESPONSES = "dualkv-responses"


def figures(runs: Sequence[Run], digests: Digests) -> dict[str, Chart]:
    """The charts that pages show, by file name."""
    found: dict[str, Chart] = {}
    for family, names in FIGURES.items():
        run = headline(runs, family, digests)
        drawn = {} if run is None else charts(run)
        found |= {name: drawn[name] for name in names if name in drawn}
    growing = aside(runs, "dualkv", "responses", digests)
    drawn = {} if growing is None else charts(growing)
    for name in ("dualkv-step-8x32", "dualkv-fwd-8x32"):
        if name in drawn:
            return found | {RESPONSES: drawn[name]}
    return found


def picture(name: str, chart: Chart, folder: str) -> str:
    """A chart on a page; its text for readers who do not see it is its title."""
    return f"![{chart.title}]({folder}{name}.svg)"


def shown(runs: Sequence[Run], digests: Digests, folder: str, *names: str) -> list[str]:
    """Markdown of charts that there are, on a page from which the figures lie in a folder."""
    drawn = figures(runs, digests)
    return [picture(name, drawn[name], folder) for name in names if name in drawn]
