"""cut -- the columns of one head that may be chosen, of the keys that are here, by one CTA.

    tile  = the sum of each block's 64 masses
    found = the columns below `sink`, and those whose mass stands out:
            (63 + kappa) mass > kappa tile, or, without kappa, mass > 0
and of these the `room` best: columns below `sink`, then falling masses, ties by column.

Steps (numbers appear again in the code):
    1  blocks are summed and columns found, in order, eight blocks a warp at a time
    2  where there are more than there is room for: the least key that is kept
    3  what is kept, in order; (end, 0) where there is nothing

Bounded by latency: masses are read once, and a head has one SM.
Why this shape: no floating point and no order of sums, so that every rank and every way to compute
this keep the same. Most heads have room for all that is found, and skip step 2.
"""

from typing import NamedTuple

import tilelang.language as T

from qla_kernels.sparse_ring.budget import THREADS, WARPS, Found, block_scan, fewest
from qla_kernels.sparse_ring.patterns import BLOCK
from qla_kernels.tile.schedule import Role, Schedule

TILES = 8  # blocks of a warp at a time
HALVES = 2  # of a block: a lane has one key of each
NEVER = (1 << 31) - 1  # more than all masses together


class Variant(NamedTuple):
    pass


VARIANTS = (Variant(),)

PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # indices are guarded by the numbers of blocks, rows
    "tl.disable_thread_storage_sync": True,  # the macros have their own
}


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(Role("columns", warps=WARPS, regs=64, computes="sums, and which columns are kept"),),
        smem_bytes=WARPS * 4 + 2 * WARPS * 8,
    )


def build(v: Variant):
    plan = schedule(v)
    heads, L, blocks, room = T.dynamic("heads, L, blocks, room")

    @T.prim_func
    def cut(
        mass: T.Tensor((heads, L), "int32"),
        block: T.Tensor((blocks,), "int32"),
        tile: T.Tensor((heads, blocks), "int32"),
        found_column: T.Tensor((heads, L), "int32"),
        found_mass: T.Tensor((heads, L), "int32"),
        column: T.Tensor((heads, room), "int32"),
        kept: T.Tensor((heads, room), "int32"),
        sink: T.int32,
        kappa: T.int32,
        end: T.int32,
    ):
        with T.Kernel(heads, threads=plan.threads) as head:
            s_part = T.alloc_shared((WARPS,), "int32")
            s_sum = T.alloc_shared((2, WARPS), "int64")
            m = T.alloc_local((TILES, HALVES), "int32")
            lanes = T.alloc_local((TILES, HALVES), "uint32")  # that have found a column, as bits
            token = T.alloc_local((TILES,), "int32")
            sums = T.alloc_local((2,), "int32")  # of threads before, and of all
            level = T.alloc_local((1,), "int64")
            num_found, num_kept = T.alloc_var("int32"), T.alloc_var("int32")
            count, place, at = (T.alloc_var("int32") for _ in range(3))
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            lower = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)  # lanes, as bits
            found = Found(found_column, found_mass, head, sink, end)
            num_found = 0
            for i in T.serial(T.ceildiv(blocks, WARPS * TILES)):  # 1
                block0 = (i * WARPS + warp) * TILES
                for u in T.unroll(TILES):
                    for e in T.unroll(HALVES):
                        m[u, e] = 0
                        if block0 + u < blocks:
                            m[u, e] = mass[head, (block0 + u) * BLOCK + e * 32 + lane]
                count = 0
                for u in T.unroll(TILES):
                    of_tile = T.warp_reduce_sum(m[u, 0] + m[u, 1])
                    token[u] = end
                    if block0 + u < blocks:
                        token[u] = block[block0 + u] * BLOCK + lane
                        if lane == 0:
                            tile[head, block0 + u] = of_tile
                    for e in T.unroll(HALVES):
                        stands_out = T.if_then_else(
                            kappa < 0,
                            m[u, e] > 0,
                            T.cast(m[u, e], "int64") * (BLOCK - 1 + kappa)
                            > T.cast(of_tile, "int64") * kappa,
                        )
                        seen = stands_out | (token[u] + e * 32 < sink)
                        lanes[u, e] = T.cast(T.ballot(T.cast(seen, "int32")), "uint32")
                        count += T.cast(T.popcount(lanes[u, e]), "int32")
                block_scan(T.if_then_else(lane == 0, count, 0), sums, s_part, lane, warp)
                place = num_found + T.shfl_sync(sums[0], 0)
                for u in T.unroll(TILES):
                    for e in T.unroll(HALVES):
                        if (lanes[u, e] >> T.cast(lane, "uint32")) & T.uint32(1) != T.uint32(0):
                            at = place + T.cast(T.popcount(lanes[u, e] & lower), "int32")
                            found_column[head, at] = token[u] + e * 32
                            found_mass[head, at] = m[u, e]
                        place += T.cast(T.popcount(lanes[u, e]), "int32")
                num_found += sums[1]
            T.sync_threads()  # what other threads found is read from here on
            level[0] = 0
            if num_found > room:  # 2
                fewest(level, found, num_found, NEVER, room, s_sum, thread)
            num_kept = 0
            for i in T.serial(T.ceildiv(num_found, THREADS)):  # 3
                at = i * THREADS + thread
                count = 0
                if at < num_found:
                    count = T.cast(found.key(at) >= level[0], "int32")
                block_scan(count, sums, s_part, lane, warp)
                if count == 1:
                    column[head, num_kept + sums[0]] = found_column[head, at]
                    kept[head, num_kept + sums[0]] = found_mass[head, at]
                num_kept += sums[1]
            for i in T.serial(T.ceildiv(room, THREADS)):
                at = i * THREADS + thread
                if (at >= num_found) & (at < room):
                    column[head, at] = end
                    kept[head, at] = 0

    return cut.with_attr("global_symbol", "cut")
