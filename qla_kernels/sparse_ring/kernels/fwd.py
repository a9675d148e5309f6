"""fwd -- attention to vertical and slash lines, forward: one CTA per 128 query rows and query head.

Per block of 64 rows and 64 keys in which a row sees a key (walk.py finds blocks and masks):
    S   = Q K^T, -inf where a key is not seen                    [64, 64]
    m   = max(m, rows of S);  a = 2^{scale2 (old m - m)}         [64]
    P   = 2^{scale2 (S - m)};  l = a l + rowsum P                [64, 64]
    O   = a O + P V                                              [64, D]
then O / l and LSE = scale2 m + log2 l, merged with o and lse, the result of earlier launches:
    LSE' = log2(2^LSE + 2^lse);  O' = 2^{LSE - LSE'} O + 2^{lse - LSE'} o

Steps (numbers appear again in the roles):
    1 load   Q; K and V of every block that either half of the tile sees, then of the columns
    2 rows   S of the next step, and P V of the step before
    3 rows   the mask, m, a, P, l
    4 rows   a O
    5 rows   merge, write O and LSE

Bounded by the tensor cores, and for masks of single diagonals by L2: K and V of a step are 32 KB,
which gives 64 FLOP a byte if only 64 rows use them. Why this shape: the mask consists of blocks of
64. Each of a tile's two warpgroups has 64 rows of its own. Both walk the same steps and skip steps
that only the other one sees; with neighbouring diagonals a step serves both. They run the same
code, on threads of two dimensions, because two copies of its loops would not fit the instruction
cache. Q stays in registers: from shared memory, S of 64 keys would take all of its bandwidth. P is
the left operand of P V directly in accumulator layout, and P V runs at the same time as the softmax
of the next step. K is released earlier than V, so it has fewer slots.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.sparse_ring.kernels.walk import (
    COLUMNS,
    END,
    SEEN,
    TRIANGLE,
    VISIT,
    Mask,
    QueryTile,
    WalkTable,
    advance,
    query_tile,
    walk_columns,
    walk_end,
    walk_slashes,
)
from qla_kernels.sparse_ring.shapes import BLOCK
from qla_kernels.tile import pin, softmax
from qla_kernels.tile.constants import LN2, LOG2E
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    D: int


VARIANTS = tuple(Variant(dtype, D) for dtype in ("bfloat16", "float16") for D in (128, 64))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # tiles are whole
}


def schedule(variant: Variant) -> Schedule:
    k_slots, v_slots = (4, 8) if variant.D == 128 else (8, 16)
    return Schedule(
        roles=(
            Role(
                "rows",
                warps=8,
                regs=232,
                waits=("q_full", "k_full", "v_full"),
                signals=("k_free", "v_free"),
                computes="S, P, O, LSE",
                uses=("wgmma", "tma_store"),
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("k_free", "v_free"),
                signals=("q_full", "k_full", "v_full"),
                computes="q, k, v; what is seen of them",
                uses=("tma_load",),
            ),
            Role("spare", warps=3, regs=40, computes="fills the warpgroup"),
        ),
        rings={"q": 1, "k": k_slots, "v": v_slots},
        named={"meet": Named(WARPGROUP_THREADS, copies=2)},  # the warps of a warpgroup
        tiles={
            "q": Tile((2, BLOCK, variant.D), variant.dtype, swizzled=True),  # at the end o
            "k": Tile((k_slots, BLOCK, variant.D), variant.dtype, swizzled=True),
            "v": Tile((v_slots, BLOCK, variant.D), variant.dtype, swizzled=True),
            "seen": Tile((k_slots, 2, SEEN), "int32"),  # codes and masks
        },
    )


@T.macro
def load(q, keys, gathered, mask, s, ring, x, seqlen, columns):
    """Loads Q, then makes the steps. `keys` are K and V, `gathered` those of columns."""
    i0, row0, b, h, of_head, kv_head = x
    walked = T.alloc_local((2,), "int32")
    for w in T.unroll(2):  # 1
        rows = q[b, row0 + w * BLOCK : row0 + (w + 1) * BLOCK, h, :]
        T.tma_copy(rows, s.q[w, :, :], barrier=ring.q)
    T.barrier_arrive(ring.q)
    walked[0] = 0
    walked[1] = 0
    if i0 * BLOCK < seqlen:  # else all rows are padding
        walk_slashes(s, ring, walked, mask, *keys, of_head, i0, b, kv_head)
        if columns != 0:
            walk_columns(s, ring, walked, mask, *gathered, of_head, i0)
    walk_end(s, ring, walked)


@T.macro
def hide(r_s, seen):
    """Sets the scores of keys that are not seen to -inf."""
    if seen[0] == TRIANGLE:
        for r, c in T.Parallel(BLOCK, BLOCK):
            r_s[r, c] = T.if_then_else(c <= r, r_s[r, c], -T.infinity("float32"))
    if seen[0] == COLUMNS:
        for r, c in T.Parallel(BLOCK, BLOCK):
            mask = T.if_then_else(c < 32, seen[1], seen[2])
            r_s[r, c] = T.if_then_else((mask >> c % 32) & 1 == 1, r_s[r, c], -T.infinity("float32"))


@T.macro
def attend(s, ring, w, r_o, m, l, met, scale2, D, dtype):
    r_q = T.alloc_fragment((BLOCK, D), dtype)
    r_s = T.alloc_fragment((BLOCK, BLOCK), "float32")
    r_p = T.alloc_fragment((BLOCK, BLOCK), dtype)
    a = T.alloc_local((2,), "float32")
    seen = T.alloc_local((SEEN,), "int32")
    at = T.alloc_local((1,), "int32")
    before = T.alloc_var("int32")
    softmax.begin(m, l)
    T.clear(r_o)
    T.barrier_wait(ring.q, 0)
    T.copy(s.q[w, :, :], r_q)
    at[0] = -1
    advance(s, ring, at, w, seen)
    met[0] = 0
    if seen[0] != END:
        met[0] = 1
        T.wgmma_gemm(r_q, s.k[ring.k.slot(at[0]), :, :], r_s, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        ring.k.release(at[0])
        hide(r_s, seen)
        softmax.grow_max(r_s, m, a, scale2)
        softmax.exponentiate(r_s, m, a, l, scale2)
        T.copy(r_s, r_p)
        before = at[0]
        advance(s, ring, at, w, seen)
        while seen[0] != END:
            T.wgmma_gemm(  # 2
                r_q, s.k[ring.k.slot(at[0]), :, :], r_s, transpose_B=True, clear_accum=True
            )
            ring.v.wait(before)
            T.wgmma_gemm(r_p, s.v[ring.v.slot(before), :, :], r_o)
            T.wait_wgmma(1)
            ring.k.release(at[0])
            hide(r_s, seen)  # 3
            softmax.grow_max(r_s, m, a, scale2)
            softmax.exponentiate(r_s, m, a, l, scale2)
            pin.pin(l[0] + l[1])
            T.wait_wgmma(0)
            ring.v.release(before)
            T.copy(r_s, r_p)
            softmax.rescale(r_o, a)  # 4
            before = at[0]
            advance(s, ring, at, w, seen)
        ring.v.wait(before)
        T.wgmma_gemm(r_p, s.v[ring.v.slot(before), :, :], r_o)
        T.wait_wgmma(0)
        ring.v.release(before)


@T.macro
def weigh(lse, b, h, row0, token0, seqlen, first, old, now):
    """Merges the LSE of this launch, `now` in base 2, into lse, for the rows of a warpgroup.

    `old` and `now` become the weights of the old o and of this launch's o in the merged o. Rows
    from seqlen on are padding, and get an LSE of -inf.
    """
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32 % 4
    both = T.alloc_local((2,), "float32")
    for n in T.unroll(2):
        row = warp * 16 + n * 8 + lane // 4
        old[n] = -T.infinity("float32")
        if first == 0:
            old[n] = lse[b, h, row0 + row] * LOG2E
        if token0 + row >= seqlen:
            now[n] = -T.infinity("float32")
        both[n] = T.max(old[n], now[n])
        if both[n] != -T.infinity("float32"):
            both[n] += T.log2(T.exp2(old[n] - both[n]) + T.exp2(now[n] - both[n]))
            old[n] = T.exp2(old[n] - both[n])
            now[n] = T.exp2(now[n] - both[n])
        else:
            old[n] = 0
            now[n] = 0
    T.sync_warp()  # the four lanes of a row have read its LSE
    for n in T.unroll(2):
        if lane % 4 == 0:
            lse[b, h, row0 + warp * 16 + n * 8 + lane // 4] = both[n] * LN2


class Results(NamedTuple):
    """O and LSE of all launches so far, in fp32, and O of the last one, rounded."""

    o: Any
    lse: Any
    out: Any


@T.macro
def rows(results, s, ring, meet, x, gap, seqlen, scale2, first, finish, variant):
    o, lse, out = results
    i0, row0 = x.i0, x.row0
    o0 = x.b * lse.shape[2] + x.row0
    b, h = x.b, x.h
    dtype, D = variant
    r_o = T.alloc_fragment((BLOCK, D), "float32")
    r_old = T.alloc_fragment((BLOCK, D), "float32")
    r_o16 = T.alloc_fragment((BLOCK, D), dtype)
    m, l, now, old = (T.alloc_local((2,), "float32") for _ in range(4))  # now: LSE, then a weight
    met = T.alloc_local((1,), "int32")
    w, above = T.alloc_var("int32"), T.alloc_var("int32")
    w = T.shfl_sync(T.get_thread_binding(1), 0)  # for ptxas: one value in the warp
    above = w * BLOCK
    attend(s, ring, w, r_o, m, l, met, scale2, D, dtype)
    if (met[0] | first | finish) != 0:  # 5; else o and LSE stay as they are
        softmax.finish(r_o, m, l, now, scale2)
        weigh(lse, b, h, row0 + above, (i0 + w * gap) * BLOCK, seqlen, first, old, now)
        softmax.rescale(r_o, now)
        if first == 0:
            for r, c in T.Parallel(BLOCK, D):
                r_old[r, c] = o[o0 + above + r, h, c]
            softmax.rescale(r_old, old)
            for r, c in T.Parallel(BLOCK, D):
                r_o[r, c] += r_old[r, c]
        if finish != 0:
            T.copy(r_o, r_o16)
            T.copy(r_o16, s.q[w, :, :])
            T.fence_proxy_async()  # s_q: written by threads, read by the TMA store
            meet.sync(w)
            T.tma_copy(s.q[w, :, :], out[o0 + above : o0 + above + BLOCK, h, :])
            T.tma_store_wait(0)
        else:
            for r, c in T.Parallel(BLOCK, D):
                o[o0 + above + r, h, c] = r_o[r, c]


def build(variant: Variant):
    plan = schedule(variant)
    D = variant.D
    B, L, H, Hk, num_tiles = T.dynamic("B, L, H, Hk, num_tiles")
    slots, chunk, num_columns, num_visits = T.dynamic("slots, chunk, num_columns, num_visits")
    heads, room, num_bounds, words = T.dynamic("heads, room, num_bounds, words")
    num_idx, o_rows, out_rows = T.dynamic("num_idx, o_rows, out_rows")

    @T.prim_func
    def fwd(
        q: strided("q", "b l h", (B, L, H, D), variant.dtype),
        k: strided("k", "b l h", (slots, chunk, Hk, D), variant.dtype),
        # V; `v` would sort before v_idx, and swap two parameters of the generated function
        values: strided("v", "b l h", (slots, chunk, Hk, D), variant.dtype),
        k_columns: T.Tensor((heads, num_columns, 1, D), variant.dtype),
        v_columns: T.Tensor((heads, num_columns, 1, D), variant.dtype),
        entries: T.Tensor((heads, room), "int32"),
        bounds: T.Tensor((heads, num_bounds), "int32"),
        d_bits: T.Tensor((heads, words), "int32"),
        v_idx: T.Tensor((heads, num_idx), "int32"),
        visits: T.Tensor((num_visits, VISIT), "int32"),
        first_block: T.Tensor((num_tiles,), "int32"),
        o: T.Tensor((o_rows, H, D), "float32"),
        lse: T.Tensor((B, H, L), "float32"),
        out: T.Tensor((out_rows, H, D), variant.dtype),
        gap: T.int32,
        stripe_blocks: T.int32,
        seqlen: T.int32,
        scale2: T.float32,
        first: T.int32,
        columns: T.int32,
        finish: T.int32,
    ):
        with T.Kernel(B * H * num_tiles, threads=plan.block) as block:
            T.import_source(softmax.SOURCE + pin.SOURCE)
            s, ring = tiles(plan), rings(plan)
            table = WalkTable(entries, bounds, gap, stripe_blocks, num_bounds - 1)
            x = QueryTile(*query_tile(block, H, Hk, first_block, d_bits, gap))

            if T.get_thread_binding(1) < 2:
                T.set_max_nreg(plan.role("rows").regs, 1)
                results, meet = Results(o, lse, out), NamedBarrier(plan, "meet")
                rows(results, s, ring, meet, x, gap, seqlen, scale2, first, finish, variant)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if T.get_thread_binding(0) < 32:
                    keys, gathered = (k, values), (k_columns, v_columns)
                    mask = Mask(table, visits, d_bits, v_idx)
                    load(q, keys, gathered, mask, s, ring, x, seqlen, columns)

    return fwd
