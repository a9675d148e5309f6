"""Shapes to choices. Pure functions of ints."""


def head_pack(num_heads: int, kv_heads: int) -> int:
    """How many query heads of one key head a tile takes: a power of two up to 8."""
    group = num_heads // kv_heads
    return next(pack for pack in (8, 4, 2, 1) if group % pack == 0)
