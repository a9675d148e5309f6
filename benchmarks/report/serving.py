"""What the records say about serving: ours beside each rival, and drafts beside a decode step."""

from collections.abc import Sequence

from ..harness.records import Run
from . import tables
from .drafts import drafts
from .headline import source
from .select import Digests, aside
from .spread import beside
from .texts import NO_SERVING, SERVING_NOTE

SETS = {
    "serving-prefill": "prefill from and into a pool",
    "serving-checkpoints": "the same, with checkpoints",
    "serving-decode": "a token of each sequence",
    "serving-drafts": "verification of drafts",
    "serving-step": "a layer's step, norm and gate included",
}


def section(runs: Sequence[Run], digests: Digests) -> list[str]:
    """A table, or where times are that have no record."""
    body, sources, said = [], list[str](), list[str]()
    for of_set, what in SETS.items():
        run = aside(runs, "gdn", of_set, digests)
        if run is None:
            continue
        sources.append(f"{what}: {source(run, digests)}")
        said.append(drafts(run))
        body += [[what, *line] for line in _beside_rivals(run)]
    if not body:
        return ["## Serving", NO_SERVING]
    header = ["what", "rival", "shapes", "graph: rival / ours (least to most)", "eager"]
    table = tables.markdown(header, body, left=2)
    where = f"{'; '.join(sources)}."
    return ["## Serving", SERVING_NOTE, table, *filter(None, said), where[0].upper() + where[1:]]


def _beside_rivals(run: Run) -> list[list[str]]:
    """A line for each rival with a time: label, shapes, ratios of graphs and of eager calls."""
    lines = []
    for name in tables.timed(run):
        if name.startswith("ours"):
            continue
        ways = [beside(run.rows, name, eager) for eager in (False, True)]
        if ways[0] is not None:
            cells = [way.said if way else "–" for way in ways]
            lines.append([run.labels[name], str(ways[0].shapes), *cells])
    return lines
