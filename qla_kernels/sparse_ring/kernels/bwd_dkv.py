"""bwd_dkv -- dK and dV of chunks of keys, from the slashes that a rank's queries see.

A CTA has one KV head and a tile of 128 keys, blocks j0 and j0 + gap of the sequence. It sums over
the head's query heads, and over the blocks of 64 queries that see either half of the tile. Per
half, with keys as rows, S^T and dP^T are [64, 64]:
    P^T  = exp2(scale log2(e) K Q^T - lse2), 0 where a query comes before the key
    dS^T = P^T (V dO^T - delta)
    dV  += P^T dO        dK += scale dS^T Q          [64, D], fp32

Steps (numbers appear again in the roles):
    1 load   K and V of the tile
    2 load   walks the table of diagonals, head by head: entry e is query block j0 + e + gap, with
             the bits swapped: b1 concerns j0, and b0 concerns j0 + gap; Q, dO, lse2, delta
    3 grads  S^T and dP^T; P^T; dS^T; dV, dK
    4 grads  dK and dV, added to the sums that came with the chunk

Bounded by the tensor cores: four products of a block, 8 64 64 D operations for 32 KB. Why this
shape: see dkv_parts.py. A CTA processes all query heads of a KV head, in order, so each gradient
has one writer and a fixed order of sums. The halves of a tile mostly see the same blocks, and share
them; a half skips a block that it does not see. Only `load` reads the table: with each block it
sends a code for each half, and after the last block the code END.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels import dkv_parts
from qla_kernels.sparse_ring.kernels.walk import (
    END,
    HALVES,
    TRIANGLE,
    UNSEEN,
    VISIT,
    WHOLE,
    Queries,
    WalkTable,
)
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, WARPGROUP_THREADS, Role, Schedule
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

Variant, VARIANTS, PASS_CONFIGS = dkv_parts.Variant, dkv_parts.VARIANTS, dkv_parts.PASS_CONFIGS


def schedule(variant: Variant) -> Schedule:
    return dkv_parts.schedule(
        variant,
        1,
        Role(
            "load",
            warps=1,
            regs=24,
            waits=("q_free",),
            signals=(("keys_full", ONE), "q_full"),
            computes="k, v; the walk: q, dO, lse2, delta",
            uses=("tma_load",),
        ),
        Role("spare", warps=3, regs=24, computes="fills the warpgroup"),
    )


class KeyTile(NamedTuple):
    """The tile of keys of a CTA: where it is in the chunk, and what only its walk needs."""

    chunk: Any
    b: Any
    kv_head: Any
    row0: Any
    j0: Any  # its first block
    group: Any  # query heads of the KV head


@T.macro
def load(x, k, v, table, visits, s, ring, keys):
    chunk, b, kv_head, row0, j0, group = keys
    lane = T.get_thread_binding() % 32
    half = lane % HALVES
    i, at, end, ahead, word, what = (T.alloc_var("int32") for _ in range(6))
    first, count, row, of_head = (T.alloc_var("int32") for _ in range(4))
    dkv_parts.load_keys(k, v, s, ring, visits[chunk, 0, 0] + b, row0, kv_head)  # 1
    i = 0
    for g in rolled(group):
        head = kv_head * group + g
        of_head = b * x.q.shape[2] + head  # a variable: 32 bits
        for n in rolled(visits.shape[1]):
            at = clamped(visits[chunk, n, 1], 0, table.buckets - 1)
            end = table.bounds[of_head, at + 1]
            at = table.bounds[of_head, at]
            first = visits[chunk, n, 2]
            count = visits[chunk, n, 3] - first
            row = visits[chunk, n, 4]
            ahead = 0
            if at + lane < end:
                ahead = table.entries[of_head, at + lane]
            while at < end:
                word = ahead
                if at + 32 + lane < end:
                    ahead = table.entries[of_head, at + 32 + lane]  # arrives during the loop below
                for y in rolled(T.min(32, end - at)):
                    entry = T.shfl_sync(word, y)
                    inside = j0 + (entry >> 2) - first
                    if (0 <= inside) & (inside < count):
                        what = UNSEEN
                        if (entry >> (1 - half)) & 1 == 1:
                            what = T.if_then_else(entry >> 2 == half * table.gap, TRIANGLE, WHOLE)
                        turn = table.stripe_blocks * table.buckets
                        local = T.truncdiv(inside, turn) * table.stripe_blocks
                        local += row + T.truncmod(inside, table.stripe_blocks)
                        dkv_parts.put_queries(x, s, ring, i, b, local * BLOCK, head)  # 2
                        dkv_parts.put_seen(s, ring, i, what)
                        i += 1
                    if inside >= count:
                        end = at  # entries ascend
                at += 32
    ring.q.acquire(i)
    dkv_parts.put_seen(s, ring, i, END)


@T.macro
def gradients(dkv, s, ring, w, keys, scale, scale2, first, variant):
    chunk, b, kv_head, row0 = keys[:4]
    r_dk = T.alloc_fragment((BLOCK, variant.D), "float32")
    r_dv = T.alloc_fragment((BLOCK, variant.D), "float32")
    dkv_parts.gradients(s, ring, w, r_dk, r_dv, scale, scale2, variant)  # 3
    row = row0 + w * BLOCK
    if first == 0:  # 4
        for key, e in T.Parallel(BLOCK, variant.D):
            r_dk[key, e] += dkv[chunk, 0, b, row + key, kv_head, e]
            r_dv[key, e] += dkv[chunk, 1, b, row + key, kv_head, e]
    for key, e in T.Parallel(BLOCK, variant.D):
        dkv[chunk, 0, b, row + key, kv_head, e] = r_dk[key, e]
        dkv[chunk, 1, b, row + key, kv_head, e] = r_dv[key, e]


def build(variant: Variant):
    plan = schedule(variant)
    D = variant.D
    B, L, H, Hk = T.dynamic("B, L, H, Hk")
    buffers, num_chunks, rows, num_tiles = T.dynamic("buffers, num_chunks, rows, num_tiles")
    heads, room, num_bounds, num_visits = T.dynamic("heads, room, num_bounds, num_visits")
    row_b, row_h = T.dynamic("row_b, row_h")

    @T.prim_func
    def bwd_dkv(
        q: strided("q", "b l h", (B, L, H, D), variant.dtype),
        do: strided("do", "b l h", (B, L, H, D), variant.dtype),
        lse2: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        delta: T.StridedTensor((B, H, L), (row_b, row_h, 1), "float32"),
        k: strided("k", "b l h", (buffers, rows, Hk, D), variant.dtype),
        v: strided("v", "b l h", (buffers, rows, Hk, D), variant.dtype),
        entries: T.Tensor((heads, room), "int32"),
        bounds: T.Tensor((heads, num_bounds), "int32"),
        visits: T.Tensor((num_chunks, num_visits, VISIT), "int32"),
        first_block: T.Tensor((num_chunks, num_tiles), "int32"),
        dkv: T.Tensor((num_chunks, 2, B, rows, Hk, D), "float32"),
        gap: T.int32,
        stripe_blocks: T.int32,
        scale: T.float32,
        scale2: T.float32,  # scale log2(e)
        first: T.int32,
    ):
        threads = (WARPGROUP_THREADS, plan.threads // WARPGROUP_THREADS)
        # the long tiles of all chunks come first
        with T.Kernel(num_chunks, num_tiles, Hk * B, threads=threads) as (chunk, tile, head):
            s, ring = tiles(plan), rings(plan)
            group, b, kv_head = (T.alloc_var("int32") for _ in range(3))
            group = H // Hk
            b = head // Hk
            kv_head = head % Hk
            keys = KeyTile(chunk, b, kv_head, tile * TILE, first_block[chunk, tile], group)
            tx, w = T.get_thread_binding(0), T.get_thread_binding(1)
            if w < HALVES:
                T.set_max_nreg(plan.role("grads").regs, 1)
                gradients(dkv, s, ring, w, keys, scale, scale2, first, variant)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    table = WalkTable(entries, bounds, gap, stripe_blocks, num_bounds - 1)
                    x = Queries(q, do, lse2, delta)
                    load(x, k, v, table, visits, s, ring, keys)

    return bwd_dkv
