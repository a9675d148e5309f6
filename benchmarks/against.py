"""A run beside the newest times on record: what `benchmarks.sm90 --against` prints."""

from collections.abc import Sequence
from itertools import product

from .harness.records import Run
from .tables import SLOWER, markdown, number

HEADER = ("row", "by", "calls", "before, ms", "now, ms", "now / before", "record")


def compared(run: Run, before: Sequence[Run], threshold: float) -> tuple[str, int]:
    """Each time of a run over the newest of the same row, implementation and device on record.

    Returns a table, and 1 if one of ours is slower by more than `threshold` per cent, 2 if there is
    nothing to compare with.
    """
    older = [(of, row) for of in before for row in of.rows if of.device == run.device]
    older = [(of, row) for of, row in older if of.id != run.id][::-1]
    body, slower = [], False
    for row, name, eager in product(run.rows, run.labels, (False, True)):
        new, result = row.time_ms(name, eager), row.result(name)
        found = [(of, old.time_ms(name, eager)) for of, old in older if old.name == row.name]
        of, old = next(((of, old) for of, old in found if old), (run, None))
        if result and new and old:
            wrong = name.startswith("ours") and new > old * (1 + threshold / 100)
            slower |= wrong
            calls = "eager" if eager else "graph" if result.graph else "timed"
            ratio = f"{new / old:.3f}{f' {SLOWER}' * wrong}"
            cells = [row.name, run.labels[name], calls, number(old), number(new), ratio]
            body.append([*cells, of.id[-4:]])
    if not body:
        return f"nothing to compare with: no record of these rows on {run.device}; need one", 2
    return f"\n{markdown(HEADER, body, left=3)}\n", int(slower)
