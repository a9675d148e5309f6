"""mark_candidates -- the mass of each block of 64 keys, and a bit for each key that stands out.

    tile  = the sum of a block's masses
    marks = (63 + kappa) mass > kappa tile, or, if kappa < 0, mass > 0; set for columns below `sink`

A warp has eight blocks at a time, and a lane has two keys of each. Bounded by memory, and by the
launch. Why this shape: `keep_best_columns` has one SM for a head, on which this part alone took
30 us; as a kernel of its own it uses all SMs.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.budget import warp_sum
from qla_kernels.sparse_ring.shapes import BLOCK, WORD
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

MARK_WARPS = 8
WARP_BLOCKS = 8  # blocks of a warp
CTA_BLOCKS = MARK_WARPS * WARP_BLOCKS  # blocks of a CTA
BLOCK_WORDS = BLOCK // WORD


class Variant(NamedTuple):
    pass


VARIANTS = (Variant(),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # guarded by the number of blocks


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("blocks", warps=MARK_WARPS, regs=64, computes="sums, and bits"),), ctas_per_sm=4
    )


def build(variant: Variant):
    plan = schedule(variant)
    heads, L, blocks, words = T.dynamic("heads, L, blocks, words")

    @T.prim_func
    def mark_candidates(
        mass: T.Tensor((heads, L), "int32"),
        block: T.Tensor((blocks,), "int32"),
        tile: T.Tensor((heads, blocks), "int32"),
        marks: T.Tensor((heads, words), "int32"),
        sink: T.int32,
        kappa: T.int32,
    ):
        with T.Kernel(T.ceildiv(blocks, CTA_BLOCKS), heads, threads=plan.threads) as (part, head):
            m = T.alloc_local((WARP_BLOCKS, BLOCK_WORDS), "int32")
            of_tile, bits, b = (T.alloc_var("int32") for _ in range(3))
            lane, warp = T.get_thread_binding() % WORD, T.get_thread_binding() // WORD
            block0 = part * CTA_BLOCKS + warp * WARP_BLOCKS
            await_previous()
            for u in T.unroll(WARP_BLOCKS):
                b = T.min(block0 + u, blocks - 1)
                for e in T.unroll(BLOCK_WORDS):
                    m[u, e] = mass[head, b * BLOCK + e * WORD + lane]
            for u in T.unroll(WARP_BLOCKS):
                if block0 + u < blocks:  # the same for the whole warp
                    of_tile = warp_sum(m[u, 0] + m[u, 1])
                    token = block[block0 + u] * BLOCK + lane
                    for e in T.unroll(BLOCK_WORDS):
                        stands_out = T.if_then_else(
                            kappa < 0,
                            m[u, e] > 0,
                            T.cast(m[u, e], "int64") * T.cast(BLOCK - 1 + kappa, "int64")
                            > T.cast(of_tile, "int64") * T.cast(kappa, "int64"),
                        )
                        bits = T.cast(
                            T.ballot(T.cast(stands_out | (token + e * WORD < sink), "int32")),
                            "int32",
                        )
                        if lane == e:
                            marks[head, (block0 + u) * BLOCK_WORDS + e] = bits
                    if lane == 0:
                        tile[head, block0 + u] = of_tile

    return mark_candidates
