"""Write docs/kernels.md from every kernel's schedule; with --check, only say whether it is current.

Needs TileLang, because kernel files import it; neither nvcc nor a GPU.
"""

import inspect
import sys
from pathlib import Path

from qla_kernels import jit
from qla_kernels.tile.schedule import Schedule

DOCUMENT = Path(__file__).parent.parent / "docs" / "kernels.md"

HEADER = """\
# Kernels

Generated from the schedules in the kernel files by `python scripts/schedules.py`; do not edit. The
static tests compile every variant and compare barriers, arrive counts, registers, shared memory and
instructions with these tables; `python -m qla_kernels.inspect` prints what they found.

A role is a group of consecutive warps. `regs` are registers per thread after `set_max_nreg`. A
number in brackets after a signal is how many threads arrive in a phase; without one, all of the
role do.
"""


def document() -> str:
    return "\n".join([HEADER, *map(section, jit.kernel_modules())])


def section(kernel: jit.Kernel) -> str:
    """Title, then for each table of roles the variants that share it and what each costs."""
    title = (inspect.getdoc(kernel.module) or "").partition("\n\n")[0].partition(" -- ")[2]
    parts = [f"## {kernel}\n", f"{title[:1].upper()}{title[1:]}\n"]
    by_table: dict[str, list[str]] = {}
    for variant in kernel.module.VARIANTS:
        schedule = kernel.module.schedule(variant)
        fields = ", ".join(f"{field}={value}" for field, value in variant._asdict().items())
        by_table.setdefault(schedule.table(), []).append(f"- `{fields}`: {budget(schedule)}")
    for table, variants in by_table.items():
        parts += ["\n".join(variants) + "\n", table + "\n"]
    return "\n".join(parts)


def budget(schedule: Schedule) -> str:
    rings = ", ".join(f"{datum} {slots}" for datum, slots in schedule.rings.items()) or "none"
    named = ", ".join(
        f"{name} {', '.join(map(str, schedule.ids(name)))} ({barrier.threads} threads)"
        for name, barrier in schedule.named.items()
        if barrier.used
    )
    spills = "no spills"
    if schedule.spill_bytes:
        spills = f"{schedule.spill_bytes} B of spills ({schedule.spill_reason})"
    return (
        f"{schedule.threads} threads, {schedule.ctas_per_sm} per SM, "
        f"{schedule.smem_bytes} B shared memory, {spills}; ring slots: {rings}"
        + (f"; named barriers: {named}." if named else ".")
    )


if __name__ == "__main__":
    import generated  # beside this file

    sys.exit(generated.main(__doc__, DOCUMENT, "the schedules", document))
