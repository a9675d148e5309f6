"""Choices that depend on shapes and flags: pure functions."""


def head_pack(num_heads: int, kv_heads: int) -> int:
    """Returns how many query heads of one key head share a tile of the forward.

    That is the largest of 8, 4, 2 and 1 that divides num_heads / kv_heads.
    """
    group = num_heads // kv_heads
    return next(pack for pack in (8, 4, 2, 1) if group % pack == 0)


def one_pass(deterministic: bool, head_dim: int) -> bool:
    """Returns whether one pass over the scores computes dQ, dK and dV, rather than two passes.

    One pass needs five matrix products instead of seven, but sums dQ by atomics, so that its last
    bits differ from run to run. It exists only for D = 128. At D = 64, a warpgroup would own 32
    columns of dQ, half a row of a swizzled tile. At D = 256, it would add 64 KB of dQ for each
    64 x 64 pairs, twice as much for each product as at D = 128.
    """
    return head_dim == 128 and not deterministic
