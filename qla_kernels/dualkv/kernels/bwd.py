"""bwd -- every gradient in one pass: 128 keys and values of a node, all queries that see them.

Per item (128 keys of one key head) and tile of 64 rows, tokens times query heads of the key head:
    P^T  = exp2(s2 K Q^T - lse2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    [128, 64]
    dV  += P^T dO                   dK  += dS^T Q                                 [128, D]
    dQ  += dS K                     in global memory, to which other CTAs add     [64, D]
with s2 = scale log2(e); dK is multiplied by scale at the end, dQ in dq_cast. P is 0 where a query
comes before the key, and for keys behind the node's end. Items, tiles and their order are those of
bwd_dkv.

Steps (numbers appear again in the roles):
    1 load    K and V; reduce zeroes rows behind the node's end: dQ sums over all 128 keys
    2 load    a tile's Q and dO; stats its lse2 and delta; rows before the run become zero
    3 mma     S^T and dP^T, both operands in shared memory
    4 mma     P^T, while dP^T runs
    5 mma     dV, with P^T in registers; meanwhile dS^T, kept in registers and in shared memory
    6 mma     dQ of the tile before, all its keys and half its columns; dK, with dS^T in registers
    7 mma     dQ to shared memory, while dK runs
    8 reduce  dQ added to the sums, by TMA
    9 mma     dK and dV out, rounded once; in fp32 where other CTAs have parts of the run

Bounded by shared memory and the tensor cores (3072 and 2560 clocks a tile). Why this shape: five
products where two passes take seven. The price is that the last bits of dQ depend on the order in
which CTAs add. These are the family's only float atomics; deterministic=True runs bwd_dq and
bwd_dkv instead. dK and dV repeat bitwise. Only dS crosses the warpgroups, one tile late, so neither
waits for the other. A row's columns are permuted in the sums, see the comment on `SOURCE`.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.attn.kernels.delta import DELTA, LSE2
from qla_kernels.dualkv.kernels.items import clear_rows, uniform
from qla_kernels.dualkv.kernels.walk import WARPGROUP_KEYS, load_rows, row_stats, walk_of
from qla_kernels.dualkv.shapes import KEY_TILE, KV_ITEM_COLUMNS, KV_ORDERED, KV_QUERY_ROWS
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import ONE, Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

BWD_SLOTS = 3  # query tiles in flight


class Variant(NamedTuple):
    dtype: str  # of everything but statistics, sums and parts


D = 128  # with 64, a warpgroup's columns of dQ would be half a swizzled row of K

VARIANTS = tuple(Variant(dtype) for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # stores are guarded by the item's number of keys
}

# A thread holds rows r and r + 8 of dQ, and in each row the columns 8 n + 2 (lane % 4) and the next
# one, for n = 0 .. 7. Its four numbers for n = 2 j and 2 j + 1 are 16 bytes of the sums. They go to
# piece j of the warpgroup's half row, and in every other token to piece j ^ 1, so that the two rows
# that 8 lanes write lie in different banks.
SOURCE = """
namespace qla {
__device__ __forceinline__ int pair(const void *r_ds, int i) {
  return static_cast<const int *>(r_ds)[i];
}
__device__ __forceinline__ void stage(float *row, const float *r_dq, int odd) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *x = r_dq + 8 * j + 2 * half;
      *reinterpret_cast<float4 *>(row + half * 8 * 128 + (j ^ odd) * 16) =
          make_float4(x[0], x[1], x[4], x[5]);
    }
  }
}
}  // namespace qla
"""


def schedule(variant: Variant) -> Schedule:
    queries = Tile((BWD_SLOTS, KV_QUERY_ROWS, D), variant.dtype)
    return Schedule(
        roles=(
            Role(
                "mma",
                warps=8,
                regs=240,
                waits=("kv_full", "q_full", "ds_full", "ds_free", "dq_free"),
                signals=("q_free", "ds_full", "ds_free", "dq_full"),
                computes="P^T, dS^T; dV, dQ, dK",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=24,
                waits=("q_free", "front_full"),
                signals=(("kv_landed", ONE), ("front_full", ONE), "q_full"),
                computes="K, V; Q, dO",
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
            Role(
                "reduce",
                warps=1,
                regs=24,
                waits=("kv_landed", "dq_full"),
                signals=("kv_full", "dq_free"),
                computes="zeros behind the last key; sums of dQ",
            ),
        ),
        rings={"kv": 1, "front": 1, "q": BWD_SLOTS, "ds": 2, "dq": 1},
        tiles={
            "kv": Tile((2, KEY_TILE, D), variant.dtype),  # K, V; V's half stages dK, then dV
            "q": queries,
            "do": queries,
            "stats": Tile((BWD_SLOTS, 2, KV_QUERY_ROWS), "float32"),  # lse2 and delta
            "ds": Tile((2, KEY_TILE, KV_QUERY_ROWS), variant.dtype),  # dS^T, of two tiles
            "dq": Tile((KV_QUERY_ROWS, D), "float32"),  # its columns permuted
        },
    )


@T.macro
def load(k, v, q, do, s, ring, walk, q_shift):
    for i, keys in enumerate((k, v)):  # 1
        T.tma_copy(
            keys[walk.k0 : walk.k0 + KEY_TILE, walk.kv_head, :],
            s.kv[i, :, :],
            barrier=ring.kv_landed,
        )
    if T.shuffle_elect(32):
        T.barrier_arrive(ring.kv_landed)
    load_rows(q, do, s, ring.q, ring.front, walk, q_shift)  # 2


@T.macro
def reduce(sums, num_queries, s, ring, walk, q_shift):
    """Zeroes K's and V's rows behind the last key, then adds each tile's dQ to `sums` by TMA.

    One lane adds the rows of one head of a tile; rows before the run are left out.
    """
    lane = T.get_thread_binding() % 32
    step, begin, token0, token, row = (T.alloc_var("int32") for _ in range(5))
    T.barrier_wait(ring.kv_landed, 0)
    for i in T.unroll(2):
        clear_rows(s.kv, i, walk.keys)  # 1
    T.barrier_arrive(ring.kv_full)
    begin = T.max(walk.k0 - q_shift, 0)
    token0 = walk.last - q_shift
    row = ((walk.kv_head * walk.turns << 6 - walk.tile_log2) + lane) * num_queries
    step = 0
    for _ in rolled(walk.turns):
        for tile in rolled(walk.tiles):
            token = token0 - (tile << walk.tile_log2)
            before = T.max(begin - token, 0)
            ring.dq.wait(step)
            if lane << walk.tile_log2 < KV_QUERY_ROWS:  # 8
                T.call_extern(
                    "handle",
                    "tl::tma_store_add",
                    T.access_ptr(s.dq[(lane << walk.tile_log2) + before, 0], "r", D),
                    T.access_ptr(sums[row + token + before, 0], "rw", D),
                    ((1 << walk.tile_log2) - before) * (D * 4),
                )
                T.call_extern("handle", "tl::tma_store_arrive")
                T.call_extern("handle", "tl::tma_store_wait<0>")
            ring.dq.release(step)
            step += 1
        row += (KV_QUERY_ROWS >> walk.tile_log2) * num_queries


@T.macro
def mma(dk, dv, parts, s, ring, walk, q_shift, scale, dtype):
    w, odd, keys = (T.alloc_var("int32") for _ in range(3))
    w = uniform(T.get_thread_binding(1))
    lane = T.get_thread_binding() % 32
    key = T.get_thread_binding() // 32 * 16 + lane % 16  # the lane's row of dS^T
    r_dk = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_dv = T.alloc_fragment((WARPGROUP_KEYS, D), "float32")
    r_s = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # S^T, P^T
    r_dp = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), "float32")  # dP^T, dS^T
    r_p = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    r_ds = T.alloc_fragment((WARPGROUP_KEYS, KV_QUERY_ROWS), dtype)
    r_dq = T.alloc_fragment((KV_QUERY_ROWS, D // 2), "float32")
    slot, first, begin, end = (T.alloc_var("int32") for _ in range(4))
    T.clear(r_dk)
    T.clear(r_dv)
    keys = walk.keys - w * WARPGROUP_KEYS  # number of the warpgroup's keys; may be 0 or negative
    odd = walk.last - q_shift & 1
    begin = walk.last - walk.k0 - w * WARPGROUP_KEYS  # the tile's first token minus the first key
    end = begin - (walk.tiles << walk.tile_log2)
    first = begin
    T.barrier_wait(ring.kv_full, 0)
    for step in T.serial(walk.turns * walk.tiles):
        slot = uniform(ring.q.slot(step))
        ring.q.wait(step)
        T.wgmma_gemm(  # 3
            s.kv[0, w * WARPGROUP_KEYS : w * WARPGROUP_KEYS + WARPGROUP_KEYS, :],
            s.q[slot, :, :],
            r_s,
            transpose_B=True,
            clear_accum=True,
        )
        T.wgmma_gemm(
            s.kv[1, w * WARPGROUP_KEYS : w * WARPGROUP_KEYS + WARPGROUP_KEYS, :],
            s.do[slot, :, :],
            r_dp,
            transpose_B=True,
            clear_accum=True,
        )
        T.wait_wgmma(1)
        probs_from_lse(  # 4
            r_s, lambda _, row: s.stats[slot, LSE2, row], scale * LOG2E
        )
        if (first < WARPGROUP_KEYS - 1) | (keys < WARPGROUP_KEYS):
            clear_hidden(
                r_s,
                lambda key, row: (key > first + (row & (1 << walk.tile_log2) - 1)) | (key >= keys),
            )
        T.copy(r_s, r_p)
        T.wgmma_gemm(r_p, s.do[slot, :, :], r_dv)  # 5
        T.wait_wgmma(1)
        ds_from_dp(r_dp, r_s, lambda _, row: s.stats[slot, DELTA, row])
        T.copy(r_dp, r_ds)
        ring.ds.acquire(step)
        for block in T.unroll(KV_QUERY_ROWS // 16):
            T.call_extern(
                "handle",
                "tl::ptx_stmatrix_m8n8_x4",
                T.access_ptr(
                    s.ds[step % 2, w * WARPGROUP_KEYS + key, block * 16 + lane // 16 * 8], "w", 8
                ),
                *(T.call_extern("int32", "qla::pair", r_ds.data, block * 4 + i) for i in range(4)),
            )
        T.fence_proxy_async()  # dS: written by threads, read by wgmma
        ring.ds.commit(step)
        multiply(s, ring.ds, step - 1, w, r_dq)  # 6
        T.wgmma_gemm(r_ds, s.q[slot, :, :], r_dk)
        T.wait_wgmma(1)
        hand_over(s, ring, step - 1, w, r_dq, odd)  # 7
        T.wait_wgmma(0)
        ring.q.release(step)
        first -= 1 << walk.tile_log2
        if first == end:
            first = begin  # the run again, for the next heads
    multiply(s, ring.ds, walk.turns * walk.tiles - 1, w, r_dq)
    T.wait_wgmma(0)
    hand_over(s, ring, walk.turns * walk.tiles - 1, w, r_dq, odd)
    for key, d in T.Parallel(WARPGROUP_KEYS, D):
        r_dk[key, d] *= scale
    if walk.part < 0:  # 9
        store(r_dk, s.kv, dk, walk, w, keys, dtype)
        T.sync_warp()
        store(r_dv, s.kv, dv, walk, w, keys, dtype)
    else:
        rows = slice(w * WARPGROUP_KEYS, w * WARPGROUP_KEYS + WARPGROUP_KEYS)
        T.copy(r_dk, parts[walk.part, walk.kv_head, 0, rows, :])
        T.copy(r_dv, parts[walk.part, walk.kv_head, 1, rows, :])


@T.macro
def multiply(s, ds, step, w, r_dq):
    """Issues dQ = dS K of `step` into r_dq: all keys, the warpgroup's half of the columns.

    At step -1 it multiplies an unwritten slot, so that the wgmma needs no branch; hand_over ignores
    that result.
    """
    if step >= 0:
        ds.wait(step)
    T.wgmma_gemm(
        s.ds[uniform((step + 2) % 2), :, :],
        s.kv[0, :, w * (D // 2) : w * (D // 2) + D // 2],
        r_dq,
        transpose_A=True,
        clear_accum=True,
    )


@T.macro
def hand_over(s, ring, step, w, r_dq, odd):
    """Writes dQ of `step` to shared memory for `reduce`, and releases the slot of its dS.

    Does nothing at step -1.
    """
    lane = T.get_thread_binding() % 32
    row = T.get_thread_binding() // 32 * 16 + lane // 4  # the thread's first
    if step >= 0:
        ring.ds.release(step)
        ring.dq.acquire(step)
        T.call_extern(
            "handle",
            "qla::stage",
            T.access_ptr(s.dq[row, w * (D // 2) + lane % 4 * 4], "w", 1),
            r_dq.data,
            odd ^ row & 1,
        )
        T.fence_proxy_async()  # written by threads, read by TMA
        ring.dq.commit(step)


@T.macro
def store(r_grad, s_kv, grad, walk, w, keys, dtype):
    """Writes a warpgroup's rows of dK or dV to `grad`, staged through its rows of V's buffer.

    Only this warpgroup has read those rows of V. Each warp copies the 16 rows that it staged, so a
    warp sync suffices.
    """
    lane = T.get_thread_binding() % 32
    row0 = T.get_thread_binding() // 32 * 16
    lanes = D // 8  # a row in pieces of 16 bytes
    r_out = T.alloc_fragment((WARPGROUP_KEYS, D), dtype)
    T.copy(r_grad, r_out)
    T.copy(r_out, s_kv[1, w * WARPGROUP_KEYS : w * WARPGROUP_KEYS + WARPGROUP_KEYS, :])
    T.sync_warp()
    for piece in T.unroll(16 * lanes // 32):
        row = row0 + piece * (32 // lanes) + lane // lanes
        if row < keys:
            for e in T.vectorized(8):
                grad[walk.k0 + w * WARPGROUP_KEYS + row, walk.kv_head, lane % lanes * 8 + e] = s_kv[
                    1, w * WARPGROUP_KEYS + row, lane % lanes * 8 + e
                ]


def build(variant: Variant):
    plan = schedule(variant)
    num_queries, num_padded, num_heads = T.dynamic("num_queries, num_padded, num_heads")
    num_tokens, kv_heads, num_parts = T.dynamic("num_tokens, kv_heads, num_parts")
    num_items, capacity = T.dynamic("num_items, capacity")
    q_shape, kv_shape = (num_queries, num_heads, D), (num_tokens, kv_heads, D)

    @T.prim_func
    def bwd(
        q: strided("q", "token head", q_shape, variant.dtype),
        do: strided("do", "token head", q_shape, variant.dtype),
        k: strided("k", "token head", kv_shape, variant.dtype),
        v: strided("v", "token head", kv_shape, variant.dtype),
        stats: T.Tensor((num_heads, 2, num_padded), "float32"),
        header: T.Tensor((8,), "int32"),
        kv_item: T.Tensor((num_items, KV_ITEM_COLUMNS), "int32"),
        kv_order: T.Tensor((capacity,), "int32"),
        sums: T.Tensor((num_heads * num_queries, D), "float32"),
        dk: T.Tensor(kv_shape, variant.dtype),
        dv: T.Tensor(kv_shape, variant.dtype),
        parts: T.Tensor((num_parts, kv_heads, 2, KEY_TILE, D), "float32"),
        tile_log2: T.int32,
        q_shift: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(capacity, threads=plan.block) as block:
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            of_item = num_heads, kv_heads, tile_log2, q_shift, num_tokens, num_parts
            if block < header[KV_ORDERED]:
                if warpgroup < 2:
                    T.set_max_nreg(plan.role("mma").regs, 1)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    mma(dk, dv, parts, s, ring, walk, q_shift, scale, variant.dtype)
                else:
                    T.set_max_nreg(plan.role("load").regs, 0)
                    walk = walk_of(kv_item, kv_order[block], *of_item)
                    if tx < 32:
                        load(k, v, q, do, s, ring, walk, q_shift)
                    elif tx < 96:
                        row_stats(stats, s, ring.q, walk, tx - 32, q_shift)
                    else:
                        reduce(sums, num_queries, s, ring, walk, q_shift)

    return bwd
