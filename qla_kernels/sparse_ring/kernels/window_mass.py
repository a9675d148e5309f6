"""window_mass -- the attention that each key gets from the observed queries, as an integer.

A CTA has 64 observed queries of each of up to four heads that share a key head, and a part of the
keys. A tile is 192 keys, 64 for each of three warpgroups. Per tile and pair of heads, in base 2:
    P^T  = 2^{scale K Q^T - LSE}                              [64, 2 x 64], masked
    mass = round(2^30 / rows * rowsum P^T), for each head

Steps (numbers appear again in the roles):
    1 load    Q once; K of a tile
    2 keys    LSE once: combined from the LSEs of all parts of the keys
    3 keys    K Q^T of a pair of heads
    4 keys    during 3, for the pair before: the mask, if keys are not before the observed block
    5 keys    then mass

Bounded by the tensor cores and exp2. A sum has a fixed order: 16 queries in a thread, even ones and
odd ones, then four threads; all later sums are sums of integers.
Why this shape: keys are rows, so a sum over queries stays within four threads, and keys are read
once for four heads. A product is always in flight, as in window_lse; if a CTA has only one pair of
heads, or a single head, it is the product of the next tile. Three warpgroups with 160 registers
hide more latency than two with 240: 142 us instead of 163. If they take turns to start their
products, it is 136 us. Four warpgroups that each waited for a product took 222 us.
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
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

MASS_WARPGROUPS = 3  # warpgroups, with a block of keys each
MASS_KEYS = MASS_WARPGROUPS * BLOCK  # keys of a tile
PAIR = 2 * BLOCK

Variant, VARIANTS, PASS_CONFIGS = window.Variant, window.VARIANTS, window.PASS_CONFIGS

MASS_SLOTS = 3
LOADS = 8  # parts of a row's LSE that are loaded at a time


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "keys",
                warps=4 * MASS_WARPGROUPS,
                regs=160,
                waits=("q_full", "k_full", "turn_free"),
                signals=("k_free", ("turn_free", WARPGROUP_THREADS)),
                computes="P^T, mass",
                uses=("wgmma",),
            ),
            *LOADING,
        ),
        rings={"q": 1, "k": MASS_SLOTS, "turn": MASS_WARPGROUPS},
        named={"lse_ready": Named(MASS_WARPGROUPS * WARPGROUP_THREADS)},
        tiles={
            "q": Tile((HEADS // 2, PAIR, variant.D), variant.dtype, swizzled=True),
            "k": Tile((MASS_SLOTS, MASS_KEYS, variant.D), variant.dtype, swizzled=True),
            "lse": Tile((CTA_ROWS,), "float32"),
        },
    )


@T.macro
def add_parts(lse, s_lse, unit, row0, row, num_rows, num_parts):
    """Sets s_lse[row] to the row's LSE over all keys, in base 2.

    A row without a query gets +inf, so that its P is 0.
    """
    parts_lse = T.alloc_local((LOADS,), "float32")
    peak, total = T.alloc_var("float32"), T.alloc_var("float32")
    if row < CTA_ROWS:
        peak = FLOOR
        total = 0
        s_lse[row] = T.infinity("float32")
        if row0 + row < num_rows:
            for n in rolled(T.ceildiv(num_parts, LOADS)):
                for u in T.unroll(LOADS):  # a repeated last part does not change the maximum
                    parts_lse[u] = lse[T.min(n * LOADS + u, num_parts - 1), unit, row0 + row]
                for u in T.unroll(LOADS):
                    peak = T.max(peak, parts_lse[u])
            for n in rolled(T.ceildiv(num_parts, LOADS)):
                for u in T.unroll(LOADS):
                    parts_lse[u] = -T.infinity("float32")
                    if n * LOADS + u < num_parts:
                        parts_lse[u] = lse[n * LOADS + u, unit, row0 + row]
                for u in T.unroll(LOADS):  # the difference first: for the largest it is exactly 0
                    total += T.exp2((parts_lse[u] - peak) * LOG2E)
            s_lse[row] = peak * LOG2E + T.log2(total)


@T.macro
def multiply(s, ring, w, i, pair, step, r_s):
    """Starts a product; the warpgroups do so in turn, one after the other."""
    T.barrier_wait(ring.turn[w], (step + T.cast(w == 0, "int32")) % 2)  # not before the first turn
    T.wgmma_gemm(  # 3
        s.k[ring.k.slot(i), w * BLOCK : (w + 1) * BLOCK, :],
        s.q[pair, :, :],
        r_s,
        transpose_B=True,
        clear_accum=True,
    )
    T.barrier_arrive(ring.turn[(w + 1) % MASS_WARPGROUPS])


@T.macro
def put(mass, of_key, key0, unit, head0, share):
    """Writes the mass of this thread's key and head, which `window.weigh` assigned to it."""
    lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
    head = head0 + lane // 2 % 2
    key = key0 + warp * 16 + lane % 2 * 8 + lane // 4
    if (head < mass.shape[1]) & (key < mass.shape[2]):
        mass[unit, head, key] = T.cast(T.nearbyint(of_key * share), "int32")


@T.macro
def keys(lse, block, mass, s, ring, lse_ready, x, last, scale, share):
    unit, row0, first, num_tiles = x
    scale2, num_parts, num_rows = scale * LOG2E, lse.shape[0], lse.shape[2]
    r_s0 = T.alloc_fragment((BLOCK, PAIR), "float32")
    r_s1 = T.alloc_fragment((BLOCK, PAIR), "float32")
    of_key = T.alloc_var("float32")
    b0, b1, next_b0, next_b1 = (T.alloc_var("int32") for _ in range(4))
    tile0, tile1, following, two = (T.alloc_var("int32") for _ in range(4))
    w, head0, end = T.alloc_var("int32"), row0 // BLOCK, block.shape[0] - 1
    w = T.shfl_sync(T.get_thread_binding(1), 0)  # for ptxas: one value in the warp
    add_parts(
        lse, s.lse, unit, row0, w * WARPGROUP_THREADS + T.get_thread_binding(0), num_rows, num_parts
    )
    lse_ready.sync()
    two = T.cast(num_rows - row0 > PAIR, "int32")  # pairs of heads, less one
    next_b0 = block[T.min(first * MASS_WARPGROUPS + w, end)]
    next_b1 = block[T.min((first + T.min(1 >> two, num_tiles - 1)) * MASS_WARPGROUPS + w, end)]
    T.barrier_wait(ring.q, 0)
    ring.k.wait(0)
    multiply(s, ring, w, 0, 0, 0, r_s0)
    for n in T.serial(T.ceildiv(num_tiles << two, 2)):
        tile0 = 2 * n >> two
        tile1 = T.min((2 * n + 1) >> two, num_tiles - 1)  # an odd count: the last tile, twice
        following = T.min((2 * n + 2) >> two, num_tiles - 1)
        b0 = next_b0
        b1 = next_b1
        next_b0 = block[T.min((first + following) * MASS_WARPGROUPS + w, end)]  # arrive meanwhile
        ahead = T.min((2 * n + 3) >> two, num_tiles - 1)
        next_b1 = block[T.min((first + ahead) * MASS_WARPGROUPS + w, end)]
        ring.k.wait(tile1)
        T.wait_wgmma(0)
        if two == 0:
            ring.k.release(tile0)
        multiply(s, ring, w, tile1, two, 2 * n + 1, r_s1)
        of_key = window.weigh(r_s0, T.address_of(s.lse[0]), b0, last, scale2)  # 4, 5
        put(mass, of_key, ((first + tile0) * MASS_WARPGROUPS + w) * BLOCK, unit, head0, share)
        ring.k.wait(following)
        T.wait_wgmma(0)
        ring.k.release(tile1)
        multiply(s, ring, w, following, 0, 2 * n + 2, r_s0)
        of_key = window.weigh(r_s1, T.address_of(s.lse[two * PAIR]), b1, last, scale2)
        put(
            mass,
            of_key,
            ((first + tile1) * MASS_WARPGROUPS + w) * BLOCK,
            unit,
            head0 + 2 * two,
            share,
        )
    T.wait_wgmma(0)


def build(variant: Variant):
    plan = schedule(variant)
    B, L, Hk, num_rows, group = T.dynamic("B, L, Hk, num_rows, group")
    units, blocks, num_parts = T.dynamic("units, blocks, num_parts")

    @T.prim_func
    def window_mass(
        q: T.Tensor((units, num_rows, variant.D), variant.dtype),
        k: strided("k", "batch token head", (B, L, Hk, variant.D), variant.dtype),
        block: T.Tensor((blocks,), "int32"),
        lse: T.Tensor((num_parts, units, num_rows), "float32"),
        mass: T.Tensor((units, group, L), "int32"),
        last: T.int32,
        scale: T.float32,
        share: T.float32,
        parts: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, CTA_ROWS), units, parts, threads=plan.block) as (
            tile,
            unit,
            part,
        ):
            T.import_source(window.SOURCE)
            s, ring = tiles(plan), rings(plan)
            lse_ready = NamedBarrier(plan, "lse_ready")
            first, num_tiles, row0 = (T.alloc_var("int32") for _ in range(3))
            first = T.ceildiv(L, MASS_KEYS) * part // parts
            num_tiles = T.ceildiv(L, MASS_KEYS) * (part + 1) // parts - first
            row0 = tile * CTA_ROWS
            x = Part(unit, row0, first, num_tiles)

            await_previous()
            if T.get_thread_binding(1) < MASS_WARPGROUPS:
                T.set_max_nreg(plan.role("keys").regs, 1)
                keys(lse, block, mass, s, ring, lse_ready, x, last, scale, share)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding(0) < 32:
                    load(q, k, s, ring, x)

    return window_mass
