"""Shapes to choices. Pure functions of ints."""


def head_pack(num_heads: int, kv_heads: int) -> int:
    """How many query heads of one key head a tile takes: a power of two up to 8."""
    group = num_heads // kv_heads
    return next(pack for pack in (8, 4, 2, 1) if group % pack == 0)


def one_pass(deterministic: bool, head_dim: int) -> bool:
    """Whether the backward adds up dQ while it makes dK and dV.

    Five products instead of seven, but dQ's last bits differ from run to run. It has no form for
    64 columns: half of them, a warpgroup's share, are not a whole row of a swizzled tile.
    """
    return head_dim == 128 and not deterministic
