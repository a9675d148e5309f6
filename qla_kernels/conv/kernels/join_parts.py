"""join_parts -- the gradients of tokens that several nodes of a tree read.

Per such token and channel, in one order:
    dx = its own node's part + sum over `readers` of the parts of other nodes' halos

Steps (numbers appear again in the role), for a CTA, which owns 128 channels of one token:
    1 join   a warp adds every eighth part, 4 of them at a time, in fp32
    2 join   the warps' sums added in the order of warps, rounded once, out

Bounded by memory: 4 bytes read for each number of each part, and small unless nodes are short.
Why this shape: a prompt's last tokens have a part from every response, which may be thousands. So
the warps of a CTA share a token's parts. The order of a sum depends on the tree alone.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.shapes import PIECE, TILE
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

JOIN_WARPS = 8
JOIN_AHEAD = 4  # parts that a thread loads before it adds


class Variant(NamedTuple):
    dtype: str  # of dx


VARIANTS = (Variant("bfloat16"), Variant("float16"))

PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # parts and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("join", warps=JOIN_WARPS, regs=64, computes="dx"),),
        smem_bytes=JOIN_WARPS * TILE * 4,
        ctas_per_sm=4,
    )


@T.macro
def join(parts, shared, first, readers, dx, s_sum, i, piece, writes):
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_sum = T.alloc_local((PIECE,), "float32")
    r_part = T.alloc_local((JOIN_AHEAD, PIECE), "float32")
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    begin, end, entry, row = (T.alloc_var("int32") for _ in range(4))
    begin = clamped(first[i], 0, readers.shape[0])
    end = clamped(first[i + 1], 0, readers.shape[0])
    for e in T.unroll(PIECE):
        r_sum[e] = 0
    if warp == 0:
        for e in T.vectorized(PIECE):
            r_sum[e] = parts[i, piece, e]
    for step in rolled(T.ceildiv(end - begin, JOIN_WARPS * JOIN_AHEAD)):  # 1
        for ahead in T.unroll(JOIN_AHEAD):
            entry = begin + (step * JOIN_AHEAD + ahead) * JOIN_WARPS + warp
            for e in T.unroll(PIECE):
                r_part[ahead, e] = 0
            if entry < end:
                row = clamped(readers[entry], 0, parts.shape[0] - 1)
                for e in T.vectorized(PIECE):
                    r_part[ahead, e] = parts[row, piece, e]
        for ahead in T.unroll(JOIN_AHEAD):
            for e in T.unroll(PIECE):
                r_sum[e] += r_part[ahead, e]
    for e in T.vectorized(PIECE):  # 2
        s_sum[warp, lane * PIECE + e] = r_sum[e]
    T.sync_threads()
    if warp == 0:
        for other in T.unroll(1, JOIN_WARPS):
            for e in T.unroll(PIECE):
                r_sum[e] += s_sum[other, lane * PIECE + e]
        for e in T.unroll(PIECE):
            r_dx[e] = r_sum[e]
        row = shared[i]
        if writes & (row >= 0) & (row < dx.shape[0]):
            for e in T.vectorized(PIECE):
                dx[row, piece, e] = r_dx[e]


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, pieces, num_parts = T.dynamic("num_tokens, pieces, num_parts")
    num_shared, num_firsts, num_readers = T.dynamic("num_shared, num_firsts, num_readers")

    @T.prim_func
    def join_parts(
        parts: T.Tensor((num_parts, pieces, PIECE), "float32"),
        shared: T.Tensor((num_shared,), "int32"),
        first: T.Tensor((num_firsts,), "int32"),  # one more than `shared`
        readers: T.Tensor((num_readers,), "int32"),
        dx: T.Tensor((num_tokens, pieces, PIECE), variant.dtype),
    ):
        tiles = T.ceildiv(pieces * PIECE, TILE)
        with T.Kernel(num_shared * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            s_sum = T.alloc_shared((JOIN_WARPS, TILE), "float32")
            i, piece = T.alloc_var("int32"), T.alloc_var("int32")
            i = T.truncdiv(cta, tiles)
            piece = (cta - i * tiles) * (TILE // PIECE) + T.get_thread_binding() % 32
            writes = piece < pieces
            piece = T.min(piece, pieces - 1)
            await_previous()
            join(parts, shared, first, readers, dx, s_sum, i, piece, writes)

    return join_parts
