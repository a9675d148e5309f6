"""window_lse -- the log-sum-exp of the observed queries over keys, one CTA per part of the keys.

A CTA has 256 rows of queries that share a key head: 64 observed queries of each of four heads. A
warpgroup has two of the heads. m and l stay in registers from the first tile to the last; each of
the four threads that share a row has m and l of its own. Per tile of 128 keys and head, in base 2:
    S   = scale Q K^T                                         [64, 128], masked
    m'  = max(m, rowmax S)
    l   = 2^{m - m'} l + rowsum 2^{S - m'}
and at the end LSE = m + log2 l of these keys, as a natural logarithm. The reader of the LSEs
combines those of the parts.

Steps (numbers appear again in the roles):
    1 load    Q once; K of a tile
    2 rows    S of one head
    3 rows    during 2, for the other head: the mask, if keys are not before the observed block
    4 rows    then m and l

Bounded by the tensor cores and, about equally, by exp2: one exp2 for D = 128 multiplications.
Why this shape: keys are read once for four heads. A product runs from one `wait_wgmma(0)` to the
next, at the same time as the exponentials of the product before, also across iterations of the
loop. Threads only read accumulators meanwhile, or ptxas would serialise every product (C7514).
"""

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels import window
from qla_kernels.sparse_ring.kernels.window import (
    CTA_ROWS,
    FLOOR,
    HEADS,
    LOADING,
    Part,
    load,
)
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile import pin
from qla_kernels.tile.constants import LN2, LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

LSE_KEYS = 128  # keys of a tile
LSE_BLOCKS = LSE_KEYS // BLOCK
LSE_WARPGROUPS = HEADS // 2  # warpgroups: each has two heads

Variant, VARIANTS, PASS_CONFIGS = window.Variant, window.VARIANTS, window.PASS_CONFIGS

LSE_SLOTS = 4


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "rows",
                warps=4 * LSE_WARPGROUPS,
                regs=240,
                waits=("q_full", "k_full"),
                signals=("k_free",),
                computes="S, m, l",
                uses=("wgmma",),
            ),
            *LOADING,
        ),
        rings={"q": 1, "k": LSE_SLOTS},
        tiles={
            "q": Tile((HEADS, BLOCK, variant.D), variant.dtype, swizzled=True),
            "k": Tile((LSE_SLOTS, LSE_KEYS, variant.D), variant.dtype, swizzled=True),
        },
    )


@T.macro
def multiply(s, ring, head, i, r_s):
    T.wgmma_gemm(  # 2
        s.q[head, :, :], s.k[ring.k.slot(i), :, :], r_s, transpose_B=True, clear_accum=True
    )


@T.macro
def put(lse, m, l, part, unit, row0, num_rows, scale2):
    lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
    window.fold_quad(m, l, scale2)
    for h in T.unroll(2):
        row = row0 + warp * 16 + h * 8 + lane // 4
        if (lane % 4 == 0) & (row < num_rows):
            lse[part, unit, row] = T.if_then_else(
                l[h] > 0, (m[h] * scale2 + T.log2(l[h])) * LN2, -T.infinity("float32")
            )


@T.macro
def rows(block, lse, s, ring, part, x, last, scale):
    unit, row0, first, num_tiles = x
    scale2, num_rows = scale * LOG2E, lse.shape[2]
    r_s0 = T.alloc_fragment((BLOCK, LSE_KEYS), "float32")
    r_s1 = T.alloc_fragment((BLOCK, LSE_KEYS), "float32")
    m0, m1, l0, l1 = (T.alloc_local((2,), "float32") for _ in range(4))
    b0, b1 = T.alloc_var("int32"), T.alloc_var("int32")  # the tile's two blocks
    next_b0, next_b1, following = (T.alloc_var("int32") for _ in range(3))
    w = T.alloc_var("int32")
    w = T.shfl_sync(T.get_thread_binding(1), 0)  # for ptxas: one value in the warp
    for h in T.unroll(2):
        m0[h] = FLOOR
        m1[h] = FLOOR
        l0[h] = 0
        l1[h] = 0
    b0 = block[first * LSE_BLOCKS]
    b1 = block[first * LSE_BLOCKS + 1]
    T.barrier_wait(ring.q, 0)
    ring.k.wait(0)
    multiply(s, ring, w, 0, r_s0)
    for i in T.serial(num_tiles):
        following = T.min(i + 1, num_tiles - 1)
        next_b0 = block[(first + following) * LSE_BLOCKS]  # arrives meanwhile
        next_b1 = block[(first + following) * LSE_BLOCKS + 1]
        T.wait_wgmma(0)
        multiply(s, ring, LSE_WARPGROUPS + w, i, r_s1)
        window.fold(r_s0, m0, l0, b0, b1, last, scale2)  # 3, 4
        pin.pin(l0[0] + l0[1])
        ring.k.wait(following)
        T.wait_wgmma(0)
        ring.k.release(i)
        multiply(s, ring, w, following, r_s0)
        window.fold(r_s1, m1, l1, b0, b1, last, scale2)
        pin.pin(l1[0] + l1[1])
        b0 = next_b0
        b1 = next_b1
    T.wait_wgmma(0)
    put(lse, m0, l0, part, unit, row0 + w * BLOCK, num_rows, scale2)
    put(lse, m1, l1, part, unit, row0 + (LSE_WARPGROUPS + w) * BLOCK, num_rows, scale2)


def build(variant: Variant):
    plan = schedule(variant)
    B, L, Hk, num_rows, parts = T.dynamic("B, L, Hk, num_rows, parts")
    units, blocks = T.dynamic("units, blocks")

    @T.prim_func
    def window_lse(
        q: T.Tensor((units, num_rows, variant.D), variant.dtype),
        k: strided("k", "batch token head", (B, L, Hk, variant.D), variant.dtype),
        block: T.Tensor((blocks,), "int32"),
        lse: T.Tensor((parts, units, num_rows), "float32"),
        last: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, CTA_ROWS), units, parts, threads=plan.block) as (
            tile,
            unit,
            part,
        ):
            T.import_source(window.SOURCE + pin.SOURCE)
            s, ring = tiles(plan), rings(plan)
            first, num_tiles, row0 = (T.alloc_var("int32") for _ in range(3))
            first = L // LSE_KEYS * part // parts
            num_tiles = L // LSE_KEYS * (part + 1) // parts - first
            row0 = tile * CTA_ROWS
            x = Part(unit, row0, first, num_tiles)

            await_previous()
            if T.get_thread_binding(1) < LSE_WARPGROUPS:
                T.set_max_nreg(plan.role("rows").regs, 1)
                rows(block, lse, s, ring, part, x, last, scale)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding(0) < 32:
                    load(q, k, s, ring, x)

    return window_lse
