"""All generated texts: parts of README.md, docs/performance.md, and docs/records with raw tables.

Nothing there is typed by hand. A family without a record says so, and a record of other kernels
than today's is called stale.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qla_kernels.digests import recorded

from ..gdn.workloads import GDN
from ..harness.records import ROOT, Run
from ..sm90 import SETS
from . import faults, findings, ranks, tables
from .headline import NOTICE, front_page
from .method import WORKLOADS, YOUR_OWN
from .names import title_of
from .pictures import figures
from .select import Digests, aside, headline, on_a_cpu
from .texts import ASIDE, CHECKED, COLUMNS, FAMILIES, RECORDED, RECORDS, batches

FIGURES = ROOT / "docs" / "figures"
RECORDS_FOLDER = ROOT / "docs" / "records"


def texts(runs: Sequence[Run]) -> dict[Path, str]:
    """What each generated file has to contain."""
    runs = [*map(faults.without, runs)]
    digests, readme = recorded(), ROOT / "README.md"
    text = readme.read_text()
    for name, body in front_page(runs, digests).items():
        text = between_markers(text, name, body)
    found = {readme: text, ROOT / "docs" / "performance.md": findings.page(runs, digests)}
    found[RECORDS_FOLDER / "README.md"] = records_index(runs, digests)
    for family in FAMILIES:
        found[RECORDS_FOLDER / f"{family}.md"] = records_page(runs, family, digests)
    for name, chart in figures(runs, digests).items():
        found[FIGURES / f"{name}.svg"] = chart.svg()
    return found


def between_markers(text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of that name replaced."""
    first, last = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, start, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise ValueError(f"README.md lacks {first} or {last}; put both where the section belongs")
    return f"{before}{first}\n{body}\n{last}{after}"


def records_page(runs: Sequence[Run], family: str, digests: Digests) -> str:
    """Every measurement of a family that tables are made of."""
    parts = [f"# Records: {FAMILIES[family].lower()}", NOTICE, RECORDS]
    if family == "dualkv":
        parts += ["A to D and S1 to S8 are these batches:", batches()]
    run = headline(runs, family, digests)
    parts += ["## The quick set", _headline_text(run, family, digests)]
    if run is not None:
        parts += _measured(run)
    for of_set, heading in ASIDE[family].items():
        other = aside(runs, family, of_set, digests)
        if other is not None:
            parts += [f"## {heading}", _headline_text(other, family, digests), *_measured(other)]
    shared = ranks.records_of(runs) if family == "gdn" else []
    parts += ["## Several GPUs"] if shared else []
    for run in shared:
        parts += [_headline_text(run, family, digests), tables.page(run), _provenance(run)]
    without = _without_gpu(runs, family)
    if without is not None:
        parts += ["## Without a GPU", without]
    return "\n\n".join(parts) + "\n"


def records_index(runs: Sequence[Run], digests: Digests) -> str:
    pages = ", ".join(f"[{title.lower()}]({family}.md)" for family, title in FAMILIES.items())
    parts = ["# Records", NOTICE, RECORDED.format(pages=pages)]
    parts += ["## How it is measured", CHECKED, "## Columns", COLUMNS]
    parts += ["## All records", _list_of(runs, digests)]
    parts += ["## Your own times", YOUR_OWN, "## Workloads", WORKLOADS, _sets(), batches()]
    return "\n\n".join(parts) + "\n"


def measured(run: Run) -> str:
    """All that a record holds, for a terminal."""
    return "\n\n".join([tables.page(run), _provenance(run), tables.details(run)])


def _measured(run: Run) -> list[str]:
    every = f"<details><summary>Every measurement</summary>\n\n{tables.details(run)}\n\n</details>"
    return [tables.page(run), _provenance(run), every]


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
    ours = tables.our_names(run)
    if all(
        row.time_ms(name, way) is None for row in run.rows for name in ours for way in (False, True)
    ):
        text.append("It holds the rivals only: this version has no kernel of ours for these rows.")
    return " ".join(text)


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
    for run in on_a_cpu(runs):
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
            rows = ", ".join(f"{count} {title_of(k).lower()}" for k, count in kinds.items())
            lines.append([family, f"`{name}`", ", ".join({w.what: 0 for w in workloads}), rows])
    return tables.markdown(["family", "set", "inputs", "rows"], lines, left=4)
