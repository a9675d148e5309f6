"""anchored_fwd -- rows of new tokens, from the state before their chunk and the chunk's tokens.

A sequence's anchor S [K, V] is the state after its last whole chunk (C = 64 tokens) but one, or but
none; its tail has the tokens since, the new ones last, in one chunk or two. Per chunk, exactly as
fused_fwd computes it (its docstring has the maths), for all rows of the tail:
    L, A, W, V'                                                             [C, C], [V, C]
and for the columns c of O^T and rows of P that belong to new tokens, at most 8:
    O^T   = (scale e) S Q^T + V'^T P^T                                      [V, 8]
    S     = e^gamma_last S + (d V'^T) K        where another chunk follows  [V, K]

Steps (numbers appear again in the roles); a CTA walks items, a sequence, value head and V tile:
    1 load_k  k of the tail's chunk, as many rows as there are; q of the new tokens
    2 load_s  S of the item
      load_v  v of the tail's chunk
    3 gate    gamma, beta and decays, by fused_fwd's role
    4 solve   K K^T and K Q^T; P's rows; A, as far as there are rows
    5 state   S to registers, transposed; S K^T and S Q^T
    6 state   W^T; V'^T; O^T, written at once
    7 state   S of the next chunk, written as the new anchor if all of this chunk was there before

Bounded by memory: 4 K V bytes of S and, on average, 32 rows of k and v, for 4200 cycles of an SM.
Why this shape: computing the whole chunk again takes less time than memory does if one item's
solve, another's state and a third's loads run at once; then the tail holds nothing but tokens as
they came in, and a row's bits are those of the chunk kernel by construction. Rows past the tail's
end hold anything: they reach rows and columns that are replaced by zero.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import RawGates, gate, move_state
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES
from qla_kernels.gdn.kernels.chain.items import After, after
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    GATE_ROWS,
    LAST,
    SCALE_E,
    TILE,
    D,
    accumulator_layout,
    load_transposed,
    slot_of,
)
from qla_kernels.gdn.kernels.chain.new_rows import SOURCE
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role
from qla_kernels.gdn.kernels.chain.solve import clear_above
from qla_kernels.gdn.kernels.chain.tail import (
    PlacedGates,
    Walk,
    begin_walk,
    find,
    load_k,
    load_s,
    load_v,
)
from qla_kernels.gdn.shapes import NEW_TOKENS, STEP_COLUMNS, TAIL_PLACES
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Record, Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import (
    WARPGROUP_THREADS,
    Named,
    Role,
    Schedule,
    Tile,
    each,
    free,
    full,
)
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, v, o
    K: int  # q and k have so many numbers or fewer: `size`
    tile_v: int  # columns of V a CTA computes: 64 or 128

    @property
    def states(self) -> int:
        return self.tile_v // TILE


VARIANTS = tuple(
    Variant(dtype, K, tile_v)
    for dtype in ("bfloat16", "float16")
    for K, tile_v in ((128, 128), (128, 64), (64, 64))
)

S_SLOTS = 3  # of the columns of one state warpgroup; each warpgroup has two barriers of its own

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index comes from the table of steps
}


def schedule(variant: Variant) -> Schedule:
    state_regs, solve_regs, load_regs = (192, 88, 40) if variant.states == 2 else (232, 120, 40)
    # A slot of S has the columns of one state warpgroup: the next item's first half is on its way
    # while both halves of this one are read.
    slots = {"s": 4, "k": 3, "q": 2, "v": 2, "gate": 3, "a": 2, "p": 2}
    K, dtype = variant.K, variant.dtype
    return Schedule(
        roles=(
            Role(
                "solve",
                warps=4,
                regs=solve_regs,
                waits=("k_full", "q_full", "gate_full", "a_free", "p_free"),
                signals=each((*free("k", "q", "gate"), *full("a", "p")), WARPGROUP_THREADS),
                computes="A; P's new rows",
                uses=("wgmma", "mma"),
            ),
            Role(
                "state",
                warps=4 * variant.states,
                regs=state_regs,
                waits=full("s", "k", "q", "v", "gate", "a", "p"),
                signals=(
                    ("s_free", WARPGROUP_THREADS),
                    *free("k", "q", "v", "gate", "a", "p"),
                ),
                computes="W, V', O; S",
                uses=("wgmma",),
            ),
            load_role(load_regs, "k, q", "k", "q", name="load_k", tail=False),
            load_role(load_regs, "S", "s", name="load_s", tail=False),
            load_role(load_regs, "v", "v", name="load_v", tail=False),
            gate_role(load_regs, GATES),
        ),
        rings=slots,
        named={"solve": Named(WARPGROUP_THREADS)},
        tiles={
            "s": Tile((S_SLOTS, K, TILE), "float32", swizzled=True),
            "k": Tile((slots["k"], CHUNK, K), dtype, swizzled=True),
            "q": Tile((slots["q"], NEW_TOKENS, K), dtype, swizzled=True),
            "v": Tile((slots["v"], CHUNK, variant.tile_v), dtype, swizzled=True),
            "a": Tile((slots["a"], CHUNK, CHUNK), dtype, swizzled=True),
            "p": Tile((slots["p"], NEW_TOKENS, CHUNK), dtype, swizzled=True),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32", align=1024),
            "l": Tile((SCRATCH_BYTES // 4,), "float32"),  # scratch
        },
    )


@T.macro
def solve(K, s, ring, meet, item, scale):
    num_chunks, first, kept, count = item.num_chunks, item.first, item.kept, item.count
    r_kk = T.alloc_local((32,), "float32")
    r_kq = T.alloc_local((4,), "float32")
    for i in T.serial(num_chunks):
        ring.k.wait(i)
        ring.q.wait(i)
        T.call_extern(  # 4
            "handle",
            f"qla::start_row_products<{K}>",
            r_kk.data,
            r_kq.data,
            slot_of(s.k, ring.k.slot(i), "r"),
            slot_of(s.q, ring.q.slot(i), "r"),
        )
        ring.gate.wait(i)
        T.call_extern("handle", "qla::finish_row_products", r_kk.data, r_kq.data)
        ring.q.release(i)
        ring.k.release(i)
        ring.p.acquire(i)
        T.call_extern(
            "handle",
            "qla::put_new_scores",
            r_kq.data,
            slot_of(s.gate, ring.gate.slot(i), "r"),
            slot_of(s.p, ring.p.slot(i), "w"),
            scale,
            kept - i * CHUNK,
            count,
        )
        T.fence_proxy_async()  # P: written by threads, read by wgmma
        ring.p.commit(i)
        ring.a.acquire(i)
        T.call_extern(
            "handle",
            "qla::gated_inverse_of_rows",
            r_kk.data,
            slot_of(s.gate, ring.gate.slot(i), "r"),
            T.access_ptr(s.l[0], "rw", s.l.shape[0]),
            slot_of(s.a, ring.a.slot(i)),
            T.min(kept + count - i * CHUNK, CHUNK),
            meet.id(),
            first + i,
        )
        ring.gate.release(i)
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        ring.a.commit(i)


@T.macro
def state(variant, anchors, o, s, ring, item, tokens_each):
    K, dtype = variant.K, variant.dtype
    num_chunks, slot, kept, count = item.num_chunks, item.slot, item.kept, item.count
    tok0, hv, v0, w = item.n * tokens_each, item.hv, item.i_tile * variant.tile_v, item.w
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_o = T.alloc_fragment((TILE, NEW_TOKENS), "float32")  # O^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    rows, row = T.alloc_var("int32"), T.alloc_var("int32")
    if num_chunks > 0:
        ring.s.wait(w)
        for r, c in T.Parallel(TILE, K):  # 5
            r_s[r, c] = s.s[ring.s.slot(w), c, r]
        T.copy(r_s, r_s16)
        ring.s.release(w)
    for i in T.serial(num_chunks):
        k_slot, gate_slot = ring.k.slot(i), ring.gate.slot(i)
        rows = T.min(kept + count - i * CHUNK, CHUNK)
        row = kept - i * CHUNK  # of column 0; may lie outside the chunk
        ring.k.wait(i)
        ring.q.wait(i)
        T.wgmma_gemm(r_s16, s.k[k_slot, :, :], r_x, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(r_s16, s.q[ring.q.slot(i), :, :], r_o, transpose_B=True, clear_accum=True)
        ring.v.wait(i)
        load_transposed(s.v, ring.v.slot(i), w, r_vt)
        ring.gate.wait(i)
        T.wait_wgmma(0)
        ring.q.release(i)
        for r, c in T.Parallel(TILE, CHUNK):  # 6
            r_x[r, c] = (
                s.gate[gate_slot, BETA, c] * r_vt[c, r] - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        ring.v.release(i)
        T.copy(r_x, r_w16)
        T.call_extern("handle", "qla::clear_columns", r_w16.data, rows)  # past the end: anything
        ring.a.wait(i)
        T.wgmma_gemm(r_w16, s.a[ring.a.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
        for r, c in T.Parallel(TILE, NEW_TOKENS):
            r_o[r, c] *= s.gate[gate_slot, SCALE_E, T.max(T.min(row + c, CHUNK - 1), 0)]
        T.wait_wgmma(0)
        ring.a.release(i)
        T.copy(r_n, r_n16)
        T.call_extern("handle", "qla::clear_columns", r_n16.data, rows)  # rows that A may not have
        ring.p.wait(i)
        T.wgmma_gemm(r_n16, s.p[ring.p.slot(i), :, :], r_o, transpose_B=True)
        T.wait_wgmma(0)
        ring.p.release(i)
        for r, c in T.Parallel(TILE, NEW_TOKENS):
            if (c < count) & (row + c >= 0) & (row + c < CHUNK):
                o[tok0 + c, hv, v0 + w * TILE + r] = r_o[r, c]
        if i + 1 < num_chunks:  # 7
            for r, c in T.Parallel(TILE, CHUNK):
                r_dn16[r, c] = r_n[r, c] * s.gate[gate_slot, D, c]
            for r, c in T.Parallel(TILE, K):
                r_s[r, c] *= s.gate[gate_slot, LAST, 0]
            T.wgmma_gemm(r_dn16, s.k[k_slot, :, :], r_s)
            T.wait_wgmma(0)
            T.copy(r_s, r_s16)
        ring.gate.release(i)
        ring.k.release(i)
    # After the loop: within it, nvcc would keep all addresses in registers throughout.
    if (num_chunks > 1) & (kept >= CHUNK):  # the state after the first chunk: the last leaves it
        move_state("store", K, r_s, anchors, slot, hv, v0 + w * TILE)


@T.macro
def clear_rows(o, tok0, count, hv, v):
    """Writes zeros to a sequence of padding; a warpgroup has 64 columns."""
    thread = T.get_thread_binding()
    for c in rolled(count):
        if thread < TILE:
            o[tok0 + c, hv, v + thread] = 0


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype, states = variant.K, variant.dtype, variant.states
    num_tokens, num_sequences, num_slots = T.dynamic("num_tokens, num_sequences, num_slots")
    H, HV, V, size = T.dynamic("H, HV, V, size")
    g_n = T.dynamic("g_n")  # of beta, too

    @T.prim_func
    def anchored_fwd(
        q: T.Tensor((num_tokens, H, size), dtype),
        k: strided("k", "n", (num_slots, TAIL_PLACES, H, size), dtype),
        v: strided("v", "n", (num_slots, TAIL_PLACES, HV, V), dtype),
        g: T.StridedTensor((num_slots, TAIL_PLACES, HV), (g_n, HV, 1), "float32"),
        beta: T.StridedTensor((num_slots, TAIL_PLACES, HV), (g_n, HV, 1), "float32"),
        steps: T.Tensor((num_sequences, STEP_COLUMNS), "int32"),
        anchors: strided("anchor", "n h k", (num_slots, HV, K, V), "float32"),
        o: T.Tensor((num_tokens, HV, V), dtype),
        tokens_each: T.int32,  # tokens of a sequence in q and o
        scale: T.float32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=plan.block) as block:
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan, slots={"s": S_SLOTS})
            # of an item; then of this CTA, or of its warpgroup w
            item = Variables(
                "n kh hv i_tile slot row0 kept count num_chunks num_items first live w"
            )
            num_tiles = V // variant.tile_v
            r_step = T.alloc_local((STEP_COLUMNS,), "int32")
            group = T.alloc_var("int32")  # value heads a key head
            group = HV // H
            at, by = T.alloc_local((4,), "int32"), T.alloc_local((4,), "int32")
            walk = Walk(at, by, (num_tiles, group, H), steps, r_step)
            item["first"] = 0  # chunks of earlier items: the rings' next step
            item["live"] = 0  # earlier items with a chunk: the next step of the ring of S
            item["num_items"] = T.ceildiv(num_sequences * HV * num_tiles - block, ctas)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            await_previous()
            begin_walk(block, ctas, walk)
            if warpgroup == 0:
                T.set_max_nreg(plan.role("solve").regs, 0)
                clear_above(s.a, 0, 1)
                for _ in rolled(item.num_items):
                    find(walk, item)
                    now = after(ring, item.first)
                    solve(K, s, now, NamedBarrier(plan, "solve"), item, scale)
                    item["first"] += item.num_chunks
            elif warpgroup <= states:
                T.set_max_nreg(plan.role("state").regs, 1)
                item["w"] = T.shfl_sync(warpgroup - 1, 0)  # uniform, and known to be
                for _ in rolled(item.num_items):
                    find(walk, item)
                    if item.slot < 0:
                        column = item.i_tile * variant.tile_v + item.w * TILE
                        clear_rows(o, item.n * tokens_each, item.count, item.hv, column)
                    now = after(ring, item.first, s=item.live * states)
                    state(variant, anchors, o, s, now, item, tokens_each)
                    item["first"] += item.num_chunks
                    item["live"] += T.min(item.num_chunks, 1)
            else:
                T.set_max_nreg(plan.role("load_k").regs, 0)
                if tx < 32:
                    for _ in rolled(item.num_items):
                        find(walk, item)
                        load_k(K, q, k, s, after(ring, item.first), item, tokens_each)
                        item["first"] += item.num_chunks
                elif tx < 64:
                    for _ in rolled(item.num_items):
                        find(walk, item)
                        load_s(variant, anchors, s, after(ring, item.live * states), item)
                        item["live"] += T.min(item.num_chunks, 1)
                elif tx < 96:
                    for _ in rolled(item.num_items):
                        find(walk, item)
                        load_v(variant, v, s, after(ring, item.first), item)
                        item["first"] += item.num_chunks
                else:
                    gates = RawGates(PlacedGates(g), PlacedGates(beta), beta, 0, g)
                    for _ in rolled(item.num_items):
                        find(walk, item)
                        for i in rolled(item.num_chunks):
                            chunk = Record(
                                begin=T.bitwise_xor(item.row0, i * CHUNK),
                                length=T.min(item.kept + item.count - i * CHUNK, CHUNK),
                                num_chunks=1,
                                hv=item.hv,
                            )
                            slots = After(ring.gate, item.first + i)
                            gate(gates, s.gate, slots, chunk, scale, one_chunk=True)
                        item["first"] += item.num_chunks

    return anchored_fwd
