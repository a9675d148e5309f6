"""Collects the facts about a variant that can be read without running it.

Lowering and assembling take seconds, so facts are stored in the compile cache under a key of
everything that they depend on: the kernel's IR, its schedule, the flags, the versions of the tools,
and this package's files.
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from qla_kernels.lab.inspect import sass, script, source
from qla_kernels.lab.inspect.threads import Threads
from qla_kernels.runtime import jit
from qla_kernels.runtime.native.sources import structure
from qla_kernels.tile.schedule import Schedule


@dataclass
class RoleFacts:
    """Facts about one role. The number of a barrier is how many of the role's threads take part."""

    waits: dict[str, int]
    arrives: dict[str, int]
    set_max_nreg: list[tuple[str, int, int]]  # (alloc or dealloc, registers, threads)
    top_register: int = 0  # the highest register its instructions name
    units: list[str] = field(default_factory=list)
    instructions: dict[str, int] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class NamedBarrierFacts:
    """A hardware barrier (`bar.sync`): thread counts in the code, and roles that execute it."""

    counts: list[int]
    roles: dict[str, int]
    computed: bool = False  # True if the barrier's number is computed at run time


@dataclass
class Facts:
    kernel: str  # as `jit.label` has it
    function: str
    threads: int
    registers: int  # per thread at launch
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    dynamic_smem: int
    barriers: dict[str, list[int]]  # arrive count of each slot
    roles: dict[str, RoleFacts]
    named_barriers: dict[str, NamedBarrierFacts]
    shared_fragments: dict[str, list[str]]  # fragment -> roles, where more than one touches it
    overlaps: list[tuple[str, str, list[str]]]  # two buffers in one place, and the roles involved
    warnings: list[str]
    unchecked: list[str]  # facts that could not be read here, and the tool that is missing

    @property
    def smem(self) -> int:
        return self.static_smem + self.dynamic_smem

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        values = json.loads(text)
        values["roles"] = {name: RoleFacts(**role) for name, role in values["roles"].items()}
        named = values["named_barriers"].items()
        values["named_barriers"] = {name: NamedBarrierFacts(**barrier) for name, barrier in named}
        return cls(**values)


def facts(kernel: jit.Kernel, variant: Any, keep: Path | None = None) -> Facts:
    """Returns the facts of a variant, from the cache or by compiling it.

    With `keep`, a folder, always compiles and leaves source, cubin, SASS and report there.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return _gather(kernel, variant, keep)
    stored = jit.cache_dir() / "qla_kernels" / "facts" / f"{key(kernel, variant)}.json"
    if stored.exists():
        return Facts.from_json(stored.read_text())
    with tempfile.TemporaryDirectory(prefix="qla-inspect-") as folder:
        found = _gather(kernel, variant, Path(folder))
    stored.parent.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(found)))
    partial.replace(stored)
    return found


def key(kernel: jit.Kernel, variant: Any) -> str:
    """Returns a digest of all that the facts of a variant, and what `check` says, depend on."""
    flags = jit.nvcc_flags(kernel.module.PASS_CONFIGS)
    parts = (
        jit.trace(kernel.module, variant).script(show_meta=True),
        repr(kernel.module.schedule(variant)),
        [flag for flag in flags if not flag.startswith("-I")],  # TileLang's folders, by version
        sorted(kernel.module.PASS_CONFIGS.items()),
        importlib.metadata.version("tilelang"),
        jit.nvcc_version(),
        sass.nvdisasm_version(),
        _reader_version(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _reader_version() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    readers = [file.read_text() for file in files if file.stem not in ("__init__", "command")]
    parts = [part for text in readers for part in structure(text)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _gather(kernel: jit.Kernel, variant: Any, folder: Path) -> Facts:
    schedule = kernel.module.schedule(variant)
    lowered = jit.lower(kernel, variant)
    assembled = jit.assemble(lowered.source, kernel.module.PASS_CONFIGS, folder)
    (folder / "ptxas.txt").write_text(assembled.report)
    spent = sass.spent(assembled.report, lowered.function)
    code = source.read(lowered.source, lowered.function, lowered.block)
    ir = script.read(lowered.prim_func.script(), lowered.block)
    found = replace(
        spent_by(jit.label(kernel.module, variant), lowered, spent),
        barriers=code.barriers,
        roles={role.name: _role(schedule, role.name, code) for role in schedule.roles},
        shared_fragments=_shared_fragments(schedule, ir),
        overlaps=_overlaps(schedule, code, ir),
    )
    if sass.nvdisasm() is None:
        found.unchecked.append(
            "no nvdisasm: units, local memory, named barriers and registers per role are not "
            f"checked; {sass.HOW_TO_GET}"
        )
        return found
    text = sass.disassemble(assembled.cubin)
    (folder / "kernel.sass").write_text(text)
    _add_instructions(found, schedule, code, list(sass.instructions(text, lowered.function)))
    return found


def spent_by(name: str, lowered: jit.Lowered, spent: sass.Spent) -> Facts:
    """Returns the facts that ptxas reports, without those of roles and barriers."""
    return Facts(
        kernel=name,
        function=lowered.function,
        threads=lowered.threads,
        registers=spent.registers,
        stack=spent.stack,
        spill_stores=spent.spill_stores,
        spill_loads=spent.spill_loads,
        static_smem=spent.static_smem,
        dynamic_smem=lowered.dyn_smem,
        barriers={},
        roles={},
        named_barriers={},
        shared_fragments={},
        overlaps=[],
        warnings=list(spent.warnings),
        unchecked=[],
    )


def _role(schedule: Schedule, name: str, code: source.Code) -> RoleFacts:
    mine = _span(schedule, name)

    def taking_part(barriers: dict[str, Threads]) -> dict[str, int]:
        return {barrier: len(who & mine) for barrier, who in barriers.items() if who & mine}

    return RoleFacts(
        waits=taking_part(code.waits),
        arrives=taking_part(code.arrives),
        set_max_nreg=[(kind, n, len(who & mine)) for who, kind, n in code.registers if who & mine],
    )


def _add_instructions(
    found: Facts, schedule: Schedule, code: source.Code, listing: list[sass.Instruction]
) -> None:
    everyone = frozenset(range(found.threads))
    ran = [(code.lines.get(i.line or 0, everyone), i) for i in listing]
    for name, its in found.roles.items():
        mine = _span(schedule, name)
        alone = len(found.roles) == 1  # with several roles, code that all run belongs to none
        own = [i for who, i in ran if who & mine and (alone or who != everyone)]
        its.top_register = max((i.top_register for i in own), default=0)
        its.units = sorted({i.unit for i in own if i.unit})
        its.instructions = dict(Counter(i.name for i in own))
        its.order = sass.order(own)
    for who, instruction in ran:
        if instruction.name == "BAR":
            _add_named_barrier(found, schedule, who, instruction.operands)


def _add_named_barrier(found: Facts, schedule: Schedule, who: Threads, operands: str) -> None:
    number, _, count = operands.partition(", ")
    computed, roles = not number.startswith("0x"), ", ".join(_names(schedule, who))
    if not count.startswith("0x") and (count or computed):
        found.unchecked.append(f"a named barrier with a run-time thread count in {roles}")
        return
    threads = int(count, 16) if count else found.threads
    name = f"(computed, {threads})" if computed else str(int(number, 16))
    if not count and len(who) < found.threads:  # __syncthreads that not all threads reach
        name += f" ({roles} only)"
    barrier = found.named_barriers.setdefault(name, NamedBarrierFacts([], {}, computed))
    barrier.counts = sorted({*barrier.counts, threads})
    taking = {role: len(who & _span(schedule, role)) for role in found.roles}
    barrier.roles = {
        role: most for role in taking if (most := max(taking[role], barrier.roles.get(role, 0)))
    }


def _shared_fragments(schedule: Schedule, ir: script.Script) -> dict[str, list[str]]:
    shared = {}
    for name, uses in ir.fragments.items():
        by_use = {tuple(_names(schedule, who)) for who in uses}
        touched = {role for roles in by_use for role in roles}
        if len(by_use) > 1 and len(touched) > 1:
            shared[name] = [role.name for role in schedule.roles if role.name in touched]
    return shared


def _overlaps(
    schedule: Schedule, code: source.Code, ir: script.Script
) -> list[tuple[str, str, list[str]]]:
    """Returns pairs of buffers that share memory and that several roles touch, with these roles.

    Memory that only one role reuses is left out: a role runs in order, and the compiler orders its
    accesses.
    """
    found = []
    placed = sorted(code.buffers.items(), key=lambda item: (item[1].offset, item[0]))
    for index, (name, buffer) in enumerate(placed):
        # a buffer that the IR has under another name counts as one byte: only equal starts overlap
        end = buffer.offset + ir.shared_bytes.get(name, 1)
        for other, neighbour in placed[index + 1 :]:
            roles = _names(schedule, buffer.threads | neighbour.threads)
            if neighbour.offset < end and len(roles) > 1:
                found.append((name, other, roles))
    return found


def _span(schedule: Schedule, role: str) -> Threads:
    return frozenset(range(schedule.start(role), schedule.end(role)))


def _names(schedule: Schedule, who: Iterable[int]) -> list[str]:
    threads = frozenset(who)
    return [role.name for role in schedule.roles if threads & _span(schedule, role.name)]
