"""What the records say about serving: ours beside each rival, and drafts beside a decode step."""

from collections.abc import Sequence

from ..harness.records import Row, Run
from ..serving.workloads import PARALLEL
from . import tables
from .drafts import drafts
from .headline import source
from .names import shape_of
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
# who stands beside each kind under tensor parallelism: as an engine does it, and FlashInfer
BESIDE = {
    "pool_prefill": ("flashinfer_gathers", "flashinfer_pool"),
    "pool_decode": ("vllm", "sglang", "flashinfer_pool"),
    "drafts": ("vllm", "sglang"),
}
SHORT = {
    "flashinfer_gathers": "vLLM's way", "flashinfer_pool": "FlashInfer",
    "vllm": "vLLM", "sglang": "SGLang",
}  # fmt: skip


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
    return [
        "## Serving",
        SERVING_NOTE.format(prefill=_prompts(runs, digests)),
        table,
        last,
        *shared,
    ]


def _prompts(runs: Sequence[Run], digests: Digests) -> str:
    """The shapes of prefill without checkpoints, in words."""
    run = aside(runs, "gdn", "serving-prefill", digests)
    each = [f"{shape_of(row)} ({row.heads} heads)" for row in (run.rows if run else ())]
    return ", ".join(each) if each else "not measured yet"


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
    """A line for the heads of a layer and of each GPU that shares it; [] without a record."""
    run = aside(runs, "gdn", "serving-parallel", digests)
    if run is None:
        return []
    rows = {(row.heads, row.kind): row for row in run.rows}
    body = []
    for heads, count in PARALLEL.items():
        whole, own = ("/".join(str(n * many) for n in heads) for many in (count, 1))
        cells = [
            c for kind in BESIDE for c in _time_and_ratios(rows.get((own, kind)), BESIDE[kind])
        ]
        if any(cell != "–" for cell in cells):
            body.append([whole, str(count), own, *cells])
    header = ["heads of the layer", "GPUs", "on each"]
    for kind, rivals in BESIDE.items():
        header += [f"{SHARED[kind]}, ms", *(SHORT[name] for name in rivals)]
    return [SERVING_PARALLEL.format(source=source(run, digests)), tables.markdown(header, body)]


def _time_and_ratios(row: Row | None, rivals: Sequence[str]) -> list[str]:
    """Of CUDA graphs: ours, and each rival's time over it."""
    mine = row.time_ms("ours") if row else None
    if row is None or mine is None:
        return ["–"] * (1 + len(rivals))
    ratios = [time / mine if (time := row.time_ms(name)) else None for name in rivals]
    return [tables.number(mine), *map(tables.marked, ratios)]
