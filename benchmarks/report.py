"""Writes README's performance section, docs/performance.md and its figures from the records.

    python -m benchmarks.report            write all three
    python -m benchmarks.report --check    exit 1 if the texts are not what the records say

Nothing there is typed by hand. A family without a record says so, and a record of other kernels
than today's is called stale.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from . import records, tables
from .records import ROOT, Run
from .sm90 import QUICK, SETS
from .workloads import GDN

START, END = "<!-- performance:start -->", "<!-- performance:end -->"
NOTICE = "<!-- written by `python -m benchmarks.report` from benchmarks/results; do not edit -->"
FIGURES = Path("docs/figures")
FAMILIES = {
    "gdn": "Gated delta net",
    "dualkv": "Attention over shared prompts",
    "sparse_ring": "Vertical-slash attention",
}

Fingerprint = Callable[[str], str]

METHOD = """\
Every result is checked before it is timed. A gated delta net: against the chunked algorithm in
fp64 over all heads on a GPU, against the token loop in fp64 without one. Attention: against its
definition in fp32 on a GPU, of the first and the last key head where there are more than 32768
tokens. An index: by the share of attention that its lines hold, beside what the definition's
lines hold. Times are medians over replays of CUDA graphs, in bursts of 20 ms that alternate
between implementations with the device idle in between, because a GPU under sustained load lowers
its clock. Input sets rotate so that no call finds its inputs in the L2 cache. Layouts and gates
that a library wants otherwise are converted outside the timed region. The floor is the larger of
counted FLOPs over the rate of a large matrix product and of bytes (inputs once, outputs once) over
the rate of a large copy, both measured in the same run. `eager` is the time through the public
Python function; `first call` includes compilation where no cache had it."""

WORKLOADS = """\
`python -m benchmarks.sm90 gdn --set NAME,...` runs the sets below, `--list` prints their
workloads, `--quick` means `anchors`. `--warm 8` only compiles, in eight processes, so that the
run after it finds everything cached; `--cold` fills the L2 cache with other data before each
call. Gates are `model` (-exp(A_log) softplus(a + dt_bias), from hardly any to nearly total decay)
or `published` (as FlashQLA publishes with: logsigmoid(x) / 16, and 0 for a quarter of the heads).
Heads are key heads / value heads, of size 128. `8192x4` is four sequences of 8192 tokens, and
`64 of 2` is 64 sequences of two.

`forward` is every head configuration at every length, `backward` training's, `short` rollouts of
many short sequences. `filled` has the rows whose sequences and heads fill the GPU without cutting
any, `segments` single sequences of few heads, which are cut; `--impl ours,ours_whole` times them
uncut, too. `decode` is `fused_recurrent_gated_delta_rule` on batches of a few tokens, with fp32
states given and returned, nearly all of its bytes. `kernels` times single kernels.

Attention has 32 query and 8 key heads of size 128. `dualkv` rows are groups of responses, each with
one prompt: `long` prompts of 4096 to 32768 tokens (A to D), `short` batches (S1 to S8), `dense`
sequences that share nothing, and shapes that others published. `sparse_ring` rows are one sequence
under a mask of diagonals of 64-token blocks and of single columns, which are 15 % of it; `run4` has
diagonals that come in fours. `dense` has no mask, and `index` is the choice of lines.
`torchrun --nproc-per-node N -m benchmarks.ring` times rings of N GPUs, sparse and dense."""

# Sections of their own beside the headline's, each from the newest GPU record with such a row.
ASIDE: dict[str, Callable[[str], bool]] = {
    "Decoding": lambda kind: kind == "decode",
    "Kernels alone": lambda kind: kind not in tables.TITLES,
}


def headline(runs: Sequence[Run], family: str) -> Run | None:
    """The newest GPU record that has every row of the family's quick set."""
    wanted = {w.name for name in QUICK[family] for w in SETS[family][name]}
    complete = [
        run
        for run in runs
        if run.family == family and run.device_kind == "cuda"
        if wanted <= {row.name for row in run.rows}
    ]
    return complete[-1] if complete else None


def readme_section(runs: Sequence[Run], fingerprint: Fingerprint) -> str:
    parts = [NOTICE]
    for family, title in FAMILIES.items():
        run = headline(runs, family)
        parts.append(f"**{title}.** {_headline_text(run, family, fingerprint)}")
        if run is not None:
            parts += filter(None, [_by_heads(run)])
            parts += _pictures(_figures(run, "fwd*latency"), Path())
    page = "[docs/performance.md](docs/performance.md)"
    parts.append(f"All rows, errors and how they were measured: {page}.")
    return "\n\n".join(parts)


def performance_page(runs: Sequence[Run], fingerprint: Fingerprint) -> str:
    parts = ["# Performance", NOTICE, METHOD]
    for family, title in FAMILIES.items():
        run = headline(runs, family)
        parts += [f"## {title}", _headline_text(run, family, fingerprint)]
        if run is not None:
            parts += [tables.page(run), *_pictures(_figures(run), Path("docs"))]
            parts += [_provenance(run), _details(run)]
        for heading, belongs in ASIDE.items():
            aside = _newest_with(runs, family, belongs)
            if aside is not None and (run is None or aside.id != run.id):
                parts += [f"### {heading}", _headline_text(aside, family, fingerprint)]
                parts += [tables.page(aside), _provenance(aside)]
        without = _without_gpu(runs, family)
        if without is not None:
            parts += ["### Without a GPU", without]
    parts += ["## Records", _list_of(runs, fingerprint), "## Workloads", WORKLOADS, _sets()]
    return "\n\n".join(parts) + "\n"


def _headline_text(run: Run | None, family: str, fingerprint: Fingerprint) -> str:
    command = f"`python -m benchmarks.sm90 {family} --quick --save`"
    if run is None:
        return f"No record on an SM90 GPU yet: {command} on one makes it."
    text = [f"Record `{run.id}`, {run.device}, {run.date[:10]}, commit {run.commit[:10]}"]
    text.append("with uncommitted changes." if run.dirty else "as committed.")
    if run.fingerprint != fingerprint(family):
        text.append(f"**Stale:** the kernels changed since. `{run.command}` measures today's.")
    if all(row.time_ms("ours") is None for row in run.rows):
        text.append("It holds the rivals only: this version has no kernel of ours for these rows.")
    return " ".join(text)


def _by_heads(run: Run) -> str:
    """Geometric mean and worst row of best rival / ours, by direction and heads."""
    ours = tables.our_names(run)
    lines = []
    for kind, heads in dict.fromkeys((row.kind, row.heads) for row in run.rows):
        rows = [row for row in run.rows if (row.kind, row.heads) == (kind, heads)]
        found = [r for r in (tables.ratio(row, ours) for row in rows) if r is not None]
        mean = tables.geometric_mean(found)
        if mean is not None:
            slower = sum(r < 1 for r in found)
            worst = f"{min(found):.2f}{f' {tables.SLOWER}' if slower else ''}"
            title, counted = tables.title_of(kind), f"{len(found)} of {len(rows)}"
            lines.append([title, heads, counted, f"{mean:.2f}", worst, str(slower)])
    if not lines:
        return ""
    header = ["", "heads", "rows", "best rival / ours", "worst row", "slower rows"]
    return tables.markdown(header, lines, left=2)


def _figures(run: Run, pattern: str = "*") -> list[Path]:
    """The family's committed figures, as paths from the repository's root."""
    found = sorted((ROOT / FIGURES).glob(f"{run.family}-{pattern}.svg"))
    return [path.relative_to(ROOT) for path in found]


def _pictures(paths: Sequence[Path], seen_from: Path) -> list[str]:
    return [f"![{path.stem}]({path.relative_to(seen_from)})" for path in paths]


def _newest_with(runs: Sequence[Run], family: str, belongs: Callable[[str], bool]) -> Run | None:
    """The newest GPU record that has rows of these kinds, reduced to them."""
    for run in reversed(runs):
        rows = tuple(row for row in run.rows if belongs(row.kind))
        if rows and run.family == family and run.device_kind == "cuda":
            return replace(run, rows=rows)
    return None


def _provenance(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    states = [
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in state.items())
        for state in (run.environment, run.environment_after)
    ]
    return "\n".join([
        f"- Command: `{run.command}`", f"- Versions: {versions}", f"- Before: {states[0]}",
        f"- After: {states[1]}", f"- Fingerprint: `{run.fingerprint}`",
    ])  # fmt: skip


def _details(run: Run) -> str:
    return f"<details><summary>Every measurement</summary>\n\n{tables.details(run)}\n\n</details>"


def _without_gpu(runs: Sequence[Run], family: str) -> str | None:
    """The path for CPU tensors at a real length, from the newest record that has it."""
    if family != "gdn":
        return None
    workload = GDN["cpu"][0]
    for run in reversed(runs):
        for row in run.rows:
            time = row.time_ms("ours")
            if row.name == workload.name and run.device_kind == "cpu" and time is not None:
                return (
                    f"Forward of {row.tokens} tokens, {row.heads} heads of {workload.head_dim},"
                    f" float32: {time / 1e3:.2g} s on {run.device} (record `{run.id}`)."
                )
    return None


def _list_of(runs: Sequence[Run], fingerprint: Fingerprint) -> str:
    if not runs:
        return "None yet."
    lines = []
    for run in reversed(runs):
        state = "current" if run.fingerprint == fingerprint(run.family) else "stale"
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


def texts(runs: Sequence[Run], fingerprint: Fingerprint = records.fingerprint) -> dict[Path, str]:
    """What each generated file has to contain."""
    readme = ROOT / "README.md"
    return {
        readme: between_markers(readme.read_text(), readme_section(runs, fingerprint)),
        ROOT / "docs" / "performance.md": performance_page(runs, fingerprint),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    runs = records.load()
    if not options.check:
        _draw_figures(runs)
    different = [
        path for path, text in texts(runs).items() if not path.exists() or path.read_text() != text
    ]
    for path in different:
        name = path.relative_to(ROOT)
        if options.check:
            print(
                f"{name} is not what the records say: run `python -m benchmarks.report`",
                file=sys.stderr,
            )
        else:
            path.write_text(texts(runs)[path])
            print(f"wrote {name}")
    return 1 if options.check and different else 0


def _draw_figures(runs: Sequence[Run]) -> None:
    from .figures import draw

    for family in FAMILIES:
        run = headline(runs, family)
        if run is not None:
            (ROOT / FIGURES).mkdir(parents=True, exist_ok=True)
            for old in (ROOT / FIGURES).glob(f"{family}-*"):
                old.unlink()
            draw(run, ROOT / FIGURES)


if __name__ == "__main__":
    raise SystemExit(main())
