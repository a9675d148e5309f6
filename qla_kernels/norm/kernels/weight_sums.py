"""weight_sums -- the gradient of the gated norm's weight, summed over the CTAs of bwd.

    dweight[v] = sum over blocks of sums[block, v]

in weight's dtype.

A CTA owns 32 columns; see add_blocks for the order of a sum.

Bounded by latency, and small: bwd has at most a few CTAs an SM.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.numbers import SOURCE, SUM_COLUMNS, SUM_WARPS, add_blocks, put_number
from qla_kernels.tile.schedule import Role, Schedule


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


def build(variant: Variant):
    plan = schedule(variant)
    num_blocks, num_columns, weight_bytes = T.dynamic("num_blocks, num_columns, weight_bytes")

    @T.prim_func
    def weight_sums(
        sums: T.Tensor((num_blocks, 1, num_columns), variant.of),
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
            add_blocks(sums, s_sum, r_sum, 0, T.min(column, num_columns - 1), num_blocks)
            if (T.get_thread_binding() < 32) & (column < num_columns):
                put_number(dweight[0], r_sum[0], column, weight_dtype)

    return weight_sums
