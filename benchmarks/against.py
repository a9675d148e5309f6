"""A run beside the newest times on record: what `benchmarks.sm90 --against` prints."""

from collections.abc import Sequence
from itertools import product

from .harness.records import Row, Run
from .tables import SLOWER, markdown, number


def compared(run: Run, before: Sequence[Run], threshold: float) -> tuple[str, int]:
    """Each time of a run over the newest of the same row, implementation and device on record.

    Returns a table, and 1 if one of ours is slower by more than `threshold` per cent, 2 if there is
    nothing to compare with.
    """
    older = [of for of in reversed(before) if of.device == run.device and of.id != run.id]
    body, slower, of = [], False, {True: "eager", False: "graph"}
    for row, name, eager in product(run.rows, run.labels, of):
        new, known = row.time_ms(name, eager), [(x, _row(x, row.name)) for x in older]
        times = [(x, y.time_ms(name, eager)) for x, y in known if y]
        if new and (found := next(((x, old) for x, old in times if old), None)):
            wrong = name.startswith("ours") and new > found[1] * (1 + threshold / 100)
            slower |= wrong
            ratio = f"{new / found[1]:.3f}{f' {SLOWER}' * wrong}"
            cells = row.name, run.labels[name], of[eager], number(found[1]), number(new), ratio
            body.append([*cells, found[0].id[-4:]])
    if not body:
        return f"nothing to compare with: no record of these rows on {run.device}; need one", 2
    header = ["row", "by", "calls", "before, ms", "now, ms", "now / before", "record"]
    return f"\n{markdown(header, body, left=3)}\n", int(slower)


def _row(run: Run, name: str) -> Row | None:
    return next((row for row in run.rows if row.name == name), None)
