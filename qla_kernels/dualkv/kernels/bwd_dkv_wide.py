"""bwd_dkv_wide -- the gradients of 64 keys and values of one node, for D = 256.

Per item (64 keys of one key head) and tile of 64 rows, tokens times query heads of the key head:
    P^T  = exp2(s2 K Q^T - lse2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    [64, 64]
    dV  += P^T dO                   dK  += dS^T Q                                 [64, D]
with s2 = scale log2(e); dK is multiplied by scale at the end. P is 0 where a query comes before the
key. Items, tiles and their order are those of bwd_dkv; walk.py explains the walk.

Steps (numbers appear again in the roles):
    1 load    K and V
    2 load    a tile's Q, load_do its dO, stats its lse2 and delta; rows before the run become zero
    3 values  S^T and P^T; P^T to shared memory, in fp32
    4 values  dV, with P^T in registers
    5 keys    dP^T; with the other warpgroup's P^T, dS^T
    6 keys    dK, with dS^T in registers
    7 both    dV and dK out, rounded once; in fp32 where other CTAs have parts of the run

Bounded by shared memory and the tensor cores (2304 and 2048 clocks a tile). Why this shape: dK and
dV of 64 keys are 256 registers a thread if one warpgroup has both. So each warpgroup has one of
them, and the products that lead to it, and only P^T passes from one to the other: as the same
thread's numbers, since both have the layout of a 64 x 64 accumulator. There are two slots of it, so
that `values` may be a tile ahead, and its exponentials run under the products of `keys`. In 16
bits P^T would take 128 clocks less, and dK would have an error of 2.9e-3 in bf16, not 2.3e-3. A
warpgroup's chain of two products has nothing of its own to overlap with: with a product of the next
tile in flight over the end of the loop, ptxas serialises all (see docs/lessons.md).
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
from qla_kernels.tile.schedule import ONE, WARPGROUP_THREADS, Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

WIDE_SLOTS = 2  # query tiles in flight


class Variant(NamedTuple):
    dtype: str  # of everything but statistics and parts
    D: int


VARIANTS = tuple(Variant(dtype, 256) for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # stores are guarded by the item's number of keys
}


P_PIECES = WARPGROUP_KEYS * KV_QUERY_ROWS // WARPGROUP_THREADS // 4  # of 16 bytes, of a thread

# A thread writes the numbers that the same thread of the other warpgroup reads, each as 16 bytes
# beside those of its neighbours, so that no two lanes meet in a bank.
SOURCE = f"""
namespace qla {{
__device__ __forceinline__ void put_pieces(void *to, const float *p) {{
#pragma unroll
  for (int i = 0; i < {P_PIECES}; ++i)
    static_cast<float4 *>(to)[i * {WARPGROUP_THREADS} + threadIdx.x] =
        make_float4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
}}
__device__ __forceinline__ void get_pieces(float *p, const void *from) {{
#pragma unroll
  for (int i = 0; i < {P_PIECES}; ++i) {{
    const float4 x = static_cast<const float4 *>(from)[i * {WARPGROUP_THREADS} + threadIdx.x];
    p[4 * i] = x.x, p[4 * i + 1] = x.y, p[4 * i + 2] = x.z, p[4 * i + 3] = x.w;
  }}
}}
}}  // namespace qla
"""


def schedule(variant: Variant) -> Schedule:
    keys = Tile((1, WARPGROUP_KEYS, variant.D), variant.dtype)
    queries = Tile((WIDE_SLOTS, KV_QUERY_ROWS, variant.D), variant.dtype)
    return Schedule(
        roles=(
            Role(
                "values",
                warps=4,
                regs=240,
                waits=("kv_full", "q_full", "p_free"),
                signals=("q_free", "p_full"),
                computes="P^T; dV",
                uses=("wgmma",),
            ),
            Role(
                "keys",
                warps=4,
                regs=240,
                waits=("kv_full", "q_full", "p_full"),
                signals=("q_free", "p_free"),
                computes="dS^T; dK",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=24,
                waits=("q_free", "q_front_full"),
                signals=(("kv_full", ONE), ("q_front_full", ONE), "q_full"),
                computes="K, V; Q",
                uses=("tma_load",),
            ),
            Role(
                "load_do",
                warps=1,
                regs=24,
                waits=("q_free", "do_front_full"),
                signals=(("do_front_full", ONE), "q_full"),
                computes="dO",
                uses=("tma_load",),
            ),
            Role(
                "stats",
                warps=2,
                regs=24,
                waits=("q_free",),
                signals=("q_full",),
                computes="lse2, delta",
            ),
        ),
        rings={"kv": 1, "q_front": 1, "do_front": 1, "q": WIDE_SLOTS, "p": 2},
        tiles={
            "k": keys,  # at the end dV, as `values` alone has read K
            "v": keys,  # at the end dK
            "q": queries,
            "do": queries,
            "stats": Tile((WIDE_SLOTS, 2, KV_QUERY_ROWS), "float32"),  # lse2 and delta
            # P^T, in the order of threads and their registers
            "p": Tile((2, WARPGROUP_KEYS * KV_QUERY_ROWS), "float32"),
        },
    )


@T.macro
def load(k, v, q, s, ring, walk, q_shift):
    for keys, tile in ((k, s.k), (v, s.v)):  # 1
        T.tma_copy(
            keys[walk.k0 : walk.k0 + WARPGROUP_KEYS, walk.kv_head, :],
            tile[0, :, :],
            barrier=ring.kv,
        )
    if T.shuffle_elect(32):
        T.barrier_arrive(ring.kv)
    load_rows(q, None, s, ring.q, ring.q_front, walk, q_shift)  # 2


@T.macro
def values(dv, parts, s, ring, walk, scale, D, dtype):
    r_dv = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_s = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # S^T, P^T
    r_p = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    r_lse2 = T.alloc_fragment((KV_QUERY_ROWS,), "float32")
    step, slot, first = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    T.clear(r_dv)
    step = 0
    T.barrier_wait(ring.kv, 0)
    for _ in T.serial(walk.turns):
        first = walk.last - walk.k0  # the tile's first token minus the first key
        for tile in T.serial(walk.tiles):
            slot = uniform(ring.q.slot(step))
            ring.q.wait(step)
            T.wgmma_gemm(  # 3
                s.k[0, :, :], s.q[slot, :, :], r_s, transpose_B=True, clear_accum=True
            )
            T.copy(s.stats[slot, LSE2, :], r_lse2)  # under the product
            T.wait_wgmma(0)
            probs_from_lse(r_s, lambda _, row: r_lse2[row], scale * LOG2E)
            if tile >= walk.dense:
                clear_hidden(r_s, lambda key, row: key > first + (row & (1 << walk.tile_log2) - 1))
            ring.p.acquire(step)
            T.call_extern(
                "handle",
                "qla::put_pieces",
                T.access_ptr(s.p[ring.p.slot(step), 0], "w", s.p.shape[1]),
                r_s.data,
            )
            ring.p.commit(step)
            T.copy(r_s, r_p)
            T.wgmma_gemm(r_p, s.do[slot, :, :], r_dv)  # 4
            T.wait_wgmma(0)
            ring.q.release(step)
            first -= 1 << walk.tile_log2
            step += 1
    if walk.part < 0:  # 7
        store(r_dv, s.k, dv, walk, 0, D, dtype)
    else:
        T.copy(r_dv, parts[walk.part, walk.kv_head, 1, :, :])


@T.macro
def keys(dk, parts, s, ring, walk, scale, D, dtype):
    r_dk = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_dp = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # dP^T, dS^T
    r_p = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")
    r_ds = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    r_delta = T.alloc_fragment((KV_QUERY_ROWS,), "float32")
    slot = T.alloc_var("int32")
    T.clear(r_dk)
    T.barrier_wait(ring.kv, 0)
    for step in T.serial(walk.turns * walk.tiles):
        slot = uniform(ring.q.slot(step))
        ring.q.wait(step)
        T.wgmma_gemm(  # 5
            s.v[0, :, :], s.do[slot, :, :], r_dp, transpose_B=True, clear_accum=True
        )
        T.copy(s.stats[slot, DELTA, :], r_delta)
        ring.p.wait(step)
        T.call_extern(
            "handle",
            "qla::get_pieces",
            r_p.data,
            T.access_ptr(s.p[ring.p.slot(step), 0], "r", s.p.shape[1]),
        )
        ring.p.release(step)
        T.wait_wgmma(0)
        ds_from_dp(r_dp, r_p, lambda _, row: r_delta[row])
        T.copy(r_dp, r_ds)
        T.wgmma_gemm(r_ds, s.q[slot, :, :], r_dk)  # 6
        T.wait_wgmma(0)
        ring.q.release(step)
    for key, d in T.Parallel(WARPGROUP_KEYS, D):
        r_dk[key, d] *= scale
    if walk.part < 0:  # 7
        store(r_dk, s.v, dk, walk, 0, D, dtype)
    else:
        T.copy(r_dk, parts[walk.part, walk.kv_head, 0, :, :])


def build(variant: Variant):
    plan, D = schedule(variant), variant.D
    num_queries, num_padded, num_heads = T.dynamic("num_queries, num_padded, num_heads")
    num_tokens, kv_heads, num_parts = T.dynamic("num_tokens, kv_heads, num_parts")
    num_items, capacity = T.dynamic("num_items, capacity")
    q_shape, kv_shape = (num_queries, num_heads, D), (num_tokens, kv_heads, D)

    @T.prim_func
    def bwd_dkv_wide(
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
        parts: T.Tensor((num_parts, kv_heads, 2, WARPGROUP_KEYS, D), "float32"),
        tile_log2: T.int32,
        q_shift: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(capacity, threads=plan.block) as block:
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            of_item = (
                num_heads, kv_heads, tile_log2, q_shift, num_tokens, num_parts, WARPGROUP_KEYS,
            )  # fmt: skip
            if block < header[KV_ORDERED]:
                if warpgroup == 0:
                    T.set_max_nreg(plan.role("values").regs, 1)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    values(dv, parts, s, ring, walk, scale, D, variant.dtype)
                elif warpgroup == 1:
                    T.set_max_nreg(plan.role("keys").regs, 1)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    keys(dk, parts, s, ring, walk, scale, D, variant.dtype)
                else:
                    T.set_max_nreg(plan.role("load").regs, 0)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    if tx < 32:
                        load(k, v, q, s, ring, walk, q_shift)
                    elif tx < 64:
                        load_rows(None, do, s, ring.q, ring.do_front, walk, q_shift)  # 2
                    else:
                        row_stats(stats, s, ring.q, walk, tx - 64, q_shift)

    return bwd_dkv_wide
