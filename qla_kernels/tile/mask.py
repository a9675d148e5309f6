"""Keeping rows that belong to nobody, or to the next sequence, out of the arithmetic.

TMA knows where a tensor ends, not where a sequence does: the last tile of a sequence arrives with
rows of whatever lies behind it, and zero times that need not be zero.
"""

import tilelang.language as T

from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled


@T.macro
def clear_tail(tile, slot, rows, width):
    """One warp: zeros into the rows from `rows` on of a slot of a [slots, 64, width] tile.

    Written by threads: fence, and meet, before a barrier tells wgmma or TMA to read it.
    """
    lane = T.get_thread_binding() % 32
    for row in rolled(rows, CHUNK):
        for e in T.vectorized(width // 32):
            tile[slot, row, lane * (width // 32) + e] = 0
