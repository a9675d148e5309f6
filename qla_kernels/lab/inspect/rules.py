"""Rules for the compiled code: `check` returns every difference from the schedule.

Each violation is one sentence with the object, the value found and the value expected.
"""

from collections import Counter
from collections.abc import Iterator

from qla_kernels.lab.inspect.gather import Facts, RoleFacts
from qla_kernels.tile.schedule import (
    FIRST_NAMED,
    ONE,
    REGISTERS_PER_SM,
    SMEM_PER_CTA,
    Role,
    Schedule,
)


def check(facts: Facts, schedule: Schedule) -> list[str]:
    """Returns every violation, in the order in which one would look for its cause."""
    found = [
        *_roles(facts, schedule),
        *_barriers(facts, schedule),
        *_named_barriers(facts),
        *_declared_barriers(facts, schedule),
        *_sharing(facts),
        *resources(facts, schedule),
    ]
    return _folded(found, facts, schedule)


def _folded(found: list[str], facts: Facts, schedule: Schedule) -> list[str]:
    """Replaces all that follows from names that the code and the schedule do not share."""
    absent = [name for name in schedule.barriers if name not in facts.barriers]
    others = sorted(facts.barriers.keys() - set(schedule.barriers))
    if not (absent and others):
        return found
    hint = (
        f"barriers: the code has {', '.join(others)}, the schedule {', '.join(absent)}; the "
        "variable that holds a T.alloc_barrier has to have the barrier's name in the schedule "
        "(what roles do with these barriers was not compared)"
    )
    about = tuple(f"barrier {name}:" for name in (*absent, *others))
    return [hint, *(violation for violation in found if not violation.startswith(about))]


def _roles(facts: Facts, schedule: Schedule) -> Iterator[str]:
    if facts.threads != schedule.threads:
        yield f"{facts.threads} threads a CTA; the schedule's roles have {schedule.threads}"
    for role in schedule.roles:
        found = facts.roles[role.name]
        yield from _max_registers(facts, role, found, schedule.specialised)
        waits = dict.fromkeys(role.waits, role.threads)
        yield from _protocol(role, "wait", found.waits, waits)
        yield from _protocol(role, "arrive", _per_phase(role, found), dict(role.arrivals))
        if not _disassembled(facts):
            continue
        for unit in sorted(set(role.uses) - set(found.units)):
            yield f"role {role.name}: no {unit} instruction, though the schedule says it uses one"
        for unit in sorted(set(found.units) - set(role.uses)):
            yield f"role {role.name}: has {unit} instructions; the schedule does not say so"


def _max_registers(facts: Facts, role: Role, found: RoleFacts, specialised: bool) -> Iterator[str]:
    if not specialised:
        if found.set_max_nreg:
            yield f"role {role.name}: set_max_nreg, though all roles have {role.regs} registers"
        return
    values = {registers for _, registers, _ in found.set_max_nreg}
    if values != {role.regs}:
        said = ", ".join(map(str, sorted(values))) or "missing"
        yield f"role {role.name}: set_max_nreg {said}; the schedule says {role.regs}"
    covered = sum(threads for _, _, threads in found.set_max_nreg)
    if found.set_max_nreg and covered != role.threads:
        yield (
            f"role {role.name}: set_max_nreg runs in {covered} of {role.threads} threads; "
            "every warp of a warpgroup has to execute it once"
        )
    for kind, registers, _ in found.set_max_nreg:
        needed = "alloc" if registers >= facts.registers else "dealloc"
        if kind != needed and registers != facts.registers:
            yield (
                f"role {role.name}: set_max_nreg {registers} as {kind}; "
                f"from {facts.registers} at launch it is a {needed}"
            )


def _per_phase(role: Role, found: RoleFacts) -> dict[str, int]:
    """Returns, by barrier, the number of threads of one role that arrive on it in one phase.

    This is the number of the role's threads that have the arrive in their code. But if the role's
    signal in the schedule is (barrier, n), with n > 1 a divisor of that number, then n is returned:
    groups of n threads take turns, or have slots of their own.
    """
    wanted = dict(role.arrivals)
    return {
        barrier: n if (n := wanted.get(barrier, ONE)) > ONE and threads % n == 0 else threads
        for barrier, threads in found.arrives.items()
    }


def _protocol(
    role: Role, verb: str, found: dict[str, int], wanted: dict[str, int]
) -> Iterator[str]:
    for barrier, threads in wanted.items():
        if barrier not in found:
            yield f"barrier {barrier}: role {role.name} should {verb} on it and never does"
        elif found[barrier] != threads:
            yield (
                f"barrier {barrier}: {found[barrier]} threads of role {role.name} {verb} on it; "
                f"the schedule says {threads}"
            )
    for barrier in sorted(found.keys() - wanted.keys()):
        yield f"barrier {barrier}: role {role.name} {verb}s on it; the schedule does not say so"


def _barriers(facts: Facts, schedule: Schedule) -> Iterator[str]:
    for name in schedule.barriers:
        if name not in facts.barriers:
            yield f"barrier {name}: in the schedule, not in the code"
            continue
        counts, slots = facts.barriers[name], schedule.slots(name)
        if len(counts) != slots:
            yield f"barrier {name}: {len(counts)} slots in the code; the schedule says {slots}"
        if set(counts) != {schedule.arrivals(name)}:
            said = ", ".join(map(str, sorted(set(counts))))
            yield (
                f"barrier {name}: initialised with arrive count {said}; "
                f"the schedule's signals add up to {schedule.arrivals(name)}"
            )
    for name in sorted(facts.barriers.keys() - set(schedule.barriers)):
        yield f"barrier {name}: in the code, not in the schedule"
    for name, counts in facts.barriers.items():
        waiting = [role for role, found in facts.roles.items() if name in found.waits]
        arriving = sum(
            _per_phase(role, facts.roles[role.name]).get(name, 0) for role in schedule.roles
        )
        if not waiting:
            yield f"barrier {name}: nobody waits on it"
        if not arriving:
            yield f"barrier {name}: nobody arrives on it"
        elif set(counts) != {arriving}:
            yield (
                f"barrier {name}: {arriving} threads arrive in the code, its arrive count is "
                f"{counts[0]}: a phase ends early or never"
            )


def _named_barriers(facts: Facts) -> Iterator[str]:
    computed = {b.counts[0]: b.roles for b in facts.named_barriers.values() if b.computed}
    for number, barrier in facts.named_barriers.items():
        count, taking = barrier.counts[0], Counter(barrier.roles)
        possible = taking.total() == count
        if count in computed:  # computed numbers may include this one: their threads count as well
            possible |= (taking | Counter(computed[count])).total() % count == 0
        if len(barrier.counts) > 1 or not possible:
            counts = " and ".join(map(str, barrier.counts))
            roles = ", ".join(f"{role} ({n} threads)" for role, n in barrier.roles.items())
            yield (
                f"named barrier {number}: for {counts} threads, executed by {roles}: "
                "they release each other, or wait for ever"
            )


def _declared_barriers(facts: Facts, schedule: Schedule) -> Iterator[str]:
    """Compares ids and thread counts of named barriers with the schedule's.

    Ids below FIRST_NAMED are the compiler's. An id that the code computes at run time is compared
    by its thread count.
    """
    if not _disassembled(facts):
        return
    used = {name: barrier.threads for name, barrier in schedule.named.items() if barrier.used}
    owners = {id: name for name in used for id in schedule.ids(name)}
    found: dict[str, set[int]] = {name: set() for name in used}
    for number, barrier in facts.named_barriers.items():
        if barrier.computed:
            meant = [name for name, threads in used.items() if threads in barrier.counts]
        elif not number.isdecimal() or int(number) < FIRST_NAMED:
            continue
        else:
            meant = [owners[int(number)]] if int(number) in owners else []
        for name in meant:
            found[name].update(barrier.counts)
        if not meant:
            counts = " and ".join(map(str, barrier.counts))
            yield f"named barrier {number}: for {counts} threads; none such in the schedule"
    for name, threads in used.items():
        if found[name] != {threads}:
            counts = " and ".join(map(str, sorted(found[name]))) or "none"
            yield (
                f"named barrier {name} ({', '.join(map(str, schedule.ids(name)))}): threads in the "
                f"code: {counts}; the schedule says {threads}"
            )


def _sharing(facts: Facts) -> Iterator[str]:
    for name, roles in facts.shared_fragments.items():
        yield (
            f"fragment {name}: used by roles {', '.join(roles)}; a fragment belongs to one set of "
            "threads, and the others' code is dropped silently: give each role its own"
        )
    for first, second, roles in facts.overlaps:
        yield (
            f"shared memory: {first} and {second} overlap and belong to roles {', '.join(roles)}; "
            "dispatch roles in one if/else chain, or set tl.disable_shared_memory_reuse"
        )


def resources(facts: Facts, schedule: Schedule) -> list[str]:
    """Returns the violations of registers, spills and shared memory."""
    return [*_resources(facts, schedule)]


def _resources(facts: Facts, schedule: Schedule) -> Iterator[str]:
    yield from _registers(facts, schedule)
    if facts.spills > schedule.spill_bytes:
        allowed = f"{schedule.spill_bytes} B declared" if schedule.spill_bytes else "none declared"
        yield f"spills: {facts.spill_stores} B stored, {facts.spill_loads} B loaded; {allowed}"
    if not schedule.spill_bytes:
        for role, found in facts.roles.items():
            local = {op: n for op in ("LDL", "STL") if (n := found.instructions.get(op))}
            if local and not facts.spills:
                said = ", ".join(f"{n} {op}" for op, n in local.items())
                yield f"role {role}: local memory ({said}): an array indexed at run time?"
    if facts.smem != schedule.smem_bytes:
        yield (
            f"shared memory: {facts.dynamic_smem} B dynamic + {facts.static_smem} B static = "
            f"{facts.smem} B; the schedule says {schedule.smem_bytes} B"
        )
    if facts.smem > SMEM_PER_CTA:
        yield f"shared memory: {facts.smem} B; a CTA has {SMEM_PER_CTA} B"
    for warning in facts.warnings:
        yield f"ptxas: {warning}"


def _registers(facts: Facts, schedule: Schedule) -> Iterator[str]:
    resident = -(-facts.registers // 8) * 8 * facts.threads * schedule.ctas_per_sm
    if resident > REGISTERS_PER_SM:
        yield (
            f"registers: {facts.registers} a thread at launch x {facts.threads} threads x "
            f"{schedule.ctas_per_sm} CTAs per SM = {resident}; an SM has {REGISTERS_PER_SM}; "
            f"T.annotate_min_blocks_per_sm({schedule.ctas_per_sm}) tells the compiler"
        )
    if not schedule.specialised:
        most = schedule.roles[0].regs
        if facts.registers > most:
            yield f"registers: {facts.registers} a thread; the schedule allows {most}"
        return
    wanted = sum(role.threads * role.regs for role in schedule.roles)
    if wanted > facts.registers * facts.threads:
        yield (
            f"registers: roles ask for {wanted}, a CTA starts with {facts.registers} x "
            f"{facts.threads} = {facts.registers * facts.threads}: set_max_nreg waits for ever"
        )


def _disassembled(facts: Facts) -> bool:
    return any(found.instructions for found in facts.roles.values())
