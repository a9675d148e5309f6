"""The roles that serve the others of a kernel: they load, make gates and P, or store."""

from qla_kernels.tile.schedule import Role, Signal, free, full

GATES = "gamma and its exponentials, beta"


def load_role(
    regs: int, computes: str, *data: str, name: str = "load", tail: bool = True, elected: int = 0
) -> Role:
    """Returns a warp that loads data by TMA, each with a ring of its own.

    With `tail` it loads the tails of sequences by another barrier. With `elected` so many of its
    threads arrive.
    """
    filled: tuple[Signal, ...] = full(*data)
    if elected:
        filled = tuple((barrier, elected) for barrier in full(*data))
    both = ("tail_full",) if tail else ()
    waits = (*free(*data), *both)
    return Role(name, 1, regs, waits, (*filled, *both), computes, ("tma_load",))


def gate_role(regs: int, computes: str = "exponentials of gamma, beta", name: str = "gate") -> Role:
    return Role(name, 1, regs, free("gate"), full("gate"), computes)


def score_role(regs: int, *data: str) -> Role:
    """Returns the warpgroup that makes P of data."""
    waits, signals = (*full(*data, "gate"), "p_free"), (*free(*data, "gate"), "p_full")
    return Role("score", 4, regs, waits, signals, "P", ("wgmma",))


def store_role(regs: int, computes: str, *data: str) -> Role:
    """Returns a warp that sends staged data by TMA."""
    return Role("store", 1, regs, full(*data), free(*data), computes, ("tma_store",))
