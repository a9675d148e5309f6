"""weight_sums -- the gradients of weight and bias, summed over the CTAs of bwd.

    dweight[c, j] = sum over blocks of sums[block, j, c]      dbias[c] = .. of sums[block, W, c]

in weight's and in bias's dtype.

A CTA owns 32 channels of one of the W + 1 sums; see add_blocks for their order.

Bounded by latency, and small: for each token bwd moves 100 and more times as much.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.shapes import WIDTHS
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.numbers import SOURCE, SUM_COLUMNS, SUM_WARPS, add_blocks, put_number
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    W: int


VARIANTS = tuple(Variant(W) for W in WIDTHS)

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # blocks and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("sum", warps=SUM_WARPS, regs=64, computes="dweight, dbias"),),
        smem_bytes=SUM_WARPS * SUM_COLUMNS * 4,
        ctas_per_sm=2,
    )


def build(variant: Variant):
    plan = schedule(variant)
    W = variant.W
    num_blocks, num_channels = T.dynamic("num_blocks, num_channels")
    weight_bytes, bias_bytes = T.dynamic("weight_bytes, bias_bytes")

    @T.prim_func
    def weight_sums(
        sums: T.Tensor((num_blocks, W + 1, num_channels), "float32"),
        dweight: T.Tensor((weight_bytes,), "uint8"),  # as bytes of any float dtype
        dbias: T.Tensor((bias_bytes,), "uint8"),
        weight_dtype: T.int32,
        bias_dtype: T.int32,
        num_sums: T.int32,  # W + 1, or W where there is no bias
    ):
        with T.Kernel(T.ceildiv(num_channels, SUM_COLUMNS), num_sums, threads=plan.threads) as (
            tile,
            which,
        ):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_sum = T.alloc_shared((SUM_WARPS, SUM_COLUMNS), "float32")
            r_sum = T.alloc_local((1,), "float32")
            channel = tile * SUM_COLUMNS + T.get_thread_binding() % 32
            await_previous()
            add_blocks(sums, s_sum, r_sum, which, T.min(channel, num_channels - 1), num_blocks)
            if (T.get_thread_binding() < 32) & (channel < num_channels):
                if which < W:
                    put_number(dweight[0], r_sum[0], channel * W + which, weight_dtype)
                else:
                    put_number(dbias[0], r_sum[0], channel, bias_dtype)

    return weight_sums
