"""diagonals -- the table of diagonals that kernels walk, from the index's bits; one CTA per head.

    entries  (e + gap) << 2 | b1 << 1 | b0, for each e in -gap <= e < blocks with b0 or b1,
             b0 = [e in D], b1 = [e + gap in D]; sorted by bucket ceil(e / s) mod buckets, then by e
             D is the set of chosen diagonals, numbered by distance in blocks; gap is the distance
             of a query tile's two blocks, s the blocks of a stripe; see plan.table
    bounds   bucket b has the entries bounds[b] to bounds[b + 1] - 1

Steps (numbers appear again in the code):
    1  assign a candidate e to each thread, bucket by bucket, e ascending in each bucket
    2  count the kept candidates before each thread: over its warp, then over the warps
    3  write the bound of each bucket that begins; write zeros behind the last entry

Bounded by latency: a few microseconds for any mask. Why this shape: made by tensor operations, as
in plan.table, the same table costs about twenty launches.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.shapes import WORD
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

DIAGONAL_WARPS = 16
DIAGONAL_THREADS = DIAGONAL_WARPS * 32


class Variant(NamedTuple):
    pass


VARIANTS = (Variant(),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by num_blocks


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=DIAGONAL_WARPS, regs=64, computes="entries, bounds"),),
        tiles={"sum": Tile((DIAGONAL_WARPS,), "int32")},
    )


@T.macro
def active(d_bits, head, d, num_blocks, bit):
    bit[0] = 0
    if (0 <= d) & (d < num_blocks):
        bit[0] = (d_bits[head, d // WORD] >> (d % WORD)) & 1


def build(variant: Variant):
    plan = schedule(variant)
    heads, words, room, num_bounds = T.dynamic("heads, words, room, num_bounds")

    @T.prim_func
    def diagonals(
        d_bits: T.Tensor((heads, words), "int32"),
        entries: T.Tensor((heads, room), "int32"),
        bounds: T.Tensor((heads, num_bounds), "int32"),
        num_blocks: T.int32,
        gap: T.int32,
        stripe_blocks: T.int32,
    ):
        with T.Kernel(heads, threads=plan.threads) as head:
            s = tiles(plan)
            b0, b1 = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            e, total, kept, before, all_before = (T.alloc_var("int32") for _ in range(5))
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            buckets = num_bounds - 1
            # a bucket has `turns` runs of stripe_blocks candidates each; the first run has e <= 0
            turns = T.ceildiv(num_blocks - 1, stripe_blocks) // buckets + 2
            size = turns * stripe_blocks
            all_before = 0
            for i in rolled(T.ceildiv(buckets * size, DIAGONAL_THREADS)):
                y = i * DIAGONAL_THREADS + thread
                bucket = y // size
                turn = y % size // stripe_blocks - 1
                e = (turn * buckets + bucket - 1) * stripe_blocks + 1 + y % stripe_blocks  # 1
                b0[0] = 0
                b1[0] = 0
                if (bucket < buckets) & (e >= -gap) & (e < num_blocks):
                    active(d_bits, head, e, num_blocks, b0)
                    active(d_bits, head, e + gap, num_blocks, b1)
                kept = b0[0] | b1[0]
                total = kept  # 2
                for d in T.unroll(5):
                    below = T.shfl_up(total, 1 << d)
                    if lane >= 1 << d:
                        total += below
                if lane == 31:
                    s.sum[warp] = total
                T.sync_threads()
                before = all_before
                for w in T.serial(DIAGONAL_WARPS):
                    if w < warp:
                        before += s.sum[w]
                    all_before += s.sum[w]
                before += total - kept
                if kept != 0:
                    entries[head, before] = (e + gap) << 2 | b1[0] << 1 | b0[0]
                if (bucket < buckets) & (y % size == 0):  # 3
                    bounds[head, bucket] = before
                T.sync_threads()
            if thread == 0:
                bounds[head, buckets] = all_before
            for i in rolled(T.ceildiv(room - all_before, DIAGONAL_THREADS)):
                if all_before + i * DIAGONAL_THREADS + thread < room:
                    entries[head, all_before + i * DIAGONAL_THREADS + thread] = 0

    return diagonals
