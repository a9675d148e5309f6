"""Compiles kernels for sm_90a, without a GPU, and compares them with their schedules.

Name a kernel of this package, or the file of any other TileLang kernel:

    python -m qla_kernels inspect gdn.l2norm
    python -m qla_kernels inspect my_kernels/gemm.py
    python -m qla_kernels inspect gdn.l2norm --schedule

The file defines `VARIANTS`, instances of a NamedTuple with the values that change generated code;
`schedule(variant)`, which returns a qla_kernels.tile.schedule.Schedule; `build(variant)`, which
returns the PrimFunc; and optionally `PASS_CONFIGS`, a dict for TileLang.

The exit status is 0 if every variant agrees with its schedule, 1 if one does not, 2 if a tool is
missing, no variant matches, a kernel does not compile, or its file raises.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qla_kernels.lab import command_line
from qla_kernels.lab.inspect.gather import Facts, facts
from qla_kernels.lab.inspect.rules import check
from qla_kernels.lab.kernel_file import chosen, kernel_of, mistakes
from qla_kernels.runtime import jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.tile.schedule import FIRST_NAMED, Schedule

NEEDS = ("VARIANTS", "schedule", "build")  # of a file
# instructions worth a count, in this order
SHOWN = (
    "HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "LDGSTS", "LDSM", "STSM",
    "LDL", "STL", "LDG", "STG", "LDS", "STS", "MUFU", "SHFL", "BAR", "SYNCS", "WARPGROUP", "FENCE",
    "RED", "ATOM",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("inspect", __doc__)
    kernel_help = "family, family.kernel, or a .py file with your own kernel; default: all of ours"
    parser.add_argument("kernel", nargs="?", help=kernel_help)
    parser.add_argument("--variant", default="", help="only variants whose name contains this")
    parser.add_argument("--exact", default="", metavar="ID", help="only the variant of this id")
    parser.add_argument("--order", action="store_true", help="print each role's instruction order")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    schedule_help = "only print schedules; needs neither TileLang nor nvcc"
    parser.add_argument("--schedule", action="store_true", help=schedule_help)
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep source, cubin, SASS, report")
    options = parser.parse_args(arguments)
    failed, records = 0, []
    try:
        if options.schedule:
            return _print_schedules(options.kernel, options.variant, options.exact, options.json)
        jit.tilelang_for("qla_kernels.lab.inspect")  # before a kernel's code needs it
        for kernel, variant in _selected(options.kernel, options.variant, options.exact):
            name = jit.label(kernel.module, variant)
            keep = options.dump / name if options.dump else None
            with _mistakes(kernel, options.kernel, name):
                schedule = kernel.module.schedule(variant)
                measured = facts(kernel, variant, keep)
            violations = check(measured, schedule)
            failed += bool(violations)
            records.append(asdict(measured) | {"violations": violations})
            if not options.json:
                print("\n".join(_report(name, measured, schedule, violations, options.order)))
    except (Unsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if not records:
        return _no_match()
    if options.json:
        print(json.dumps(records, indent=1))
    return 1 if failed else 0


def _no_match() -> int:
    print(f"no variant matches; kernels: {', '.join(map('.'.join, jit.kernel_names()))}")
    return 2


def _print_schedules(wanted: str | None, text: str, exact: str, as_json: bool) -> int:
    """Prints each schedule once, below the variants that share it."""
    tables: dict[str, list[str]] = {}
    for kernel, variant in _selected(wanted, text, exact):
        plan = kernel.module.schedule(variant)
        facts = f"{plan.threads} threads, {plan.smem_bytes} B shared memory, "
        facts += f"{plan.ctas_per_sm} CTAs an SM"
        label = jit.label(kernel.module, variant)
        tables.setdefault(f"{plan.table()}\n\n{facts}", []).append(label)
    if not tables:
        return _no_match()
    if as_json:
        records = [{"variants": names, "table": table} for table, names in tables.items()]
        print(json.dumps(records, indent=1))
    else:
        print("\n\n".join("\n".join((*names, "", table)) for table, names in tables.items()))
    return 0


def _selected(wanted: str | None, text: str, exact: str) -> Iterator[tuple[jit.Kernel, Any]]:
    file = Path(wanted or "")
    of_file = file.suffix == ".py"
    family, _, name = ("", "", "") if of_file else (wanted or "").partition(".")
    known = [kernel_of("inspect", file, NEEDS)] if of_file else jit.kernel_modules(family or None)
    for kernel in known:
        if name in ("", kernel.name):
            yield from ((kernel, variant) for variant in chosen(kernel, text, exact))


def _mistakes(kernel: jit.Kernel, file: str | None, name: str) -> AbstractContextManager[None]:
    """Reports errors of a file in one line; kernels of this package keep their tracebacks."""
    if kernel.family:
        return nullcontext()
    return mistakes("inspect", Path(file or ""), f"building {name}", RuntimeError)


def _report(
    name: str, measured: Facts, schedule: Schedule, violations: list[str], order: bool
) -> Iterator[str]:
    yield f"{name}  ->  {measured.function}"
    yield (
        f"  {measured.threads} threads, {schedule.ctas_per_sm} CTAs per SM; {measured.registers} "
        f"registers a thread at launch; spills {measured.spill_stores} + {measured.spill_loads} B; "
        f"shared memory {measured.dynamic_smem} + {measured.static_smem} = {measured.smem} B"
    )
    for role in schedule.roles:
        role_facts = measured.roles[role.name]
        total = f"{sum(role_facts.instructions.values())} instructions"
        counts = [
            f"{op} {role_facts.instructions[op]}" for op in SHOWN if op in role_facts.instructions
        ]
        span = f"{schedule.start(role.name)}-{schedule.end(role.name) - 1}"
        yield (
            f"  {role.name:10} threads {span:9} registers {role.regs:3}, highest named "
            f"R{role_facts.top_register}: {', '.join([total, *counts])}"
        )
        if order:
            yield from (f"    {count:5} x {shown}" for shown, count in role_facts.order)
    for barrier, slots in measured.barriers.items():
        waiting = [name for name, role in measured.roles.items() if barrier in role.waits]
        yield f"  barrier {barrier}: arrive count {slots}, waited on by {', '.join(waiting)}"
    for number, named in measured.named_barriers.items():
        threads = " and ".join(map(str, named.counts))
        whose = " (TileLang's own)" if number.isdecimal() and int(number) < FIRST_NAMED else ""
        roles = ", ".join(named.roles)
        yield f"  named barrier {number}{whose}: for {threads} threads, used by {roles}"
    yield from (f"  not checked: {reason}" for reason in measured.unchecked)
    yield from (f"  VIOLATION {violation}" for violation in violations)
