"""bwd_dkv -- the gradients of 128 keys and values of one node, over all queries that see them.

Per item (128 keys of one key head) and tile of 64 rows, tokens times query heads of the key head:
    P^T  = exp2(s2 K Q^T - lse2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    [128, 64]
    dV  += P^T dO                   dK  += dS^T Q                                 [128, D]
with s2 = scale log2(e); dK is multiplied by scale at the end. P is 0 where a query comes before the
key.

One contiguous run of queries sees the keys of a node: from the keys themselves to the end of the
node's subtree. walk.py explains the order of the walk and the rows of a tile.

Steps (numbers appear again in the roles):
    1 load   K and V
    2 load   a tile's Q and dO; stats its lse2 and delta; rows before the run become zero
    3 mma    S^T and dP^T, both operands in shared memory
    4 mma    P^T, while dP^T and the other warpgroup's products run; dS^T
    5 mma    dV and dK, with P^T and dS^T in registers
    6 mma    dK and dV out, rounded once; in fp32 where other CTAs have parts of the run

Bounded by the tensor cores, closely followed by shared memory (2048 and 1920 clocks a tile for
D = 128). Why this shape: transposed, P and dS are in the registers from which wgmma reads its first
operand, so neither goes through shared memory, and the two warpgroups, 64 keys each, never
synchronise. A CTA sums over all queries of its keys, or over one part that dkv_combine adds in a
fixed order, so results repeat bitwise.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.attn.kernels.delta import DELTA, LSE2
from qla_kernels.dualkv.kernels.items import uniform
from qla_kernels.dualkv.kernels.walk import (
    WARPGROUP_KEYS,
    load_rows,
    row_stats,
    store,
    walk_of,
)
from qla_kernels.dualkv.shapes import KV_ITEM_COLUMNS, KV_ORDERED, KV_QUERY_ROWS
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

DKV_SLOTS = 4  # query tiles in flight


class Variant(NamedTuple):
    dtype: str  # of everything but statistics and parts
    D: int


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in (128, 64))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # stores are guarded by the item's number of keys
}


def schedule(variant: Variant) -> Schedule:
    mma_regs, serving_regs = (240, 24) if variant.D == 128 else (224, 56)
    keys = Tile((2, WARPGROUP_KEYS, variant.D), variant.dtype)
    queries = Tile((DKV_SLOTS, KV_QUERY_ROWS, variant.D), variant.dtype)
    return Schedule(
        roles=(
            Role(
                "mma",
                warps=8,
                regs=mma_regs,
                waits=("kv_full", "q_full"),
                signals=("q_free",),
                computes="P^T, dS^T; dV, dK",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=serving_regs,
                waits=("q_free", "front_full"),
                signals=(("kv_full", ONE), ("front_full", ONE), "q_full"),
                computes="K, V; Q, dO",
                uses=("tma_load",),
            ),
            Role(
                "stats",
                warps=2,
                regs=serving_regs,
                waits=("q_free",),
                signals=("q_full",),
                computes="lse2, delta",
            ),
            Role("spare", warps=1, regs=serving_regs, computes="fills the warpgroup"),
        ),
        rings={"kv": 1, "front": 1, "q": DKV_SLOTS},
        tiles={
            "k": keys,  # at the end dK
            "v": keys,  # at the end dV
            "q": queries,
            "do": queries,
            "stats": Tile((DKV_SLOTS, 2, KV_QUERY_ROWS), "float32"),  # lse2 and delta
        },
    )


@T.macro
def load(k, v, q, do, s, ring, walk, q_shift):
    for w in T.unroll(2):  # 1
        first = walk.k0 + w * WARPGROUP_KEYS
        T.tma_copy(
            k[first : first + WARPGROUP_KEYS, walk.kv_head, :], s.k[w, :, :], barrier=ring.kv
        )
        T.tma_copy(
            v[first : first + WARPGROUP_KEYS, walk.kv_head, :], s.v[w, :, :], barrier=ring.kv
        )
    if T.shuffle_elect(32):
        T.barrier_arrive(ring.kv)
    load_rows(q, do, s, ring.q, ring.front, walk, q_shift)  # 2


@T.macro
def mma(dk, dv, parts, s, ring, walk, scale, D, dtype):
    w = T.alloc_var("int32")
    w = uniform(T.get_thread_binding(1))
    r_dk = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_dv = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_s = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # S^T, P^T
    r_dp = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # dP^T, dS^T
    r_p = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    r_ds = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    step, slot, first = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    T.clear(r_dk)
    T.clear(r_dv)
    step = 0
    T.barrier_wait(ring.kv, 0)
    for _ in T.serial(walk.turns):
        first = (
            walk.last - walk.k0 - w * WARPGROUP_KEYS
        )  # the tile's first token minus the first key
        for tile in T.serial(walk.tiles):
            slot = uniform(ring.q.slot(step))
            ring.q.wait(step)
            T.wgmma_gemm(
                s.k[w, :, :], s.q[slot, :, :], r_s, transpose_B=True, clear_accum=True
            )  # 3
            T.wgmma_gemm(s.v[w, :, :], s.do[slot, :, :], r_dp, transpose_B=True, clear_accum=True)
            T.wait_wgmma(1)
            probs_from_lse(  # 4
                r_s, lambda _, row: s.stats[slot, LSE2, row], scale * LOG2E
            )
            if tile >= walk.dense:
                clear_hidden(r_s, lambda key, row: key > first + (row & (1 << walk.tile_log2) - 1))
            T.wait_wgmma(0)
            ds_from_dp(r_dp, r_s, lambda _, row: s.stats[slot, DELTA, row])
            T.copy(r_s, r_p)
            T.copy(r_dp, r_ds)
            T.wgmma_gemm(r_p, s.do[slot, :, :], r_dv)  # 5
            T.wgmma_gemm(r_ds, s.q[slot, :, :], r_dk)
            T.wait_wgmma(0)
            ring.q.release(step)
            first -= 1 << walk.tile_log2
            step += 1
    for key, d in T.Parallel(WARPGROUP_KEYS, D):
        r_dk[key, d] *= scale
    if walk.part < 0:  # 6
        store(r_dk, s.k, dk, walk, w, D, dtype)
        store(r_dv, s.v, dv, walk, w, D, dtype)
    else:
        rows = slice(w * WARPGROUP_KEYS, w * WARPGROUP_KEYS + WARPGROUP_KEYS)
        T.copy(r_dk, parts[walk.part, walk.kv_head, 0, rows, :])
        T.copy(r_dv, parts[walk.part, walk.kv_head, 1, rows, :])


def build(variant: Variant):
    plan, D = schedule(variant), variant.D
    num_queries, num_padded, num_heads = T.dynamic("num_queries, num_padded, num_heads")
    num_tokens, kv_heads, num_parts = T.dynamic("num_tokens, kv_heads, num_parts")
    num_items, capacity = T.dynamic("num_items, capacity")
    q_shape, kv_shape = (num_queries, num_heads, D), (num_tokens, kv_heads, D)

    @T.prim_func
    def bwd_dkv(
        q: strided("q", "token head", q_shape, variant.dtype),
        do: strided("do", "token head", q_shape, variant.dtype),
        k: strided("k", "token head", kv_shape, variant.dtype),
        v: strided("v", "token head", kv_shape, variant.dtype),
        stats: T.Tensor((num_heads, 2, num_padded), "float32"),
        header: T.Tensor((8,), "int32"),
        kv_item: T.Tensor((num_items, KV_ITEM_COLUMNS), "int32"),
        kv_order: T.Tensor((capacity,), "int32"),
        dk: T.Tensor(kv_shape, variant.dtype),
        dv: T.Tensor(kv_shape, variant.dtype),
        parts: T.Tensor((num_parts, kv_heads, 2, 2 * WARPGROUP_KEYS, D), "float32"),
        tile_log2: T.int32,
        q_shift: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(capacity, threads=plan.block) as block:
            s, ring = tiles(plan), rings(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            of_item = num_heads, kv_heads, tile_log2, q_shift, num_tokens, num_parts
            if block < header[KV_ORDERED]:
                if warpgroup < 2:
                    T.set_max_nreg(plan.role("mma").regs, 1)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    mma(dk, dv, parts, s, ring, walk, scale, D, variant.dtype)
                else:
                    T.set_max_nreg(plan.role("load").regs, 0)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    if tx < 32:
                        load(k, v, q, do, s, ring, walk, q_shift)
                    elif tx < 96:
                        row_stats(stats, s, ring.q, walk, tx - 32, q_shift)

    return bwd_dkv
