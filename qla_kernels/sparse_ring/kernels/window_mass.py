"""window_mass -- how much of the observed queries' attention each key gets, as integers.

A CTA has 64 observed queries of each of up to four heads that share a key head, and a part of the
keys. Per tile of 256 keys and per head, in base 2:
    P^T  = 2^{scale K Q^T - LSE}                              [256, 64], masked
    mass = round(2^30 / rows * rowsum P^T)

Steps (numbers appear again in the roles):
    1 load    Q once; K of a tile
    2 keys    LSE once: the sum of what was found of parts of the keys
    3 keys    K to registers, for all heads
    4 keys    K Q^T of a head
    5 keys    the mask, where a block of keys is not before the observed one
    6 keys    mass

Bounded by the tensor cores and exp2, which take turns more than they overlap. A sum has a fixed
order: 16 queries in a thread, then four threads; all sums after it are of integers.
Why this shape: keys are rows, so that a sum over queries stays within four threads, and are read
once for four heads. Two warpgroups with all four heads' products in flight were slower than these
four with one each, 243 us for 214 (docs/notes).
"""

import tilelang.language as T

from qla_kernels.sparse_ring import window
from qla_kernels.sparse_ring.patterns import BLOCK, OBSERVED
from qla_kernels.sparse_ring.window import FLOOR, LOADING, ROW, load
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.math import LOG2E
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule

KEYS = 256  # of a tile
BLOCKS = KEYS // BLOCK  # one for each warpgroup
HEADS = 4  # of a CTA
ROWS = HEADS * OBSERVED

Variant, VARIANTS = window.Variant, window.VARIANTS

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # s_lse, written once, has its own
}

SLOTS = 2
THREADS = 512  # that have keys
LSE_READY = 8  # named barrier


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "keys",
                warps=16,
                regs=112,
                waits=("q_full", "k_full"),
                signals=("k_free",),
                computes="P^T, mass",
                uses=("wgmma",),
            ),
            *LOADING,
        ),
        rings={"k": SLOTS},
        # Q, K; LSE; barriers and alignment
        smem_bytes=(ROWS + SLOTS * KEYS) * v.D * 2 + ROWS * 4 + 1024,
    )


@T.macro
def add_parts(lse, s_lse, unit, row0, num_rows, num_parts):
    """2: the LSE of each row over all keys, in base 2; +inf where no query is: its P is 0."""
    peak, total = T.alloc_var("float32"), T.alloc_var("float32")
    row = T.get_thread_binding()
    if row < ROWS:
        peak = FLOOR
        total = 0
        s_lse[row] = T.infinity("float32")
        if row0 + row < num_rows:
            for p in rolled(num_parts):
                peak = T.max(peak, lse[p, unit, row0 + row])
            for p in rolled(num_parts):  # the difference first: it is exactly 0 of the largest
                total += T.exp2((lse[p, unit, row0 + row] - peak) * LOG2E)
            s_lse[row] = peak * LOG2E + T.log2(total)
    T.sync_threads(LSE_READY, THREADS)


@T.macro
def keys(
    v, lse, block, mass, s_q, s_k, s_lse, q_full, ring,
    unit, row0, first, num_tiles, last, scale, share, num_rows, num_parts, L,
):  # fmt: skip
    r_k = T.alloc_fragment((KEYS, v.D), v.dtype)
    r_s = T.alloc_fragment((KEYS, OBSERVED), "float32")
    r_sum = T.alloc_fragment((KEYS,), "float32")
    scale2 = T.alloc_var("float32")
    b, next_b = T.alloc_var("int32"), T.alloc_var("int32")  # of this warpgroup
    mine, end = T.get_thread_binding() // 128, L // BLOCK - 1
    scale2 = scale * LOG2E
    add_parts(lse, s_lse, unit, row0, num_rows, num_parts)
    next_b = block[T.min(first * BLOCKS + mine, end)]
    T.barrier_wait(q_full, 0)
    for i in T.serial(num_tiles):
        b = next_b
        next_b = block[T.min((first + i + 1) * BLOCKS + mine, end)]  # arrives meanwhile
        ring.wait(i)
        T.copy(s_k[ring.slot(i), :, :], r_k)  # 3
        for h in T.serial(T.min(HEADS, (num_rows - row0) // OBSERVED)):
            T.wgmma_gemm(  # 4
                r_k, s_q[h, :, :], r_s, transpose_B=True, clear_accum=True, policy=ROW
            )
            T.wait_wgmma(0)
            if h == 0:  # K is used, so it has arrived
                ring.release(i)
            if b >= last:
                for j, r in T.Parallel(KEYS, OBSERVED):  # 5
                    seen = (b == last) & (j % BLOCK <= r)
                    r_s[j, r] = T.if_then_else(seen, r_s[j, r], -T.infinity("float32"))
            for j, r in T.Parallel(KEYS, OBSERVED):  # 6
                r_s[j, r] = T.exp2(r_s[j, r] * scale2 - s_lse[h * OBSERVED + r])
            T.reduce_sum(r_s, r_sum, dim=1)
            for j in T.Parallel(KEYS):
                if (first + i) * KEYS + j < L:
                    mass[unit, row0 // OBSERVED + h, (first + i) * KEYS + j] = T.cast(
                        T.nearbyint(r_sum[j] * share), "int32"
                    )


def build(v: Variant):
    plan = schedule(v)
    B, L, Hk, num_rows, group = T.dynamic("B, L, Hk, num_rows, group")
    units, blocks, num_parts = T.dynamic("units, blocks, num_parts")
    k_batch, k_token, k_head = T.dynamic("k_batch, k_token, k_head")

    @T.prim_func
    def window_mass(
        q: T.Tensor((units, num_rows, v.D), v.dtype),
        k: T.StridedTensor((B, L, Hk, v.D), (k_batch, k_token, k_head, 1), v.dtype),
        block: T.Tensor((blocks,), "int32"),
        lse: T.Tensor((num_parts, units, num_rows), "float32"),
        mass: T.Tensor((units, group, L), "int32"),
        last: T.int32,
        scale: T.float32,
        share: T.float32,
        parts: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS), units, parts, threads=plan.threads) as (
            tile, unit, part,
        ):  # fmt: skip
            s_q = T.alloc_shared((HEADS, OBSERVED, v.D), v.dtype)
            s_k = T.alloc_shared((SLOTS, KEYS, v.D), v.dtype)
            s_lse = T.alloc_shared((ROWS,), "float32")
            q_full = T.alloc_barrier([plan.arrivals("q_full")])
            k_full = T.alloc_barrier([plan.arrivals("k_full")] * SLOTS)
            k_free = T.alloc_barrier([plan.arrivals("k_free")] * SLOTS)
            ring = Ring(k_full, k_free, SLOTS)
            first, num_tiles = T.alloc_var("int32"), T.alloc_var("int32")
            row0 = T.alloc_var("int32")
            first = T.ceildiv(L, KEYS) * part // parts
            num_tiles = T.ceildiv(L, KEYS) * (part + 1) // parts - first
            row0 = tile * ROWS

            tx = T.get_thread_binding()
            if tx < plan.end("keys"):
                T.set_max_nreg(plan.role("keys").regs, 1)
                keys(
                    v, lse, block, mass, s_q, s_k, s_lse, q_full, ring,
                    unit, row0, first, num_tiles, last, scale, share, num_rows, num_parts, L,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        q, k, s_q, s_k, q_full, ring,
                        unit, row0, unit // Hk, unit % Hk, first, num_tiles,
                    )  # fmt: skip

    return window_mass.with_attr("global_symbol", f"window_mass_{v.dtype}_d{v.D}")
