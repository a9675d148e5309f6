"""Choices that depend on shapes and flags: pure functions."""


def head_pack(num_heads: int, kv_heads: int) -> int:
    """Returns how many query heads of one key head share a tile.

    That is the largest of 8, 4, 2 and 1 that divides num_heads / kv_heads.
    """
    group = num_heads // kv_heads
    return next(pack for pack in (8, 4, 2, 1) if group % pack == 0)


def one_pass(deterministic: bool, head_dim: int) -> bool:
    """Returns whether the backward adds up dQ in the pass that makes dK and dV.

    One pass takes five products instead of seven, but dQ's last bits differ from run to run. It
    does not exist for D = 64: a warpgroup would own 32 columns of dQ, half a row of a swizzled
    tile. Nor for D = 256, where it would add 64 KB of dQ to the sums for each 64 x 64 pairs, twice
    as much for its products as at 128.
    """
    return head_dim == 128 and not deterministic
