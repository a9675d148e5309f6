"""Defines warp-specialised schedules as data: a kernel's roles, barriers and resources.

A kernel file states its `Schedule` once and takes thread counts, role spans, `set_max_nreg` values
and barrier arrive counts from it. The constructor of `Schedule` raises ValueError for a schedule
that cannot run. `lab.inspect` compares the rest with the code that the compiler produced.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

REGISTERS_PER_SM = 65_536
SMEM_PER_SM = 233_472  # 228 KiB
SMEM_PER_CTA = 232_448  # 227 KiB: the most that one CTA may have
SMEM_RESERVED = 1_024  # the system's share of every resident CTA
THREADS_PER_CTA = 1_024
WARP = 32
WARPGROUP = 4  # warps; setmaxnreg and wgmma act on whole warpgroups
WARPGROUP_THREADS = WARP * WARPGROUP

FIRST_NAMED = 8  # id of a schedule's first named barrier; TileLang takes lower ones for its own
LAST_NAMED = 15  # the hardware has 16 a CTA

BARRIERS = 1_024  # bytes of a kernel's mbarriers, together with what aligns its tiles

ONE = 1  # a signal sent by one elected thread, e.g. together with a TMA load

HARDWARE = ("wgmma", "mma", "tma_load", "tma_store", "cp_async")  # what `Role.uses` may name

Signal = str | tuple[str, int]


@dataclass(frozen=True)
class Role:
    """Consecutive warps that run the same macro.

    Warps that only fill up a warpgroup are a role of their own.

    Attributes:
        regs: registers per thread: the role's `set_max_nreg` value, or, in a schedule whose roles
            all have the same number, the most that the compiler may use (no `set_max_nreg` then).
        waits: barriers that every thread of the role waits on.
        signals: barriers that the role arrives on, in each phase: a plain name if every thread
            arrives, `(name, ONE)` if one elected thread does, `(name, n)` if n threads do, such as
            128 of 256 threads whose warpgroups take turns or have slots of their own.
        computes: the results of the role, for the reader, in the words of the kernel's docstring.
        uses: the hardware units that it uses, of wgmma, mma, tma_load, tma_store and cp_async;
            checked against generated code.
    """

    name: str
    warps: int
    regs: int
    waits: tuple[str, ...] = ()
    signals: tuple[Signal, ...] = ()
    computes: str = ""
    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.warps < 1:
            raise ValueError(f"role {self.name}: {self.warps} warps; need at least 1")
        if unknown := sorted(set(self.uses) - set(HARDWARE)):
            raise ValueError(f"role {self.name} uses {unknown}; known are {', '.join(HARDWARE)}")
        for barrier, n in self.arrivals:
            if not 1 <= n <= self.threads:
                raise ValueError(
                    f"role {self.name}: {n} arrivals on {barrier}; need 1 to its {self.threads}"
                )

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def arrivals(self) -> Iterator[tuple[str, int]]:
        """Yields (barrier, arrivals per phase) for each signal."""
        for signal in self.signals:
            yield (signal, self.threads) if isinstance(signal, str) else signal


def full(*data: str) -> tuple[str, ...]:
    """Returns the names of the barriers by which consumers learn that slots are filled."""
    return tuple(f"{name}_full" for name in data)


def free(*data: str) -> tuple[str, ...]:
    """Returns the names of the barriers by which producers learn that slots are free."""
    return tuple(f"{name}_free" for name in data)


def each(signals: tuple[str, ...], threads: int) -> tuple[Signal, ...]:
    """Returns signals that so many threads of a role send."""
    return tuple((name, threads) for name in signals)


class Named(NamedTuple):
    """A named barrier: the threads that meet at it, and its copies, each with an id of its own.

    With `used` False the kernel's code does not have it, but its ids stay taken: so a barrier that
    some variants or kernels do without has one id in all of them.
    """

    threads: int
    copies: int = 1
    used: bool = True


class Tile(NamedTuple):
    """A tile of shared memory: `tile.tiles` allocates it under its name in the schedule.

    Attributes:
        swizzled: in the layout in which rows and columns use all banks. Other tiles have the layout
            that the compiler infers.
        align: the size is rounded up to a multiple of so many bytes, where the compiler puts a tile
            of this alignment behind it.
    """

    shape: tuple[int, ...]
    dtype: str
    swizzled: bool = False
    align: int = 1

    @property
    def bytes(self) -> int:
        bits = int(self.dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))
        return -(-math.prod(self.shape) * bits // 8 // self.align) * self.align


@dataclass(frozen=True)
class Schedule:
    """The roles of one CTA in thread order, and the budgets they share.

    Attributes:
        rings: datum -> slots: every barrier `<datum>_<event>` has that many copies; a barrier of no
            ring has one.
        named: the named barriers; ids are dealt out in this order, from FIRST_NAMED on.
        tiles: the tiles of shared memory, in the order in which the kernel allocates them.
        smem_bytes: dynamic plus static shared memory, as assembled. Where it is not given, it is
            what `tiles` and barriers take.
        ctas_per_sm: CTAs meant to be resident together; registers and shared memory must allow it.
        spill_bytes: spill stores plus loads that are tolerated; a number above 0 needs a
            `spill_reason`.
    """

    roles: tuple[Role, ...]
    rings: Mapping[str, int] = field(default_factory=dict)
    named: Mapping[str, Named] = field(default_factory=dict)
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    smem_bytes: int = 0
    ctas_per_sm: int = 1
    spill_bytes: int = 0
    spill_reason: str = ""

    def __post_init__(self) -> None:
        if self.tiles and not self.smem_bytes:
            size = sum(tile.bytes for tile in self.tiles.values()) + BARRIERS * bool(self.barriers)
            object.__setattr__(self, "smem_bytes", size)
        self._check_roles()
        self._check_barriers()
        self._check_named()
        self._check_budgets()

    @property
    def threads(self) -> int:
        return sum(role.threads for role in self.roles)

    @property
    def block(self) -> tuple[int, int]:
        """The threads as a block of two dimensions: y is the warpgroup, x the thread within it."""
        return WARPGROUP_THREADS, self.threads // WARPGROUP_THREADS

    @property
    def specialised(self) -> bool:
        """True if roles have different register counts; each then begins with `set_max_nreg`."""
        return len({role.regs for role in self.roles}) > 1

    def role(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"no role {name!r}; roles are {', '.join(r.name for r in self.roles)}")

    def start(self, name: str) -> int:
        """Returns the first thread of a role."""
        return self.end(name) - self.role(name).threads

    def end(self, name: str) -> int:
        """Returns the thread after the last one of a role: `if tx < schedule.end("mma")`."""
        last = self.roles.index(self.role(name))
        return sum(role.threads for role in self.roles[: last + 1])

    @property
    def barriers(self) -> tuple[str, ...]:
        """Every barrier, in the order in which roles first mention it."""
        named = [b for r in self.roles for b in (*r.waits, *(name for name, _ in r.arrivals))]
        return tuple(dict.fromkeys(named))

    def arrivals(self, barrier: str) -> int:
        """Returns the arrive count for a barrier's initialisation: all arrivals of one phase."""
        if barrier not in self.barriers:
            raise KeyError(f"no barrier {barrier!r}; barriers are {', '.join(self.barriers)}")
        return sum(n for role in self.roles for name, n in role.arrivals if name == barrier)

    def slots(self, barrier: str) -> int:
        """Returns the number of copies of a barrier: one for each slot of its ring, else one."""
        datum, _, _ = barrier.rpartition("_")
        return self.rings.get(datum, 1)

    def first_id(self, name: str) -> int:
        """Returns the id of the first copy of a named barrier; those of other copies follow."""
        if name not in self.named:
            raise KeyError(
                f"no named barrier {name!r}; there are {', '.join(self.named) or 'none'}"
            )
        before = list(self.named).index(name)
        return FIRST_NAMED + sum(other.copies for other in list(self.named.values())[:before])

    def ids(self, name: str) -> range:
        """Returns the ids of a named barrier's copies."""
        return range(self.first_id(name), self.first_id(name) + self.named[name].copies)

    def table(self) -> str:
        """Returns the schedule as a table in Markdown, one row for each role."""
        rows = [
            "| role | warps | regs | waits for | computes | signals | uses |",
            "|---|---|---|---|---|---|---|",
        ]
        for role in self.roles:
            first, last = self.start(role.name) // WARP, self.end(role.name) // WARP - 1
            cells = (
                role.name,
                f"{first}-{last}" if last > first else f"{first}",
                f"{role.regs}",
                ", ".join(role.waits),
                role.computes,
                ", ".join(s if isinstance(s, str) else f"{s[0]} ({s[1]})" for s in role.signals),
                ", ".join(role.uses),
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(rows)

    def _check_roles(self) -> None:
        if not self.roles:
            raise ValueError("a schedule without roles; need at least one")
        names = [role.name for role in self.roles]
        if len(set(names)) < len(names):
            raise ValueError(f"role names repeat: {', '.join(names)}")
        if self.threads > THREADS_PER_CTA:
            raise ValueError(f"{self.threads} threads; a CTA has at most {THREADS_PER_CTA}")
        if not self.specialised:
            if not 1 <= self.roles[0].regs <= 255:
                raise ValueError(f"{self.roles[0].regs} registers a thread; need 1 to 255")
            return
        owners = [role for role in self.roles for _ in range(role.warps)]
        if len(owners) % WARPGROUP:
            raise ValueError(
                f"{len(owners)} warps; roles with different registers fill whole warpgroups of 4"
            )
        for first in range(0, len(owners), WARPGROUP):
            regs = {role.name: role.regs for role in owners[first : first + WARPGROUP]}
            if len(set(regs.values())) > 1:
                raise ValueError(
                    f"warpgroup {first // WARPGROUP}: set_max_nreg acts on whole warpgroups, "
                    f"but its roles ask for {regs}"
                )
        for role in self.roles:
            if role.regs % 8 or not 24 <= role.regs <= 256:
                raise ValueError(
                    f"role {role.name}: set_max_nreg {role.regs}; need a multiple of 8, 24 to 256"
                )

    def _check_barriers(self) -> None:
        waited = {name for role in self.roles for name in role.waits}
        signalled = {name for role in self.roles for name, _ in role.arrivals}
        if unsignalled := sorted(waited - signalled):
            raise ValueError(f"waited on but never signalled: {', '.join(unsignalled)}")
        if unwaited := sorted(signalled - waited):
            raise ValueError(f"signalled but never waited on: {', '.join(unwaited)}")
        for datum, slots in self.rings.items():
            if slots < 1:
                raise ValueError(f"ring {datum}: {slots} slots; need at least 1")
            if not any(name.rpartition("_")[0] == datum for name in self.barriers):
                raise ValueError(f"ring {datum}: no barrier {datum}_<event> in any role")

    def _check_named(self) -> None:
        for name, barrier in self.named.items():
            if barrier.copies < 1:
                raise ValueError(f"named barrier {name}: {barrier.copies} copies; need at least 1")
            threads = barrier.threads
            if barrier.used and (threads % WARP or not WARP <= threads <= self.threads):
                raise ValueError(
                    f"named barrier {name}: for {threads} threads; need whole warps, "
                    f"{WARP} to the CTA's {self.threads} threads"
                )
            if self.ids(name)[-1] > LAST_NAMED:
                raise ValueError(
                    f"named barrier {name}: its ids end at {self.ids(name)[-1]}; the hardware's "
                    f"end at {LAST_NAMED}"
                )

    def _check_budgets(self) -> None:
        per_role = ", ".join(f"{role.name} {role.threads}x{role.regs}" for role in self.roles)
        registers = sum(role.threads * role.regs for role in self.roles) * self.ctas_per_sm
        if registers > REGISTERS_PER_SM:
            raise ValueError(
                f"{self.ctas_per_sm} CTAs per SM need {registers} registers ({per_role}); "
                f"an SM has {REGISTERS_PER_SM}"
            )
        # the compiler gives every thread the same share of an SM; set_max_nreg only passes it on
        launch = REGISTERS_PER_SM // (self.threads * self.ctas_per_sm) // 8 * 8
        asked, held = registers // self.ctas_per_sm, launch * self.threads
        if self.specialised and asked > held:
            raise ValueError(
                f"roles ask for {asked} registers ({per_role}); a CTA starts with at most "
                f"{launch} x {self.threads} = {held}, and set_max_nreg would wait for ever: "
                f"take {asked - held} from some role, in steps of 8 a thread"
            )
        if self.smem_bytes > SMEM_PER_CTA:
            raise ValueError(f"{self.smem_bytes} B shared memory; a CTA has {SMEM_PER_CTA}")
        smem = (self.smem_bytes + SMEM_RESERVED) * self.ctas_per_sm
        if smem > SMEM_PER_SM:
            raise ValueError(
                f"{self.ctas_per_sm} CTAs per SM need {smem} B shared memory "
                f"({SMEM_RESERVED} B reserved for each); an SM has {SMEM_PER_SM}"
            )
        if bool(self.spill_bytes) != bool(self.spill_reason):
            raise ValueError(
                f"spill_bytes={self.spill_bytes}, spill_reason={self.spill_reason!r}; "
                "spills need both a number and a reason"
            )
