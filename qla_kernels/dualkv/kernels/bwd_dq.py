"""bwd_dq -- the gradients of a tile of queries, over the key tiles that it sees.

Items are those of the forward: 128 rows, tokens of one node times the heads of a head slot; row r
is token r % tile_tokens of head r // tile_tokens. For each of an item's key tiles (N = 128 keys; 64
for D = 256):
    P  = exp2(s2 Q K^T - lse2)    dP = dO V^T    dS = P (dP - delta)              [128, N]
    dQ += dS K                                                                    [128, D]
with s2 = scale log2(e); dQ is multiplied by scale at the end. dS is 0 where a key is not seen.

The order of key tiles is the forward's: the causal own tiles, the last one first; the spans'
partial tiles, whose last keys are masked; then all other tiles, which need no mask. Steps:
    1 load   Q and dO, then K and V of each tile
    2 scrub  zero the rows of K behind a tile's last key: dS is 0 there, but the rows may be NaN
    3 mma    S and dP
    4 mma    P, while dP and the other warpgroup's products run; dS
    5 mma    dQ, with dS in registers
    6 mma    dQ out, rounded once

Bounded by the tensor cores (3072 clocks a key tile for D = 128). Why this shape: one CTA owns a
query's gradient. With bwd_dkv, this second pass over the scores makes seven products instead of the
five of bwd, but it needs neither atomics nor fp32 sums in global memory.

For D = 256, Q and dO take half of the shared memory, and leave room for 64 keys with two slots of K
and one of V (3072 clocks a tile, of tensor cores and of shared memory alike), or for 48 keys with
two of both, which takes 11 % more of shared memory for as many keys. V is the one with a single
slot because its only product is over in the middle of a step.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.attn.kernels.delta import DELTA, LSE2
from qla_kernels.dualkv.kernels.items import (
    BOX,
    PANEL,
    causal_tiles,
    clear_rows,
    crosses,
    fetch,
    held,
    keys_of,
    read_item,
    uniform,
)
from qla_kernels.dualkv.shapes import (
    DQ,
    FULL_TILES,
    ITEM_COLUMNS,
    KEY_TILES,
    NODE,
    ORDERED,
    OWN_KEYS,
    OWN_TILES,
    PARTIALS,
    QUERY_ROWS,
    SPAN0,
    SPAN_COLUMNS,
    SPAN_K0,
    SPANS,
    TAIL,
    TILES,
    TOK0,
    TOKENS,
)
from qla_kernels.tile.bounds import clamped
from qla_kernels.tile.constants import LOG2E
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.softmax_backward import clear_hidden, ds_from_dp, probs_from_lse
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

WARPGROUP_ROWS = 64  # of a warpgroup


class Variant(NamedTuple):
    dtype: str
    D: int


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in KEY_TILES)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the item's rows
}


def schedule(variant: Variant) -> Schedule:
    mma_regs, serving_regs = (240, 24) if variant.D < 256 else (232, 40)  # they count causal tiles
    slots = {"q": 1, "k": 2, "v": 2 if variant.D < 256 else 1, "clean": 2}
    queries = Tile((2, WARPGROUP_ROWS, variant.D), variant.dtype)
    keys = KEY_TILES[variant.D][DQ]
    return Schedule(
        roles=(
            Role(
                "mma",
                warps=8,
                regs=mma_regs,
                waits=("q_full", "k_full", "v_full", "clean_full"),
                signals=("k_free", "v_free"),
                computes="P, dS; dQ",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=serving_regs,
                waits=("k_free", "v_free"),
                signals=("q_full", "k_full", "v_full"),
                computes="Q, dO; K, V",
                uses=("tma_load",),
            ),
            Role(
                "scrub",
                warps=1,
                regs=serving_regs,
                waits=("k_full",),
                signals=("clean_full",),
                computes="zeros into K behind the last key",
            ),
            Role("spare", warps=2, regs=serving_regs, computes="fills the warpgroup"),
        ),
        rings=slots,
        named={"meet": Named(WARPGROUP_THREADS, copies=2)},  # the warps of a warpgroup
        tiles={
            "q": queries,
            "do": queries,
            "k": Tile((slots["k"], keys, variant.D), variant.dtype),
            "v": Tile((slots["v"], keys, variant.D), variant.dtype),
        },
    )


class Item(NamedTuple):
    """A row of the table of query tiles, as the roles of bwd_dq read it."""

    token: Any  # row of q and do
    rows: Any  # tokens
    node: Any  # first key of its own node
    own_tiles: Any
    own_keys: Any  # of the last own tile
    span0: Any
    spans: Any
    causal: Any  # number of own tiles that need a mask; they come first
    masked: Any  # number of tiles that need a mask; they come first
    tiles: Any
    diagonal: Any  # the first token's index among the keys of the last own tile
    head0: Any
    tile_log2: Any  # log2(tile_tokens)


@T.macro
def load(q, k, v, do, span, s, ring, x, group):
    i, key0, head, full = (T.alloc_var("int32") for _ in range(4))
    tile = keys_of(s.k)
    for b in rolled(QUERY_ROWS // BOX):  # 1
        tok = x.token + (b * BOX & (1 << x.tile_log2) - 1)
        of_box = x.head0 + (b * BOX >> x.tile_log2)
        for c in T.unroll(q.shape[2] // PANEL):
            for rows, to in ((q, s.q), (do, s.do)):
                T.tma_copy(
                    rows[tok : tok + BOX, of_box, c * PANEL : c * PANEL + PANEL],
                    to[b // 4, b % 4 * BOX : b % 4 * BOX + BOX, c * PANEL : c * PANEL + PANEL],
                    barrier=ring.q,
                )
    T.barrier_arrive(ring.q)
    head = x.head0 // group
    tiles_of_head = (k, v, s, ring, head)
    key0 = x.node + (x.own_tiles - 1) * tile
    fetch(*tiles_of_head, 0, key0)
    i = 1
    if crosses(tile):
        for t in rolled(1, x.causal):
            fetch(*tiles_of_head, i, key0 - t * tile)
            i += 1
    for n in rolled(x.span0, x.span0 + x.masked - x.causal):
        key0 = span[n, SPAN_K0] + span[n, FULL_TILES] * tile
        fetch(*tiles_of_head, i, key0)
        i += 1
    full = x.tiles - i
    if x.spans > 0:
        full = T.min(full, x.own_tiles - x.causal)
    for t in rolled(full):
        fetch(*tiles_of_head, i, x.node + t * tile)
        i += 1
    for n in rolled(x.span0, x.span0 + x.spans):
        key0 = span[n, SPAN_K0]
        full = x.tiles - i
        if n + 1 < x.span0 + x.spans:
            full = T.min(full, span[n, FULL_TILES])
        for t in rolled(full):
            fetch(*tiles_of_head, i, key0 + t * tile)
            i += 1


@T.macro
def scrub(span, s, ring, clean, x):
    keys = T.alloc_var("int32")
    tile = keys_of(s.k)
    keys = x.own_keys
    for i in rolled(x.masked):
        if crosses(tile):
            if i > 0:
                keys = tile
            if i >= x.causal:
                keys = clamped(span[x.span0 + i - x.causal, TAIL], 0, tile)
        elif i > 0:
            keys = clamped(span[x.span0 + i - 1, TAIL], 0, tile)
        ring.k.wait(i)
        clear_rows(s.k, ring.k.slot(i), keys)  # 2
        clean.commit(i)


@T.macro
def mma(dq, stats, span, s, ring, clean, meet, x, scale, D, dtype):
    tile = keys_of(s.k)
    w, slot = T.alloc_var("int32"), T.alloc_var("int32")
    w = uniform(T.get_thread_binding(1))
    r_dq = T.alloc_fragment((WARPGROUP_ROWS, D), "float32")
    r_s = T.alloc_fragment((WARPGROUP_ROWS, tile), "float32")  # S, P
    r_dp = T.alloc_fragment((WARPGROUP_ROWS, tile), "float32")  # dP, dS
    r_ds = T.alloc_fragment((WARPGROUP_ROWS, tile), dtype)
    r_lse2 = T.alloc_fragment((WARPGROUP_ROWS,), "float32")
    r_delta = T.alloc_fragment((WARPGROUP_ROWS,), "float32")
    last, later = T.alloc_var("int32"), T.alloc_var("int32")
    T.clear(r_dq)
    for r in T.Parallel(WARPGROUP_ROWS):
        tok = w * WARPGROUP_ROWS + r & (1 << x.tile_log2) - 1
        head = x.head0 + (w * WARPGROUP_ROWS + r >> x.tile_log2)
        r_lse2[r] = 0
        r_delta[r] = 0
        if tok < x.rows:
            r_lse2[r] = stats[head, LSE2, x.token + tok]
            r_delta[r] = stats[head, DELTA, x.token + tok]
    T.barrier_wait(ring.q, 0)
    last = x.diagonal  # the last key of a masked tile that the first token sees
    later = (1 << x.tile_log2) - 1  # mask of rows: a later token sees one key more; 0: as many
    for i in T.serial(x.tiles):
        slot = uniform(ring.k.slot(i))
        if i < x.masked:
            clean.wait(i)
        ring.k.wait(i)
        T.wgmma_gemm(  # 3
            s.q[w, :, :], s.k[slot, :, :], r_s, transpose_B=True, clear_accum=True
        )
        ring.v.wait(i)
        T.wgmma_gemm(s.do[w, :, :], s.v[slot, :, :], r_dp, transpose_B=True, clear_accum=True)
        T.wait_wgmma(1)
        probs_from_lse(r_s, lambda r, _: r_lse2[r], scale * LOG2E)  # 4
        if i < x.masked:
            clear_hidden(r_s, lambda r, key: key > last + (w * WARPGROUP_ROWS + r & later))
        T.wait_wgmma(0)
        ring.v.release(i)
        ds_from_dp(r_dp, r_s, lambda r, _: r_delta[r])
        if i < x.masked:
            clear_hidden(r_dp, lambda r, key: key > last + (w * WARPGROUP_ROWS + r & later))
            if crosses(tile):
                if i + 1 < x.causal:
                    last += tile
                elif i + 1 < x.masked:
                    last = span[x.span0 + i + 1 - x.causal, TAIL] - 1
                    later = 0
            elif i + 1 < x.masked:
                last = span[x.span0 + i, TAIL] - 1
                later = 0
        T.copy(r_dp, r_ds)
        T.wgmma_gemm(r_ds, s.k[slot, :, :], r_dq)  # 5
        T.wait_wgmma(0)
        ring.k.release(i)
    for r, d in T.Parallel(WARPGROUP_ROWS, D):
        r_dq[r, d] *= scale
    store(r_dq, s.q, dq, x, meet, w, D, dtype)  # 6


@T.macro
def store(r_dq, s_out, dq, x, meet, w, D, dtype):
    """Writes dQ's rows of a warp, 16 rows of one head, to `dq`, staged through s_out's rows of Q.

    Only this warpgroup has read those rows.
    """
    lane = T.get_thread_binding() % 32
    row0 = T.get_thread_binding() // 32 * BOX
    lanes = D // 8  # a row in pieces of 16 bytes
    r_out = T.alloc_fragment((WARPGROUP_ROWS, D), dtype)
    tok, head = T.alloc_var("int32"), T.alloc_var("int32")
    tok = w * WARPGROUP_ROWS + row0 & (1 << x.tile_log2) - 1
    head = x.head0 + (w * WARPGROUP_ROWS + row0 >> x.tile_log2)
    T.copy(r_dq, r_out)
    T.copy(r_out, s_out[w, :, :])
    meet.sync(w)
    for piece in T.unroll(BOX * lanes // 32):
        row = piece * (32 // lanes) + lane // lanes
        if tok + row < x.rows:
            for e in T.vectorized(8):
                dq[x.token + tok + row, head, lane % lanes * 8 + e] = s_out[
                    w, row0 + row, lane % lanes * 8 + e
                ]


def build(variant: Variant):
    plan, D = schedule(variant), variant.D
    num_queries, num_padded, num_heads = T.dynamic("num_queries, num_padded, num_heads")
    num_keys, kv_heads = T.dynamic("num_keys, kv_heads")
    num_items, num_spans, capacity = T.dynamic("num_items, num_spans, capacity")
    q_shape, kv_shape = (num_queries, num_heads, D), (num_keys, kv_heads, D)

    @T.prim_func
    def bwd_dq(
        q: strided("q", "token head", q_shape, variant.dtype),
        do: strided("do", "token head", q_shape, variant.dtype),
        k: strided("k", "token head", kv_shape, variant.dtype),
        v: strided("v", "token head", kv_shape, variant.dtype),
        stats: T.Tensor((num_heads, 2, num_padded), "float32"),
        header: T.Tensor((8,), "int32"),
        item: T.Tensor((num_items, ITEM_COLUMNS), "int32"),
        span: T.Tensor((num_spans, SPAN_COLUMNS), "int32"),
        order: T.Tensor((capacity,), "int32"),
        dq: T.Tensor(q_shape, variant.dtype),
        tile_log2: T.int32,
        q_shift: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(capacity, threads=plan.block) as block:
            s, ring = tiles(plan), rings(plan)
            clean = Ring(ring.clean, ring.clean, plan.rings["clean"])  # never waits for free slots
            tile = keys_of(s.k)
            slots, entry, row, head0 = (T.alloc_var("int32") for _ in range(4))
            slots = num_heads << tile_log2 >> 7
            entry = clamped(order[block], 0, num_items * slots - 1)
            row = T.truncdiv(entry, slots)
            head0 = entry - row * slots << 7 - tile_log2
            numbers = T.alloc_local((ITEM_COLUMNS,), "int32")
            read_item(numbers, item, row, span, q_shift, num_queries, num_keys, tile)
            token, masked, diagonal = (T.alloc_var("int32") for _ in range(3))
            token = numbers[TOK0] - q_shift
            causal = held(causal_tiles(numbers, tile)) if crosses(tile) else 1
            masked = numbers[PARTIALS] + causal
            diagonal = numbers[TOK0] - numbers[NODE] - (numbers[OWN_TILES] - 1) * tile
            x = Item(
                token=token,
                rows=numbers[TOKENS],
                node=numbers[NODE],
                own_tiles=numbers[OWN_TILES],
                own_keys=numbers[OWN_KEYS],
                span0=numbers[SPAN0],
                spans=numbers[SPANS],
                causal=causal,
                masked=masked,
                tiles=numbers[TILES],
                diagonal=diagonal,
                head0=head0,
                tile_log2=tile_log2,
            )

            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if block < header[ORDERED]:
                if warpgroup < 2:
                    T.set_max_nreg(plan.role("mma").regs, 1)
                    meet = NamedBarrier(plan, "meet")
                    mma(dq, stats, span, s, ring, clean, meet, x, scale, D, variant.dtype)
                else:
                    T.set_max_nreg(plan.role("load").regs, 0)
                    if tx < 32:
                        load(q, k, v, do, span, s, ring, x, T.truncdiv(num_heads, kv_heads))
                    elif tx < 64:
                        scrub(span, s, ring, clean, x)

    return bwd_dq
