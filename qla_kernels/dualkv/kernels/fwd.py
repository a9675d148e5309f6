"""fwd -- shared-prompt attention, forward: every CTA draws tiles of queries until none are left.

An item is a query tile of 128 rows of one node: 2^tile_log2 tokens of each head of a head slot,
whose heads share a key head. Row r is token r % 2^tile_log2 of head r // 2^tile_log2. For each key
tile (N = 128 keys; 80 for D = 256) that the item sees:
    S  = Q K^T                                          [128, N]
    m' = max(m, rowmax S);  a = 2^((m - m') scale2);  P = 2^(S scale2 - m' scale2)
    O  = a O + P V                                      [128, D]
and at the item's end o = O / l and lse2 = m scale2 + log2 l, where l is the row sum of P.

tables.py lists an item's key tiles. The first is the last own tile, which is causal. Of 128 keys it
shows every row its own key, so m is finite from then on; of 80 it may show some rows nothing, and
up to two more causal tiles follow. Then come partial tiles, whose last keys are masked, and then
all other tiles, without a mask. Steps:
    1 draw   an item and its Q, one item ahead; load K and V of each tile
    2 scrub  zero the rows of V behind a tile's last key: P is 0 there, but the rows may be NaN
    3 mma    S of tile i, and behind it P V of tile i - 1
    4 mma    softmax of tile i, under the products of the other warpgroup
    5 mma    in an item's first step: o and lse2 of the item before, whose last P V this step issued
    6 store  o, a full tile by TMA; a partial tile by rows, as the rows behind it are another node's
             (for D = 256 mma, all by rows)

Why this shape: a step's products take 2048 clocks of the tensor cores and its exponentials 1024 of
an SM, so both must run at the same time. Two warpgroups issue products in turn, so that one's
softmax runs under the other's products. P V is issued one tile late, behind S of the next tile, so
that it runs while its own warpgroup computes maxima. P stays in registers.
The pipeline continues from one item to the next: S of the next item begins while the last P V runs.
Short responses have few tiles, and filling and draining the pipeline took as long as two tiles.
The masked steps, a few per item, run a second copy of the step's code, so the loop that takes
nearly all the time contains no mask.

For D = 256 shared memory holds one Q, and K and V in two slots of 80 keys (2560 clocks of the
tensor cores a step, 2432 of shared memory; 64 keys would take 2048 and 2048, 5 % more for as many
keys). 80 keys are no whole number of 32 tokens, the tile of 4 packed heads, hence several causal
tiles. Q's halves, one of each warpgroup, are let go of behind the last S of the item, and the next
item's come while its last softmax runs. There is no room for o: a warpgroup's rows go from its
registers to memory, 16 bytes a thread, and do not wait for anything.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.dualkv.kernels.items import (
    CAUSAL,
    HEAD_SLOT,
    Tables,
    crosses,
    draw,
    held,
    load,
    scrub,
    uniform,
    work_columns,
)
from qla_kernels.dualkv.kernels.results import PUT_ROW, put_lse2, put_rows, store
from qla_kernels.dualkv.shapes import (
    FWD,
    ITEM_COLUMNS,
    KEY_TILES,
    NODE,
    OWN_TILES,
    PARTIALS,
    SPAN0,
    SPAN_COLUMNS,
    TAIL,
    TILES,
    TOK0,
    TOKENS,
)
from qla_kernels.tile import softmax
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    D: int


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in KEY_TILES)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # barriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded
}


def staged(variant: Variant) -> bool:
    """Returns whether there is room in shared memory for o and for a second Q."""
    return variant.D < 256


def schedule(variant: Variant) -> Schedule:
    tile, in_memory = KEY_TILES[variant.D][FWD], staged(variant)
    slots = {"q": 2, "k": 2, "v": 2} | ({"o": 2} if in_memory else {}) | {"work": 2, "clean": 2}
    shared = {
        # Q, 64 rows for each warpgroup; names order shared memory, and `q` would be behind `k`
        "halves": Tile((4 if in_memory else 2, 64, variant.D), variant.dtype),
        "k": Tile((slots["k"], tile, variant.D), variant.dtype),
        "v": Tile((slots["v"], tile, variant.D), variant.dtype),
        "work": Tile((slots["work"], work_columns(tile)), "int32", align=16),
    }
    if in_memory:
        shared |= {"o": Tile((2, 64, variant.D), variant.dtype)}
    out = Role(
        "store",
        warps=1,
        regs=40,
        waits=("work_full", "o_full"),
        signals=("work_free", "o_free"),
        computes="O out",
        uses=("tma_store",),
    )
    return Schedule(
        roles=(
            Role(
                "mma",
                warps=8,
                regs=232,
                waits=("work_full", "q_full", "k_full", "v_full", "clean_full")
                + ("o_free",) * in_memory,
                signals=(
                    "work_free",
                    "q_free" if in_memory else ("q_free", WARPGROUP_THREADS),
                    "k_free",
                    "v_free",
                    *((("o_full", WARPGROUP_THREADS),) * in_memory),
                ),
                computes="S, P, O, lse2",
                uses=("wgmma",),
            ),
            Role(
                "draw",
                warps=1,
                regs=40,
                waits=("work_free", "q_free"),
                signals=("work_full", "q_full"),
                computes="who does what; Q",
                uses=("tma_load",),
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("work_full", "k_free", "v_free"),
                signals=("work_free", "k_full", "v_full"),
                computes="K, V",
                uses=("tma_load",),
            ),
            Role(
                "scrub",
                warps=1,
                regs=40,
                waits=("work_full", "v_full"),
                signals=("work_free", "v_free", "clean_full"),
                computes="zeros into V behind the last key",
            ),
            out if in_memory else Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings=slots,
        named={"turn": Named(2 * WARPGROUP_THREADS, copies=2)},  # on the tensor cores
        tiles=shared,
    )


class Warpgroup(NamedTuple):
    """A warpgroup of `mma`, which has 64 rows of an item: what it reads, and its registers."""

    s: Any
    ring: Any
    turn: NamedBarrier
    r_s: Any  # scores of the tile
    r_p: Any  # probabilities of the tile before
    r_o: Any
    m: Any  # with l and a, as softmax.py explains them
    l: Any
    a: Any
    scale2: Any
    last_use: Any  # Q's ring, item and end of its tiles, where its rows are let go of; or None


@T.macro
def mma(variant, span, o, lse2, s, ring, clean, turn, tile_log2, q_shift, scale2):
    tile, in_memory, work = KEY_TILES[variant.D][FWD], staged(variant), ring.work
    w = T.alloc_var("int32")
    w = uniform(T.get_thread_binding(1))
    r_s = T.alloc_fragment((64, tile), "float32")
    r_p = T.alloc_fragment((64, tile), variant.dtype)
    r_o = T.alloc_fragment((64, variant.D), "float32")
    r_o16 = T.alloc_fragment((64, variant.D), variant.dtype)
    m, l, a, first_m, first_l = (T.alloc_local((2,), "float32") for _ in range(5))
    i, j, c, token, rows, slot = (T.alloc_var("int32") for _ in range(6))
    diagonal, span0, masked, tiles, next_slot = (T.alloc_var("int32") for _ in range(5))
    if crosses(tile):
        keys, later = T.alloc_var("int32"), T.alloc_var("int32")
    if not in_memory:
        end = T.alloc_var("int32")  # of the item's tiles
    last_use = None if in_memory else (ring.q, j, end)
    x = Warpgroup(s, ring, turn, r_s, r_p, r_o, m, l, a, scale2, last_use)
    out = (r_o16, o, lse2, tile_log2, in_memory)
    i = 0
    j = 0
    c = 0
    token = 0  # token, rows, slot of the item before: written out in the next item's first step
    rows = 0
    slot = 0
    T.clear(r_p)
    T.clear(r_o)
    if w == 1:
        turn.arrive(0)
    work.wait(0)
    next_slot = uniform(s.work[0, HEAD_SLOT])
    while next_slot >= 0:
        row = s.work[work.slot(j), OWN_TILES]
        diagonal = s.work[work.slot(j), TOK0] - s.work[work.slot(j), NODE] - (row - 1) * tile
        causal = held(uniform(s.work[work.slot(j), CAUSAL])) if crosses(tile) else 1
        masked = uniform(s.work[work.slot(j), PARTIALS]) + causal
        tiles = uniform(s.work[work.slot(j), TILES])
        span0 = s.work[work.slot(j), SPAN0]
        ring.q.wait(use_of_q(variant, j, w))
        if not in_memory:
            end = i + tiles
        # this item's first S, and the last P V before
        start_products(x, w, ring.q.slot(use_of_q(variant, j, w)), i)
        for r, key in T.Parallel(64, tile):
            if key > diagonal + (w * 64 + r & (1 << tile_log2) - 1):
                r_s[r, key] = -T.infinity("float32")
        softmax.begin(first_m, first_l)
        softmax.grow_max(r_s, first_m, a, scale2)
        T.wait_wgmma(0)
        if j > 0:
            ring.v.release(i - 1)
            put_out(x, w, *out, j - 1, token, rows, slot)  # 5
        softmax.exponentiate(r_s, first_m, a, first_l, scale2)
        T.copy(r_s, r_p)
        T.clear(r_o)
        for h in T.unroll(2):
            m[h] = first_m[h]
            l[h] = first_l[h]
        slot = next_slot
        token = s.work[work.slot(j), TOK0] - q_shift
        rows = s.work[work.slot(j), TOKENS]
        work.release(j)
        clean.wait(c)
        c += 1
        for t in rolled(1, masked):
            if crosses(tile):
                keys = diagonal + t * tile + 1
                later = -1
                if t >= causal:
                    keys = span[span0 + t - causal, TAIL]
                    later = 0
                step(
                    x,
                    ring.q.slot(2 * j + w),
                    i + t,
                    keys,
                    w,
                    lambda r: w * 64 + r & (1 << tile_log2) - 1 & later,
                )
            else:
                step(x, ring.q.slot(j), i + t, span[span0 + t - 1, TAIL], w)
            clean.wait(c)
            c += 1
        for t in rolled(masked, tiles):
            step(x, ring.q.slot(use_of_q(variant, j, w)), i + t, None, w)
        i += tiles
        if in_memory:
            ring.q.release(j)
        j += 1
        work.wait(j)
        next_slot = uniform(s.work[work.slot(j), HEAD_SLOT])
    if j > 0:
        ring.v.wait(i - 1)
        T.wgmma_gemm(r_p, s.v[ring.v.slot(i - 1), :, :], r_o)
        T.wait_wgmma(0)
        put_out(x, w, *out, j - 1, token, rows, slot)
    if w == 0:
        turn.sync(0)


def use_of_q(variant, j, w):
    """Returns which use of Q's ring item j is: its halves are two if they are let go of apart."""
    return j if staged(variant) else 2 * j + w


@T.macro
def start_products(x, w, q_slot, i):
    """Issues S of tile i and P V of tile i - 1 (step 3); waits for S and releases K of tile i.

    P V is still in flight on return. For i = 0 there is no tile before: P is 0, and the product
    multiplies it with tile 0's V; its result is cleared.
    """
    s, ring = x.s, x.ring
    before = T.max(i - 1, 0)
    ring.k.wait(i)
    x.turn.sync(w)
    T.wgmma_gemm(
        s.halves[q_slot * 2 + w if x.last_use is None else q_slot, :, :],
        s.k[ring.k.slot(i), :, :],
        x.r_s,
        transpose_B=True,
        clear_accum=True,
    )
    ring.v.wait(before)
    T.wgmma_gemm(x.r_p, s.v[ring.v.slot(before), :, :], x.r_o)
    x.turn.arrive(1 - w)
    T.wait_wgmma(1)
    ring.k.release(i)
    if x.last_use is not None:
        q_ring, j, end = x.last_use
        if i + 1 == end:
            q_ring.release(2 * j + w)


@T.macro
def step(x, q_slot, i, keys, w, more=None):
    """Computes a tile of an item that is not its first one.

    All rows see the tile's first `keys` keys, and row r sees more(r) further ones; with None they
    see the whole tile.
    """
    start_products(x, w, q_slot, i)
    if keys is not None:
        for r, key in T.Parallel(*x.r_s.shape):
            if key >= (keys if more is None else keys + more(r)):
                x.r_s[r, key] = -T.infinity("float32")
    softmax.grow_max(x.r_s, x.m, x.a, x.scale2)  # 4
    T.wait_wgmma(0)  # not behind the exponentials: V's slot is wanted soon
    x.ring.v.release(i - 1)
    softmax.exponentiate(x.r_s, x.m, x.a, x.l, x.scale2)
    T.copy(x.r_s, x.r_p)
    softmax.rescale(x.r_o, x.a)


@T.macro
def put_out(x, w, r_o16, o, lse2, tile_log2, in_memory, j, token, rows, slot):
    """Hands o of item j to `store`, or if it is not staged writes it; writes lse2."""
    r_lse2 = T.alloc_local((2,), "float32")
    softmax.finish(x.r_o, x.m, x.l, r_lse2, x.scale2)
    T.copy(x.r_o, r_o16)
    if in_memory:
        x.ring.o.acquire(2 * j + w)
        T.copy(r_o16, x.s.o[w, :, :])
        T.fence_proxy_async()  # written by threads, read by the TMA store
        x.ring.o.commit(2 * j + w)
    else:
        put_rows(o, r_o16, w, token, rows, slot, tile_log2)  # 6
    put_lse2(lse2, r_lse2, w, token, rows, slot, tile_log2)


def build(variant: Variant):
    plan = schedule(variant)
    D, in_memory = variant.D, staged(variant)
    num_queries, num_keys, num_heads, kv_heads = T.dynamic(
        "num_queries, num_keys, num_heads, kv_heads"
    )
    num_items, num_spans, num_order = T.dynamic("num_items, num_spans, num_order")
    kv_shape = (num_keys, kv_heads, D)

    @T.prim_func
    def fwd(
        q: strided("q", "token head", (num_queries, num_heads, D), variant.dtype),
        k: strided("k", "token head", kv_shape, variant.dtype),
        v: strided("v", "token head", kv_shape, variant.dtype),
        header: T.Tensor((8,), "int32"),
        item: T.Tensor((num_items, ITEM_COLUMNS), "int32"),
        span: T.Tensor((num_spans, SPAN_COLUMNS), "int32"),
        order: T.Tensor((num_order,), "int32"),
        next_order: T.Tensor((1,), "int32"),
        o: T.Tensor((num_queries, num_heads, D), variant.dtype),
        lse2: T.Tensor((num_heads, num_queries), "float32"),
        tile_log2: T.int32,
        group: T.int32,
        q_shift: T.int32,
        scale2: T.float32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=plan.block) as block:
            T.import_source(softmax.SOURCE if in_memory else softmax.SOURCE + PUT_ROW)
            s, ring = tiles(plan), rings(plan)
            clean = Ring(ring.clean, ring.clean, plan.rings["clean"])  # never waits for free slots

            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < 2:
                T.set_max_nreg(plan.role("mma").regs, 1)
                mma(
                    variant, span, o, lse2, s, ring, clean, NamedBarrier(plan, "turn"),
                    tile_log2, q_shift, scale2,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    tables = Tables(header, item, span, order, next_order)
                    draw(q, num_keys, tables, s, ring, tile_log2, q_shift, not in_memory)
                elif tx < 64:
                    load(k, v, span, s, ring, tile_log2, group)
                elif tx < 96:
                    scrub(span, s, ring, clean)
                elif in_memory:
                    store(o, s, ring, tile_log2, q_shift)

    return fwd
