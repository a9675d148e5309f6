"""weight_sums -- the gradients of weight and bias, summed over the CTAs of bwd.

    dweight[c, j] = sum over blocks of sums[block, j, c]      dbias[c] = .. of sums[block, W, c]

in weight's and in bias's dtype.

Steps (numbers appear again in the role); a CTA owns 32 channels of one of the W + 1 sums:
    1 sum    a warp takes every 16th block, 4 of them at a time; a lane is a channel
    2 sum    over the warps, in their order, rounded once, out

Bounded by latency, and small: for each token bwd moves 100 and more times as much. Why this shape:
the number of blocks fixes the order of a sum, so results repeat bit for bit.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.kernels.numbers import SOURCE, put_number
from qla_kernels.conv.shapes import WIDTHS
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

SUM_WARPS = 16
SUM_CHANNELS = 32
SUM_AHEAD = 4  # blocks that a thread loads before it adds


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
        smem_bytes=SUM_WARPS * SUM_CHANNELS * 4,
        ctas_per_sm=2,
    )


@T.macro
def add_up(sums, s_sum, r_sum, which, channel, num_blocks):
    """Adds sum `which` of a channel over all blocks; the first warp's r_sum[0] gets it."""
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_ahead = T.alloc_local((SUM_AHEAD,), "float32")
    block = T.alloc_var("int32")
    r_sum[0] = 0
    for step in rolled(T.ceildiv(num_blocks, SUM_WARPS * SUM_AHEAD)):  # 1
        for i in T.unroll(SUM_AHEAD):
            block = (step * SUM_AHEAD + i) * SUM_WARPS + warp
            r_ahead[i] = 0
            if block < num_blocks:
                r_ahead[i] = sums[block, which, channel]
        for i in T.unroll(SUM_AHEAD):
            r_sum[0] += r_ahead[i]
    s_sum[warp, lane] = r_sum[0]  # 2
    T.sync_threads()
    if warp == 0:
        for other in T.unroll(1, SUM_WARPS):
            r_sum[0] += s_sum[other, lane]


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
        with T.Kernel(T.ceildiv(num_channels, SUM_CHANNELS), num_sums, threads=plan.threads) as (
            tile,
            which,
        ):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            s_sum = T.alloc_shared((SUM_WARPS, SUM_CHANNELS), "float32")
            r_sum = T.alloc_local((1,), "float32")
            channel = tile * SUM_CHANNELS + T.get_thread_binding() % 32
            await_previous()
            add_up(sums, s_sum, r_sum, which, T.min(channel, num_channels - 1), num_blocks)
            if (T.get_thread_binding() < 32) & (channel < num_channels):
                if which < W:
                    put_number(dweight[0], r_sum[0], channel * W + which, weight_dtype)
                else:
                    put_number(dbias[0], r_sum[0], channel, bias_dtype)

    return weight_sums
