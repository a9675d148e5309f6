"""weight_sums -- the gradient of the gated norm's weight, summed over the CTAs of bwd.

    dweight[v] = sum over blocks of sums[block, v]

in weight's dtype.

Steps (numbers appear again in the role); a CTA owns 32 columns:
    1 sum    a warp takes every 16th block, 4 of them at a time; a lane is a column
    2 sum    over the warps, in their order, rounded once, out

Bounded by latency, and small: bwd has at most a few CTAs an SM. Why this shape: the number of
blocks fixes the order of a sum, so results repeat bit for bit.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.norm.kernels.rows import SOURCE, put_number
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

SUM_WARPS = 16
SUM_COLUMNS = 32
SUM_AHEAD = 4  # blocks that a thread loads before it adds


class Variant(NamedTuple):
    of: str  # dtype of the sums


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # blocks and columns are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("sum", warps=SUM_WARPS, regs=64, computes="dweight"),),
        smem_bytes=SUM_WARPS * SUM_COLUMNS * 4,
        ctas_per_sm=2,
    )


@T.macro
def add_up(sums, s_sum, r_sum, column, num_blocks):
    """Adds a column over all blocks; the first warp's r_sum[0] gets the sum."""
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_ahead = T.alloc_local((SUM_AHEAD,), "float32")
    block = T.alloc_var("int32")
    r_sum[0] = 0
    for step in rolled(T.ceildiv(num_blocks, SUM_WARPS * SUM_AHEAD)):  # 1
        for i in T.unroll(SUM_AHEAD):
            block = (step * SUM_AHEAD + i) * SUM_WARPS + warp
            r_ahead[i] = 0
            if block < num_blocks:
                r_ahead[i] = sums[block, column]
        for i in T.unroll(SUM_AHEAD):
            r_sum[0] += r_ahead[i]
    s_sum[warp, lane] = r_sum[0]  # 2
    T.sync_threads()
    if warp == 0:
        for other in T.unroll(1, SUM_WARPS):
            r_sum[0] += s_sum[other, lane]


def build(variant: Variant):
    plan = schedule(variant)
    num_blocks, num_columns, weight_bytes = T.dynamic("num_blocks, num_columns, weight_bytes")

    @T.prim_func
    def weight_sums(
        sums: T.Tensor((num_blocks, num_columns), variant.of),
        dweight: T.Tensor((weight_bytes,), "uint8"),  # as bytes of any float dtype
        weight_dtype: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_columns, SUM_COLUMNS), threads=plan.threads) as tile:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_sum = T.alloc_shared((SUM_WARPS, SUM_COLUMNS), "float32")
            r_sum = T.alloc_local((1,), "float32")
            column = tile * SUM_COLUMNS + T.get_thread_binding() % 32
            await_previous()
            add_up(sums, s_sum, r_sum, T.min(column, num_columns - 1), num_blocks)
            if (T.get_thread_binding() < 32) & (column < num_columns):
                put_number(dweight[0], r_sum[0], column, weight_dtype)

    return weight_sums
