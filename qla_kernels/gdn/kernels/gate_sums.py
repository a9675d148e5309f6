"""gate_sums -- the gradients of A_log and dt_bias, summed over the blocks of activate_bwd.

    out[j] = sum over blocks of sums[block, j], in A_log's and in dt_bias's dtype      [value heads]

Steps (numbers appear again in the role); a CTA owns 8 value heads of one parameter:
    1 sum    a lane takes every 128th block, 8 of them at a time
    2 sum    over the lanes of a warp that share a head, then over the warps

Bounded by latency, and small. Why this shape: the number of blocks fixes the order of a sum. 8
value heads are a 32-byte sector, and with 8 blocks a lane 1024 blocks are loaded at the same time.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.raw_gates import SOURCE, put
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

SUM_WARPS = 32
SUM_HEADS = 8  # value heads of a CTA
SUM_LANES = 32 // SUM_HEADS  # lanes of a warp that share a head
AHEAD = 8  # blocks that a lane loads before it adds


class Variant(NamedTuple):
    dtype: str  # of the sums


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # blocks and heads are guarded


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("sum", warps=SUM_WARPS, regs=64, computes="the two gradients"),),
        tiles={"sum": Tile((SUM_WARPS, SUM_HEADS), variant.dtype)},
    )


@T.macro
def add_up(sums, which, s_sum, r_sum, head, num_blocks, num_heads):
    """Adds r_sum of all threads of a head; the first lanes of the first warp get the sums."""
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_ahead = T.alloc_local((AHEAD,), "float32")
    r_sum[0] = 0
    for step in rolled(T.ceildiv(num_blocks, SUM_WARPS * SUM_LANES * AHEAD)):  # 1
        for i in T.unroll(AHEAD):
            block = ((step * AHEAD + i) * SUM_WARPS + warp) * SUM_LANES + lane // SUM_HEADS
            r_ahead[i] = 0
            if (block < num_blocks) & (head < num_heads):
                r_ahead[i] = sums[block, which, head]
        for i in T.unroll(AHEAD):
            r_sum[0] += r_ahead[i]
    over_lanes(r_sum)  # 2
    if lane < SUM_HEADS:
        s_sum[warp, lane] = r_sum[0]
    T.sync_threads()
    if warp == 0:
        r_sum[0] = 0
        for w in T.unroll(SUM_WARPS // SUM_LANES):
            r_sum[0] += s_sum[w * SUM_LANES + lane // SUM_HEADS, lane % SUM_HEADS]
        over_lanes(r_sum)


@T.macro
def over_lanes(r_sum):
    for d in T.unroll(2):  # log2(SUM_LANES)
        r_sum[0] += T.shfl_xor(r_sum[0], SUM_HEADS << d)


def build(variant: Variant):
    plan = schedule(variant)
    num_blocks, num_heads, A_row, bias_row = T.dynamic("num_blocks, num_heads, A_row, bias_row")

    @T.prim_func
    def gate_sums(
        sums: T.Tensor((num_blocks, 2, num_heads), variant.dtype),
        dA_log: T.Tensor((A_row,), "uint8"),  # as bytes of any float dtype
        ddt_bias: T.Tensor((bias_row,), "uint8"),
        A_dtype: T.int32,
        bias_dtype: T.int32,
        num_parameters: T.int32,  # 2, or 1 where there is no dt_bias
    ):
        grid = (T.ceildiv(num_heads, SUM_HEADS), num_parameters)
        with T.Kernel(*grid, threads=plan.threads) as (tile, which):
            T.import_source(SOURCE)
            s = tiles(plan)
            r_sum = T.alloc_local((1,), variant.dtype)
            head = tile * SUM_HEADS + T.get_thread_binding() % SUM_HEADS
            await_previous()
            add_up(sums, which, s.sum, r_sum, head, num_blocks, num_heads)
            if (T.get_thread_binding() < SUM_HEADS) & (head < num_heads):
                if which == 0:
                    put(dA_log[0], r_sum, head, 0, 1, A_dtype)
                else:
                    put(ddt_bias[0], r_sum, head, 0, 1, bias_dtype)

    return gate_sums
