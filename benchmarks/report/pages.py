"""README's performance section and docs/performance.md, from the records.

Nothing there is typed by hand. A family without a record says so, and a record of other kernels
than today's is called stale.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from qla_kernels.digests import recorded

from ..gdn.workloads import GDN
from ..harness.records import ROOT, Run
from ..sm90 import QUICK, SETS
from . import tables
from .texts import ASIDE, FAMILIES, GRAPHS, METHOD, WORKLOADS, batches

START, END = "<!-- performance:start -->", "<!-- performance:end -->"
NOTICE = "<!-- written by `python -m benchmarks.report` from benchmarks/results; do not edit -->"
FIGURES = Path("docs/figures")

Digests = dict[str, str]  # of generated code, by the kernel's label


def headline(runs: Sequence[Run], family: str, digests: Digests) -> Run | None:
    """The GPU record to show first, of the family's quick set, less what is aside.

    Among those with as many rows the one with most implementations: a lone rival is easily beaten.
    """
    quick = _quick(family)
    elsewhere = {name for of_set in ASIDE[family] for name in _names(family, of_set)} - quick
    found = _of_newest_kernels(runs, family, quick, len(quick), digests)
    if not found:
        return None
    best = max(reversed(found), key=lambda run: (_count(run, quick), len(run.labels)))
    return _with_rows(best, lambda name: name not in elsewhere)


def aside(runs: Sequence[Run], family: str, of_set: str, digests: Digests) -> Run | None:
    """The set's rows, of the newest GPU record with most of those that are not quick."""
    names = _names(family, of_set)
    wanted = names - _quick(family)
    most = max((_count(run, wanted) for run in _on_a_gpu(runs, family)), default=0)
    if not most:
        return None
    found = _of_newest_kernels(runs, family, wanted, most, digests)
    best = max(reversed(found), key=lambda run: _count(run, wanted))
    return _with_rows(best, names.__contains__)


def _on_a_gpu(runs: Sequence[Run], family: str) -> list[Run]:
    return [run for run in runs if run.family == family and run.device_kind == "cuda"]


def _of_newest_kernels(
    runs: Sequence[Run], family: str, names: set[str], most: int, digests: Digests
) -> list[Run]:
    """GPU records with half of `most` rows at least: of today's kernels, or the newest before."""
    many = [run for run in _on_a_gpu(runs, family) if 2 * _count(run, names) >= most]
    if current := [run for run in many if run.current(digests)]:
        return current
    return [run for run in many if run.agrees(many[-1])]


def _count(run: Run, names: set[str]) -> int:
    return len(names & {row.name for row in run.rows})


def _quick(family: str) -> set[str]:
    return {name for quick in QUICK[family] for name in _names(family, quick)}


def _names(family: str, of_set: str) -> set[str]:
    return {workload.name for workload in SETS[family][of_set]}


def _with_rows(run: Run, belongs: Callable[[str], bool]) -> Run:
    return replace(run, rows=tuple(row for row in run.rows if belongs(row.name)))


def readme_section(runs: Sequence[Run], digests: Digests) -> str:
    parts = [NOTICE, GRAPHS]
    for family, title in FAMILIES.items():
        run = headline(runs, family, digests)
        parts.append(f"**{title}.** {_headline_text(run, family, digests)}")
        if run is not None:
            parts += [_counts(run), *filter(None, [_by_heads(run)])]
            parts += _pictures("", f"{family}-fwd*latency")
    page = "[docs/performance.md](docs/performance.md)"
    parts.append(f"All rows, errors and how they were measured: {page}.")
    return "\n\n".join(parts)


def performance_page(runs: Sequence[Run], digests: Digests) -> str:
    parts = ["# Performance", NOTICE, METHOD]
    for family, title in FAMILIES.items():
        run = headline(runs, family, digests)
        parts += [f"## {title}", _headline_text(run, family, digests)]
        if run is not None:
            parts += _measured(run, *(f"{family}-{kind}-*" for kind in kinds_of(run)))
        for of_set, heading in ASIDE[family].items():
            other = aside(runs, family, of_set, digests)
            if other is not None:
                parts += [f"### {heading}", _headline_text(other, family, digests)]
                parts += _measured(other, f"{family}-{of_set}")
        without = _without_gpu(runs, family)
        if without is not None:
            parts += ["### Without a GPU", without]
    parts += ["## Records", _list_of(runs, digests)]
    parts += ["## Workloads", WORKLOADS, _sets(), batches()]
    return "\n\n".join(parts) + "\n"


def kinds_of(run: Run) -> list[str]:
    return sorted({row.kind for row in run.rows})


def _measured(run: Run, *figures: str) -> list[str]:
    every = f"<details><summary>Every measurement</summary>\n\n{tables.details(run)}\n\n</details>"
    return [tables.page(run), *_pictures("docs", *figures), _provenance(run), every]


def _headline_text(run: Run | None, family: str, digests: Digests) -> str:
    command = f"`python -m benchmarks.sm90 {family} --quick --save`"
    if run is None:
        return f"No record on an SM90 GPU yet: {command} on one makes it."
    text = [f"Record `{run.id}`, {run.device}, {run.date[:10]}, commit {run.commit[:10]}"]
    text.append("with uncommitted changes." if run.dirty else "as committed.")
    if launched := run.environment.get("our_kernels"):
        text.append(f"Our kernels were {launched}.")
    if not run.current(digests):
        text.append(f"**Stale:** the kernels changed since. `{run.command}` measures today's.")
    if all(row.time_ms("ours") is None for row in run.rows):
        text.append("It holds the rivals only: this version has no kernel of ours for these rows.")
    return " ".join(text)


def _counts(run: Run) -> str:
    """How many rows are not slower than the best rival, as graphs and in eager calls."""
    said, ours = [], tables.our_names(run)
    for way, eager in (("CUDA graphs", False), ("eager calls", True)):
        found = [r for row in run.rows if (r := tables.ratio(row, ours, eager)) is not None]
        if found:
            fine, worst = sum(r >= 1 for r in found), tables.marked(min(found))
            said.append(f"{fine} of {len(found)} in {way} (worst ratio {worst})")
        else:
            said.append(f"– in {way}")
    return f"Rows not slower than the best rival: {', '.join(said)}."


def _by_heads(run: Run) -> str:
    """Geometric mean and worst row of best rival / ours, by direction and heads, graph and eager.

    Rows with a mask that no rival has also count beside the best rival without one.
    """
    ours, lines = tables.our_names(run), []
    for kind, heads in dict.fromkeys((row.kind, row.heads) for row in run.rows):
        rows = [row for row in run.rows if (row.kind, row.heads) == (kind, heads)]
        title, of_rows, of_masked = tables.title_of(kind), [], []
        for eager in (False, True):
            dense = tables.dense_times(rows, ours, eager)
            masked = [row for row in rows if dense and row.what != "dense"]
            of_rows.append([tables.ratio(row, ours, eager) for row in rows])
            of_masked.append([tables.dense_ratio(row, dense, eager) for row in masked])
        for name, ways in ((title, of_rows), (f"{title}, rival dense", of_masked)):
            cells = [cell for ratios in ways for cell in _spread(ratios)]
            if any(ratio is not None for ratios in ways for ratio in ratios):
                lines.append([name, heads, *cells])
    if not lines:
        return ""
    header, columns = ["", "heads"], ["best rival / ours", "worst row", "slower rows"]
    for way in ("CUDA graphs", "eager calls"):
        header += [f"{way}: rows", *columns]
    return tables.markdown(header, lines, left=2)


def _spread(ratios: Sequence[float | None]) -> list[str]:
    """Rows that have a ratio, its geometric mean, the worst, and how many are below 1."""
    found = [r for r in ratios if r is not None]
    if not found:
        return ["–"] * 4
    slower = str(sum(r < 1 for r in found))
    mean = tables.geometric_mean(found)
    return [f"{len(found)} of {len(ratios)}", f"{mean:.2f}", tables.marked(min(found)), slower]


def _pictures(seen_from: str, *patterns: str) -> list[str]:
    """Committed figures, linked from a page in that folder of the repository."""
    folder = ROOT / FIGURES
    found = [path for pattern in patterns for path in sorted(folder.glob(f"{pattern}.svg"))]
    return [f"![{path.stem}]({path.relative_to(ROOT / seen_from)})" for path in found]


def _provenance(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    states = [
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in state.items())
        for state in (run.environment, run.environment_after)
    ]
    return "\n".join([
        f"- Command: `{run.command}`", f"- Versions: {versions}", f"- Before: {states[0]}",
        f"- After: {states[1]}", f"- Kernels: {len(run.kernels) or 'not named'}",
    ])  # fmt: skip


def _without_gpu(runs: Sequence[Run], family: str) -> str | None:
    """The path for CPU tensors at a real length, from the newest record that has it."""
    if family != "gdn":
        return None
    (workload,) = GDN["cpu"]
    for run in reversed([run for run in runs if run.device_kind == "cpu"]):
        for row in run.rows:
            if row.name == workload.name and (time := row.time_ms("ours")) is not None:
                what = f"{row.tokens} tokens, {row.heads} heads of {workload.head_dim}, float32"
                where = f"{run.device} (record `{run.id}`)"
                return f"Forward of {what}: {time / 1e3:.2g} s on {where}."
    return None


def _list_of(runs: Sequence[Run], digests: Digests) -> str:
    if not runs:
        return "None yet."
    lines = []
    for run in reversed(runs):
        state = "current" if run.current(digests) else "stale"
        commit = run.commit[:10] + (" and changes" if run.dirty else "")
        lines.append([f"`{run.id}`", run.device, run.date[:10], commit, state, str(len(run.rows))])
    return tables.markdown(["record", "device", "date", "commit", "kernels", "rows"], lines, left=5)


def _sets() -> str:
    lines = []
    for family in FAMILIES:
        for name, workloads in SETS[family].items():
            kinds = Counter(w.kind for w in workloads)
            rows = ", ".join(f"{count} {tables.title_of(k).lower()}" for k, count in kinds.items())
            lines.append([family, f"`{name}`", ", ".join({w.what: 0 for w in workloads}), rows])
    return tables.markdown(["family", "set", "inputs", "rows"], lines, left=4)


def between_markers(text: str, body: str) -> str:
    """`text` with what stands between the markers replaced."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md lacks {START} or {END}; put both where the section belongs")
    return f"{before}{START}\n{body}\n{END}{after}"


def texts(runs: Sequence[Run]) -> dict[Path, str]:
    """What each generated file has to contain."""
    digests = recorded()
    readme = ROOT / "README.md"
    return {
        readme: between_markers(readme.read_text(), readme_section(runs, digests)),
        ROOT / "docs" / "performance.md": performance_page(runs, digests),
    }
