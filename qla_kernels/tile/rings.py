"""Allocates a schedule's barriers, and the rings that they guard, in one call."""

from collections.abc import Mapping
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.tile.record import Record, named
from qla_kernels.tile.ring import Ring, RingInTurns
from qla_kernels.tile.schedule import Schedule


def rings(plan: Schedule, slots: Mapping[str, int] | None = None) -> Any:
    """Returns a record with the ring of each datum, or its one barrier, by the datum's name.

    A datum with the barriers `<datum>_full` and `<datum>_free` is a `Ring`. A datum with a single
    barrier, such as `tail_full` of slots that nobody frees, is that barrier. Barriers of a datum
    that has others, such as `kv_landed`, are there under their own names. All are allocated in the
    order of `plan.rings`, then of `plan.barriers`, and those of others before `full` and `free`.

    Args:
        slots: the slots of a ring whose consumers use them in turn, a `RingInTurns`; `plan.rings`
            has the number of its turns.
    """
    if unknown := set(slots or ()) - set(plan.rings):
        raise ValueError(
            f"slots of {', '.join(sorted(unknown))}; the schedule has the rings "
            f"{', '.join(plan.rings)}: name one of them"
        )
    events: dict[str, list[str]] = {datum: [] for datum in plan.rings}
    for barrier in plan.barriers:
        datum, _, event = barrier.rpartition("_")
        events.setdefault(datum, []).append(event)
    by_datum = {}
    for datum, names in events.items():
        if sorted(names) == ["free", "full"]:
            full, free = _barrier(plan, f"{datum}_full"), _barrier(plan, f"{datum}_free")
            stages = plan.slots(f"{datum}_full")
            if slots and datum in slots:
                by_datum[datum] = RingInTurns(full, free, slots[datum], stages)
            else:
                by_datum[datum] = Ring(full, free, stages)
        elif len(names) == 1:
            by_datum[datum] = _barrier(plan, f"{datum}_{names[0]}")
        else:
            names.sort(key=("full", "free").__contains__)
            barriers = [f"{datum}_{event}" for event in names]
            by_datum |= {barrier: _barrier(plan, barrier) for barrier in barriers}
    return Record(**by_datum)


def _barrier(plan: Schedule, name: str) -> Any:
    return named(name, T.alloc_barrier([plan.arrivals(name)] * plan.slots(name)))
