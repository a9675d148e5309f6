"""window_lse -- the log-sum-exp of the observed queries over keys, one CTA per part of the keys.

A CTA has 256 rows of queries that share a key head: 64 observed queries of each of four heads, in
two halves. Per tile of 128 keys and half, in base 2, with m and l in registers from the first tile
to the last:
    S   = scale Q K^T                                         [128, 128], masked
    m'  = max(m, rowmax S)
    l   = 2^{m - m'} l + rowsum 2^{S - m'}
and at the end LSE = m + log2 l of these keys, as a natural logarithm. What parts have found is
added by who reads it.

Steps (numbers appear again in the roles):
    1 load    Q once; K of a tile
    2 rows    S of one half
    3 rows    meanwhile, of the other: the mask, where keys are not before the observed block
    4 rows    and m and l

Bounded by the tensor cores and, as closely, by exp2: one for each of the 128 multiplications.
Why this shape: keys are read once for four heads. No product is in flight where the loop closes:
ptxas would serialise them all.
"""

import tilelang.language as T

from qla_kernels.sparse_ring import window
from qla_kernels.sparse_ring.patterns import BLOCK, OBSERVED
from qla_kernels.sparse_ring.window import FLOOR, LOADING, ROW, load
from qla_kernels.tile.math import LN2, LOG2E
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule

HALF = 128  # rows of a product: each warpgroup has 64
ROWS = 2 * HALF  # of queries a CTA has
KEYS = 128  # of a tile
BLOCKS = KEYS // BLOCK

Variant, VARIANTS = window.Variant, window.VARIANTS

PASS_CONFIGS = {"tl.enable_fast_math": True}

SLOTS = 4


def schedule(v: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "rows",
                warps=8,
                regs=240,
                waits=("q_full", "k_full"),
                signals=("k_free",),
                computes="S, m, l",
                uses=("wgmma",),
            ),
            *LOADING,
        ),
        rings={"k": SLOTS},
        smem_bytes=(ROWS + SLOTS * KEYS) * v.D * 2 + 1024,  # Q, K; barriers and alignment
    )


@T.macro
def multiply(s_q, s_k, ring, e, i, r_s):
    T.wgmma_gemm(  # 2
        s_q[e, :, :],
        s_k[ring.slot(i), :, :],
        r_s,
        transpose_B=True,
        clear_accum=True,
        policy=ROW,
    )


@T.macro
def fold(r_s, r_m, r_l, b0, b1, last, scale2):
    r_old = T.alloc_fragment((HALF,), "float32")
    r_sum = T.alloc_fragment((HALF,), "float32")
    if T.max(b0, b1) >= last:
        for r, c in T.Parallel(HALF, KEYS):  # 3
            b = T.if_then_else(c < BLOCK, b0, b1)
            seen = (b < last) | ((b == last) & (c % BLOCK <= r % OBSERVED))
            r_s[r, c] = T.if_then_else(seen, r_s[r, c], -T.infinity("float32"))
    T.copy(r_m, r_old)  # 4
    T.reduce_max(r_s, r_m, dim=1, clear=False)
    for r, c in T.Parallel(HALF, KEYS):
        r_s[r, c] = T.exp2(r_s[r, c] * scale2 - r_m[r] * scale2)
    T.reduce_sum(r_s, r_sum, dim=1)
    for r in T.Parallel(HALF):
        r_l[r] = r_l[r] * T.exp2((r_old[r] - r_m[r]) * scale2) + r_sum[r]


@T.macro
def put(lse, r_m, r_l, part, unit, row0, num_rows, scale2):
    for r in T.Parallel(HALF):
        if row0 + r < num_rows:
            lse[part, unit, row0 + r] = T.if_then_else(
                r_l[r] > 0, (r_m[r] * scale2 + T.log2(r_l[r])) * LN2, -T.infinity("float32")
            )


@T.macro
def rows(
    block, lse, s_q, s_k, q_full, ring,
    part, unit, row0, first, num_tiles, last, scale, num_rows,
):  # fmt: skip
    r_s0 = T.alloc_fragment((HALF, KEYS), "float32")
    r_s1 = T.alloc_fragment((HALF, KEYS), "float32")
    r_m0 = T.alloc_fragment((HALF,), "float32")
    r_m1 = T.alloc_fragment((HALF,), "float32")
    r_l0 = T.alloc_fragment((HALF,), "float32")
    r_l1 = T.alloc_fragment((HALF,), "float32")
    scale2 = T.alloc_var("float32")
    b0, b1 = T.alloc_var("int32"), T.alloc_var("int32")  # the tile's two blocks
    next_b0, next_b1 = T.alloc_var("int32"), T.alloc_var("int32")
    scale2 = scale * LOG2E
    T.fill(r_m0, FLOOR)
    T.fill(r_m1, FLOOR)
    T.clear(r_l0)
    T.clear(r_l1)
    b0 = block[first * BLOCKS]
    b1 = block[first * BLOCKS + 1]
    T.barrier_wait(q_full, 0)
    for i in T.serial(num_tiles):
        following = T.min(first + i + 1, first + num_tiles - 1) * BLOCKS
        next_b0 = block[following]  # arrives meanwhile
        next_b1 = block[following + 1]
        ring.wait(i)
        multiply(s_q, s_k, ring, 0, i, r_s0)
        multiply(s_q, s_k, ring, 1, i, r_s1)
        T.wait_wgmma(1)
        fold(r_s0, r_m0, r_l0, b0, b1, last, scale2)
        T.barrier_wait(q_full, 0)  # passed: it keeps the next wait from being moved up
        T.wait_wgmma(0)
        ring.release(i)
        fold(r_s1, r_m1, r_l1, b0, b1, last, scale2)
        b0 = next_b0
        b1 = next_b1
    put(lse, r_m0, r_l0, part, unit, row0, num_rows, scale2)
    put(lse, r_m1, r_l1, part, unit, row0 + HALF, num_rows, scale2)


def build(v: Variant):
    plan = schedule(v)
    B, L, Hk, num_rows, parts = T.dynamic("B, L, Hk, num_rows, parts")
    units, blocks = T.dynamic("units, blocks")
    k_batch, k_token, k_head = T.dynamic("k_batch, k_token, k_head")

    @T.prim_func
    def window_lse(
        q: T.Tensor((units, num_rows, v.D), v.dtype),
        k: T.StridedTensor((B, L, Hk, v.D), (k_batch, k_token, k_head, 1), v.dtype),
        block: T.Tensor((blocks,), "int32"),
        lse: T.Tensor((parts, units, num_rows), "float32"),
        last: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS), units, parts, threads=plan.threads) as (
            tile, unit, part,
        ):  # fmt: skip
            s_q = T.alloc_shared((2, HALF, v.D), v.dtype)
            s_k = T.alloc_shared((SLOTS, KEYS, v.D), v.dtype)
            q_full = T.alloc_barrier([plan.arrivals("q_full")])
            k_full = T.alloc_barrier([plan.arrivals("k_full")] * SLOTS)
            k_free = T.alloc_barrier([plan.arrivals("k_free")] * SLOTS)
            ring = Ring(k_full, k_free, SLOTS)
            first, num_tiles = T.alloc_var("int32"), T.alloc_var("int32")
            row0 = T.alloc_var("int32")
            first = L // KEYS * part // parts
            num_tiles = L // KEYS * (part + 1) // parts - first
            row0 = tile * ROWS

            tx = T.get_thread_binding()
            if tx < plan.end("rows"):
                T.set_max_nreg(plan.role("rows").regs, 1)
                rows(
                    block, lse, s_q, s_k, q_full, ring,
                    part, unit, row0, first, num_tiles, last, scale, num_rows,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        q, k, s_q, s_k, q_full, ring,
                        unit, row0, unit // Hk, unit % Hk, first, num_tiles,
                    )  # fmt: skip

    return window_lse.with_attr("global_symbol", f"window_lse_{v.dtype}_d{v.D}")
