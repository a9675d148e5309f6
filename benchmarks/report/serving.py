"""What the records say about serving: ours beside each rival, and drafts beside a decode step."""

from collections import Counter
from collections.abc import Sequence

from ..harness.records import Row, Run
from ..serving.workloads import PARALLEL
from . import tables
from .drafts import drafts
from .headline import source
from .select import Digests, aside
from .spread import beside
from .texts import NO_SERVING, SERVING_NOTE, SERVING_PARALLEL

SETS = {
    "serving-prefill": "prefill from and into a pool",
    "serving-checkpoints": "the same, with checkpoints",
    "serving-decode": "a token of each sequence",
    "serving-drafts": "verification of drafts",
    "serving-step": "a layer's step, norm and gate included",
}
SHARED = {"pool_prefill": "prefill", "pool_decode": "decoding", "drafts": "drafts"}


def section(runs: Sequence[Run], digests: Digests) -> list[str]:
    """A table, or where times are that have no record."""
    body, said, sources = [], list[str](), dict[str, list[str]]()
    for of_set, what in SETS.items():
        run = aside(runs, "gdn", of_set, digests)
        if run is None:
            continue
        sources.setdefault(source(run, digests), []).append(what)
        said.append(drafts(run))
        body += [[what, *line] for line in _beside_rivals(run)]
    shared = parallel(runs, digests)
    if not body:
        return ["## Serving", *(shared or [NO_SERVING])]
    header = ["what", "rival", "shapes", "graph: rival / ours (least to most)", "eager"]
    table = tables.markdown(header, body, left=2)
    each = [f"{', '.join(names)}: {of}" for of, names in sources.items()]
    where = f"{'; '.join(each if len(sources) > 1 else sources)}."
    last = " ".join([*filter(None, said), where[0].upper() + where[1:]])
    return ["## Serving", SERVING_NOTE, table, last, *shared]


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


def parallel(runs: Sequence[Run], digests: Digests) -> list[str]:
    """A line for the heads of a layer and of each of the GPUs that share it; [] without a record.

    A ratio is of the fastest rival of its row; the text names the rivals.
    """
    run = aside(runs, "gdn", "serving-parallel", digests)
    if run is None:
        return []
    rows = {(row.heads, row.kind): row for row in run.rows}
    body = []
    for heads, count in PARALLEL.items():
        whole, own = ("/".join(str(n * many) for n in heads) for many in (count, 1))
        pairs = [_time_and_ratio(run, rows.get((own, kind))) for kind in SHARED]
        if any(time != "–" for time, _ in pairs):
            body.append([whole, str(count), own, *(cell for pair in pairs for cell in pair)])
    header = ["heads of the layer", "GPUs", "on each"]
    for said in SHARED.values():
        header += [f"{said}, ms", "rival / ours"]
    text = SERVING_PARALLEL.format(rivals=_rivals(run), source=source(run, digests))
    return [text, tables.markdown(header, body)]


def _time_and_ratio(run: Run, row: Row | None) -> tuple[str, str]:
    """Of CUDA graphs."""
    if row is None:
        return "–", "–"
    return tables.number(row.time_ms("ours")), tables.marked(
        tables.ratio(row, tables.our_names(run))
    )


def _rivals(run: Run) -> str:
    """The fastest rivals by kind: `prefill FlashInfer; drafts vLLM's Triton (2 rows), ...`."""
    said = []
    for kind, title in SHARED.items():
        fastest = (
            tables.best_rival(row, tables.our_names(run)) for row in run.rows if row.kind == kind
        )
        found = Counter(run.labels[best[0]] for best in fastest if best)
        names = [f"{name} ({n} of {found.total()} times)" for name, n in found.most_common()]
        if found:
            said.append(f"{title} {', '.join(found if len(found) == 1 else names)}")
    return "; ".join(said) or "not timed"
