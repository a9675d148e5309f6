"""Loads and stores numbers of a float dtype that is known at run time; sums over CTAs.

A dtype is an argument of the kernel, its number in runtime.sm90.FLOATS. The kernel has to import
`SOURCE`.
"""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.tile.loops import rolled

SOURCE = Path(__file__).with_suffix(".cuh").read_text()

SUM_WARPS = 16
SUM_COLUMNS = 32  # of a CTA: a lane has one
SUM_AHEAD = 4  # blocks that a thread loads before it adds


def numbers(to: Any, from_: Any, first: Any, dtype: Any) -> Any:
    """Loads to.shape[0] numbers, from number `first` on, as fp32."""
    size = to.shape[0]
    to, from_ = T.access_ptr(to[0], "w", size), T.access_ptr(from_, "r", 1)
    return T.call_extern("handle", f"qla::numbers<{size}>", to, from_, first, dtype)


def put_number(to: Any, x: Any, place: Any, dtype: Any) -> Any:
    """Stores x as number `place`."""
    return T.call_extern("handle", "qla::put_number", T.access_ptr(to, "w", 1), x, place, dtype)


@T.macro
def add_blocks(sums, s_sum, r_sum, which, column, num_blocks):
    """Adds sums[block, which, column] over all blocks; the first warp's r_sum[0] gets the sum.

    A CTA has SUM_WARPS warps. A warp takes every 16th block; then the warps' sums are added in
    their order. So the number of blocks alone fixes the order, and results repeat bit for bit.
    """
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_ahead = T.alloc_local((SUM_AHEAD,), "float32")
    block = T.alloc_var("int32")
    r_sum[0] = 0
    for step in rolled(T.ceildiv(num_blocks, SUM_WARPS * SUM_AHEAD)):
        for i in T.unroll(SUM_AHEAD):
            block = (step * SUM_AHEAD + i) * SUM_WARPS + warp
            r_ahead[i] = 0
            if block < num_blocks:
                r_ahead[i] = sums[block, which, column]
        for i in T.unroll(SUM_AHEAD):
            r_sum[0] += r_ahead[i]
    s_sum[warp, lane] = r_sum[0]
    T.sync_threads()
    if warp == 0:
        for other in T.unroll(1, SUM_WARPS):
            r_sum[0] += s_sum[other, lane]
