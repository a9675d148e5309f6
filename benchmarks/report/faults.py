"""Times on record that are not of what their rows say, left out of every page."""

from dataclasses import replace

from ..harness.records import Result, Row, Run

BACKWARD = "2026-11-23T12"  # from here on FlashQLA's backward takes what its forward keeps


def without(run: Run) -> Run:
    """The run less graph times of rivals' backward alone, if FlashQLA computed more than in a step.

    Its public function keeps the segments of a forward for the backward. Until then
    graphs had its low-level backward without them, which computes them again. Eager calls and both
    directions together were of the public function, as they should. Without the best rival's time
    a row has no ratio.
    """
    if run.family != "gdn" or run.date >= BACKWARD or "flash_qla" not in run.labels:
        return run
    return replace(run, rows=tuple(map(_without_graphs, run.rows)))


def _without_graphs(row: Row) -> Row:
    if row.kind != "bwd":
        return row
    return replace(row, results=tuple(map(_eager_alone, row.results)))


def _eager_alone(result: Result) -> Result:
    if result.implementation.startswith("ours"):
        return result
    return replace(result, p20_ms=None, p50_ms=None, p80_ms=None, samples=0)
