"""Clears rows behind the end of a sequence, so that they do not enter the arithmetic.

TMA stops at the end of a tensor, not at the end of a sequence. The last tile of a sequence
therefore arrives with rows of the next sequence, or of no sequence. These may be NaN or inf, and
zero times such a number is NaN.
"""

import qla_kernels.tile.language as T
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled


@T.macro
def clear_tail(tile, slot, rows, width):
    """Writes zeros to rows `rows` to 63 of a slot of a [slots, 64, width] tile, by one warp.

    Threads write the zeros. Before wgmma or TMA reads the tile, the caller needs a proxy fence, and
    then a barrier.
    """
    lane = T.get_thread_binding() % 32
    for row in rolled(rows, CHUNK):
        for e in T.vectorized(width // 32):
            tile[slot, row, lane * (width // 32) + e] = 0
