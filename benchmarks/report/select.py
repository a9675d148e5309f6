"""The record that each section of the pages is about."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from qla_kernels.gdn.shapes import VALUE_KERNELS, key_room, leaves_values

from ..harness.records import Row, Run
from ..sm90 import QUICK, SETS
from . import tables
from .texts import ASIDE

OLMO, FLAS = (96, 192), (256, 512)  # head sizes of OLMo Hybrid, and FLA's default
Digests = dict[str, str]  # of generated code, by the kernel's label


class Section(NamedTuple):
    """Rows of one kind that a line is about."""

    what: str
    kind: str
    run: Run
    rows: list[Row]


def headline(runs: Sequence[Run], family: str, digests: Digests) -> Run | None:
    """The GPU record to show first, of the family's quick set, less what is aside.

    Among those with as many rows the one with most implementations: a lone rival is easily beaten.
    """
    quick = _quick(family)
    elsewhere = {name for of_set in ASIDE[family] for name in names_of(family, of_set)} - quick
    found = _of_newest_kernels(runs, family, quick, len(quick), digests)
    if not found:
        return None
    best = max(reversed(found), key=lambda run: (_count(run, quick), len(run.labels)))
    return _with_rows(best, lambda name: name not in elsewhere)


def aside(runs: Sequence[Run], family: str, of_set: str, digests: Digests) -> Run | None:
    """The set's rows, of the newest GPU record with most of those that are of this set alone."""
    names = names_of(family, of_set)
    others = (names_of(family, other) for other in ASIDE[family] if other != of_set)
    wanted = names - _quick(family).union(*others)
    most = max((_count(run, wanted) for run in on_a_gpu(runs, family)), default=0)
    if not most:
        return None
    found = _of_newest_kernels(runs, family, wanted, most, digests)
    best = max(reversed(found), key=lambda run: _count(run, wanted))
    return _with_rows(best, names.__contains__)


def newest(
    runs: Sequence[Run], family: str, of_set: str, kind: str, most: int, rivals: bool = False
) -> Run | None:
    """The newest GPU record with at least so many of the set's rows of a kind, and these rows.

    With `rivals`, of those that timed others than ours.
    """
    names = names_of(family, of_set)
    for run in reversed(on_a_gpu(runs, family)):
        if rivals and len(tables.our_names(run)) == len(run.labels):
            continue
        rows = tuple(row for row in run.rows if row.name in names and row.kind == kind)
        if len(rows) >= most:
            return replace(run, rows=rows)
    return None


def of_sizes(runs: Sequence[Run], K: int, V: int) -> dict[str, Run]:
    """Forward and backward of heads of K/V: two shapes each, of the newest runs."""
    found = {kind: newest(runs, "gdn", f"sizes:d{K}x{V}", kind, 2) for kind in ("fwd", "bwd")}
    return {
        kind: run
        for kind, run in found.items()
        if run and any(row.time_ms("fla", eager) for row in run.rows for eager in (False, True))
    }


def on_a_cpu(runs: Sequence[Run]) -> list[Run]:
    """Newest first."""
    return [run for run in reversed(runs) if run.device_kind == "cpu"]


def on_a_gpu(runs: Sequence[Run], family: str) -> list[Run]:
    return [run for run in runs if run.family == family and run.device_kind == "cuda"]


def _of_newest_kernels(
    runs: Sequence[Run], family: str, names: set[str], most: int, digests: Digests
) -> list[Run]:
    """GPU records with half of `most` rows at least: of today's kernels, or the newest before."""
    many = [run for run in on_a_gpu(runs, family) if 2 * _count(run, names) >= most]
    if current := [run for run in many if run.current(digests)]:
        return current
    return [run for run in many if run.agrees(many[-1])]


def _count(run: Run, names: set[str]) -> int:
    return len(names & {row.name for row in run.rows})


def _quick(family: str) -> set[str]:
    return {name for quick in QUICK[family] for name in names_of(family, quick)}


def names_of(family: str, of_set: str) -> set[str]:
    """Names of a set's rows; `sizes:d96x192` are those that end so."""
    of_set, _, end = of_set.partition(":")
    return {workload.name for workload in SETS[family][of_set] if workload.name.endswith(end)}


def _with_rows(run: Run, belongs: Callable[[str], bool]) -> Run:
    return replace(run, rows=tuple(row for row in run.rows if belongs(row.name)))


def lacks_values(run: Run, K: int, V: int) -> bool:
    """Whether backwards of these sizes run `VALUE_KERNELS` today, and ran others on this record.

    Digests do not tell: the kernels that ran then are as they were.
    """
    label = f"gdn.{VALUE_KERNELS[-1]}-bf16-k{key_room(K)}"
    return leaves_values(K, V) and bool(run.kernels) and label not in run.kernels
