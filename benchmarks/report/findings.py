"""docs/performance.md: definitions first, then what the records say about each family."""

import re
from collections.abc import Iterable, Sequence

from ..harness.records import Result, Row, Run
from . import models, ranks, serving, tables
from .figures import WHOLE, gain, rival_of, short, steps
from .gains import heads_of
from .headline import (
    NOTICE,
    choice_of_lines,
    compared,
    provenance,
    source,
    times,
    two_groups,
)
from .method import METHOD
from .names import BATCHES, batch, gpu, shape_of, title_of
from .pictures import FIGURES, RESPONSES, shown
from .select import Digests, aside, headline, newest
from .slower import beside_the_headline, slower
from .spread import beside, spread
from .texts import (
    CONVOLUTION,
    EXACT,
    FINDINGS,
    HYBRID_NOTE,
    MODELS_NOTE,
    MORE_TERMS,
    RING_NOTE,
    SHARED_NOTE,
    SPARSE_GRID,
    SPARSE_NOTE,
    STALE_ROWS,
    TERMS,
)

KINDS = ("fwd", "bwd", "both")  # of rows that training has


def page(runs: Sequence[Run], digests: Digests) -> str:
    parts = ["# Performance", NOTICE, FINDINGS, "## Words", TERMS + "\n" + MORE_TERMS]
    summary = [
        times(runs, digests),
        two_groups(runs, digests),
        slower(runs, digests),
        provenance(runs, digests),
    ]
    parts += ["## In one table", *filter(None, summary)]
    parts += ["## Gated delta net", *_gdn(runs, digests)]
    parts += _models(runs, digests)
    parts += serving.section(runs, digests)
    parts += ["## Shared prompts", *_shared(runs, digests)]
    parts += ["## Sparse attention", *_sparse(runs, digests)]
    parts += _convolution(runs, digests)
    parts += ["## How it is measured", METHOD]
    return "\n\n".join(parts).replace("](docs/", "](") + "\n"


def _gdn(runs: Sequence[Run], digests: Digests) -> list[str]:
    front, body = headline(runs, "gdn", digests), []
    for what, kind, run, rows in beside_the_headline(runs):
        ways = [spread(_ratios(run, rows, eager)) for eager in (False, True)]
        if not any(ways):  # no rival was timed
            continue
        rivals = ", ".join(v for n, v in run.labels.items() if not n.startswith("ours"))
        cells = [s.said if s else "–" for s in ways]
        shapes = f"{timed} of {len(rows)}" if 0 < (timed := compared(run, rows)) < len(rows) else ""
        when = _when(run, digests)
        body.append([what, title_of(kind).lower(), shapes or str(len(rows)), rivals, when, *cells])
    header = ["what", "operation", "shapes", "rivals", "record", "graph: mean (least to most)"]
    header.append("eager")
    parts = shown(runs, digests, "figures/", *FIGURES["gdn"])
    if body:
        parts.append(tables.markdown(header, body, left=5))
    others = _on_another_gpu(runs, front, digests)
    said = [STALE_ROWS if any("stale" in line[4] for line in body) else "", *others[:1]]
    parts += [" ".join(filter(None, said)), *others[1:]]
    parts.append(
        "\n".join([*_beside_fla(front), *_segments(runs, digests), *_memory(runs, digests)])
    )
    return [part for part in (*parts, *ranks.several_gpus(runs, digests)) if part]


def _when(run: Run, digests: Digests) -> str:
    return f"{gpu(run)}, {run.date[:10]}, {run.id[-4:]}" + (
        "" if run.current(digests) else ", stale"
    )


def _on_another_gpu(runs: Sequence[Run], front: Run | None, digests: Digests) -> list[str]:
    """Rows of the front page's kinds that another GPU ran, from its newest record of a group.

    Records with a line of their own are left out.
    """
    known = {section.run.id for section in beside_the_headline(runs) if section.kind in KINDS}
    found: dict[tuple[str, str, str], tuple[Run, list[Row]]] = {}
    for run in reversed(runs):
        if run.family != "gdn" or run.device_kind != "cuda" or gpu(run) == (front and gpu(front)):
            continue
        if run.id in known:
            continue
        of_run: dict[tuple[str, str, str], list[Row]] = {}
        for row in run.rows:
            sizes = re.search(r"-d(\d+)(?:x(\d+))?$", row.name)
            size = f" of {sizes[1]}/{sizes[2] or sizes[1]}" if sizes else ""
            if row.kind in KINDS and any(gain(run, row, eager) for eager in (False, True)):
                of_run.setdefault((row.kind, row.heads, size), []).append(row)
        for key, rows in of_run.items():
            if len(rows) > 1:
                found.setdefault(key, (run, rows))
    body = []
    for (kind, heads, size), (run, rows) in sorted(
        found.items(), key=lambda x: KINDS.index(x[0][0])
    ):
        ways = [spread(_ratios(run, rows, eager)) for eager in (False, True)]
        rivals = dict.fromkeys(short(x[0]) for row in rows if (x := rival_of(run, row, False)))
        cells = [s.said if s else "–" for s in ways]
        what = f"{title_of(kind).lower()}, {heads} heads{size}"
        body.append([what, str(len(rows)), ", ".join(rivals), _when(run, digests), *cells])
    if front is None or not body:
        return []
    header = ["on another GPU", "shapes", "fastest rivals", "record"]
    header += ["graph: mean (least to most)", "eager"]
    said = f"Times above are of an {gpu(front)} where nothing else stands. Of other GPUs:"
    return [said, tables.markdown(header, body, left=4)]


def _ratios(run: Run, rows: Iterable[Row], eager: bool) -> list[float | None]:
    ours = tables.our_names(run)
    return [tables.ratio(row, ours, eager) for row in rows]


def _beside_fla(run: Run | None) -> list[str]:
    """Its users have its own kernels, not the best rival."""
    lines = []
    for kind in ("fwd", "both") if run else ():
        assert run is not None
        rows = [row for row in run.rows if row.kind == kind]
        ways = []
        for eager in (False, True):
            ways.append(beside(rows, "fla", eager))
        if ways[0] and ways[1]:
            said = f"graphs {ways[0].said}, eager calls {ways[1].said}"
            where = f"{gpu(run)}, {run.date[:10]}"
            what = f"{title_of(kind).lower()}, {heads_of(rows)} heads, {where}"
            lines.append(f"- Beside FLA's own kernels, {what}: {said}.")
    return lines


def _segments(runs: Sequence[Run], digests: Digests) -> list[str]:
    """What cutting gains, and what exactness costs."""
    lines = []
    for kind, least, title in (("fwd", 20, "forward"), ("bwd", 12, "backward")):
        run = newest(runs, "gdn", "segments", kind, least)
        cut, exact = (beside(run.rows if run else (), x) for x in ("ours_whole", "ours_exact"))
        if run is None or cut is None:
            continue
        said = f"- Cut into segments, the {title} of few heads is {cut.said} as fast as uncut."
        if exact is not None:
            rows = [row for row in run.rows if row.time_ms("ours_exact")]
            said += f" `exact=True` takes {exact.said} of the default's time ({heads_of(rows)} "
            said += "heads of 128)."
        lines.append(f"{said} {source(run, digests)}.")
    return [*lines, EXACT] if lines else []


def _memory(runs: Sequence[Run], digests: Digests) -> list[str]:
    run = headline(runs, "gdn", digests)
    rows = [row for row in run.rows if row.kind == "both"] if run else []
    if run is None or not rows:
        return []
    row = max(rows, key=lambda row: row.tokens)
    peaks = [(run.labels[r.implementation], r.peak_bytes) for r in row.results if r.peak_bytes]
    said = ", ".join(f"{name} {gib(peak)}" for name, peak in peaks)
    return [
        f"- Memory beyond the inputs, forward and backward, {row.heads} heads, "
        f"{shape_of(row)}: {said}."
    ]


def gib(peak: int) -> str:
    return f"{peak / 2**30:.2f} GiB"


def _shared(runs: Sequence[Run], digests: Digests) -> list[str]:
    parts = [_batches(runs, digests), *shown(runs, digests, "figures/", *FIGURES["dualkv"])]
    lines = []
    layer = aside(runs, "dualkv", "layer", digests)
    for row in layer.rows if layer else ():
        whole, mine = row.time_ms(WHOLE["dualkv"]), row.time_ms("ours")
        if layer is not None and whole and mine:
            lines.append(
                f"- A decoder layer of Qwen3-8B, forward and backward, batch {row.layout}: "
                f"{tables.number(mine)} ms packed, {tables.number(whole)} ms on whole sequences: "
                f"{whole / mine:.2f} x. {source(layer, digests)}."
            )
    hybrid = shown(runs, digests, "figures/", *FIGURES["hybrid"])
    parts.append("\n".join([*lines, *([] if hybrid else [HYBRID_NOTE])]))
    parts += [*hybrid, *shown(runs, digests, "figures/", RESPONSES), SHARED_NOTE]
    return [part for part in parts if part]


def _models(runs: Sequence[Run], digests: Digests) -> list[str]:
    found = [headline(runs, "model", digests), aside(runs, "model", "fla", digests)]
    body = [line for run in found for line in models.lines(run)]
    if not body:
        return []
    header = ["layers", "tokens", "ours, ms", "FLA and causal-conv1d / ours", "FLA / ours"]
    header += ["FLA / our rule alone", "PyTorch alone / ours"]
    where = "; ".join(dict.fromkeys(source(run, digests) for run in found if run))
    table = tables.markdown(header, body, left=2)
    return ["## Models in training", table, f"{MODELS_NOTE} {where}."]


def _convolution(runs: Sequence[Run], digests: Digests) -> list[str]:
    """Beside a copy of as many bytes, and beside causal-conv1d where that was timed."""
    run = headline(runs, "conv", digests)
    said = []
    for kind in ("fwd", "bwd") if run else ():
        assert run is not None
        times = [(row.floor_ms, row.time_ms("ours")) for row in run.rows if row.kind == kind]
        if shares := sorted(floor / time for floor, time in times if time):
            ends = " to ".join(dict.fromkeys(f"{100 * x:.0f}" for x in (shares[0], shares[-1])))
            said.append(f"{title_of(kind).lower()} {ends} % of a copy's speed")
        rival = beside([row for row in run.rows if row.kind == kind], "causal_conv1d")
        if rival:
            said[-1] += f", {rival.said} as fast as causal-conv1d, {rival.shapes} rows"
    if run is None or not said:
        return []
    text = f"{CONVOLUTION} {'; '.join(said)}; {len(run.rows)} rows. {source(run, digests)}."
    return ["## Causal convolution", text]


def _batches(runs: Sequence[Run], digests: Digests) -> str:
    """Each batch in words, with the times of a step beside whole sequences and three calls."""
    found: dict[str, tuple[Run, Row]] = {}
    for run in (headline(runs, "dualkv", digests), aside(runs, "dualkv", "short", digests)):
        found |= {row.layout: (run, row) for row in steps(run)} if run else {}
    body = []
    for label, groups in BATCHES.items():
        whole = sum(p + r for p, responses in groups for r in responses)
        packed = sum(p + sum(responses) for p, responses in groups)
        cells = ["–"] * 4
        if label in found:
            _, row = found[label]
            mine, theirs = row.time_ms("ours"), row.time_ms(WHOLE["dualkv"])
            calls = row.time_ms("fa4_shared")
            cells = [tables.number(mine), _times(theirs, mine), _times(calls, mine), _peaks(row)]
        body.append([f"{label}: {batch(groups)}", f"{whole / packed:.2f} x", *cells])
    header = [
        "batch", "fewer tokens", "ours, forward + backward, ms", "whole sequences / ours",
        "3 calls a group / ours", "peak memory, whole / ours",
    ]  # fmt: skip
    text = tables.markdown(header, body)
    sources = list(dict.fromkeys(source(run, digests) for run, _ in found.values()))
    return f"{text}\n\nCUDA graphs. {'; '.join(sources) or 'No record yet'}."


def _times(theirs: float | None, mine: float | None) -> str:
    return tables.marked(theirs / mine if theirs and mine else None)


def _peaks(row: Row) -> str:
    def peak(result: Result | None) -> int:
        return (result.peak_bytes or 0) if result else 0

    mine, theirs = peak(row.result("ours")), peak(row.result(WHOLE["dualkv"]))
    return f"{gib(theirs)} / {gib(mine)}" if mine and theirs else "–"


def _sparse(runs: Sequence[Run], digests: Digests) -> list[str]:
    parts = shown(runs, digests, "figures/", *FIGURES["sparse_ring"])
    if note := choice_of_lines(runs, digests):
        parts.append(note)
    if aside(runs, "sparse_ring", "grid", digests) is not None:
        parts.append(SPARSE_GRID)
    return [*parts, SPARSE_NOTE, RING_NOTE]
