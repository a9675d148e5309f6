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
from qla_kernels.gdn.kernels.chain.forward import gate, move_state
from qla_kernels.gdn.kernels.chain.gated_tiles import SCRATCH_BYTES
from qla_kernels.gdn.kernels.chain.items import After
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
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring, RingInTurns
from qla_kernels.tile.schedule import WARPGROUP_THREADS, Named, Role, Schedule


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
    rings = {"s": 4, "k": 3, "q": 2, "v": 2, "gate": 3, "a": 2, "p": 2}
    return Schedule(
        roles=(
            Role(
                "solve",
                warps=4,
                regs=solve_regs,
                waits=("k_full", "q_full", "gate_full", "a_free", "p_free"),
                signals=tuple(
                    (s, WARPGROUP_THREADS)
                    for s in ("k_free", "q_free", "gate_free", "a_full", "p_full")
                ),
                computes="A; P's new rows",
                uses=("wgmma", "mma"),
            ),
            Role(
                "state",
                warps=4 * variant.states,
                regs=state_regs,
                waits=("s_full", "k_full", "q_full", "v_full", "gate_full", "a_full", "p_full"),
                signals=(
                    ("s_free", WARPGROUP_THREADS),
                    *(f"{x}_free" for x in ("k", "q", "v", "gate", "a", "p")),
                ),
                computes="W, V', O; S",
                uses=("wgmma",),
            ),
            Role(
                "load_k",
                warps=1,
                regs=load_regs,
                waits=("k_free", "q_free"),
                signals=("k_full", "q_full"),
                computes="k, q",
                uses=("tma_load",),
            ),
            Role(
                "load_s",
                warps=1,
                regs=load_regs,
                waits=("s_free",),
                signals=("s_full",),
                computes="S",
                uses=("tma_load",),
            ),
            Role(
                "load_v",
                warps=1,
                regs=load_regs,
                waits=("v_free",),
                signals=("v_full",),
                computes="v",
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=load_regs,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="gamma and its exponentials, beta",
            ),
        ),
        rings=rings,
        named={"solve": Named(WARPGROUP_THREADS)},
        # S; k and q; v; A and P; gates; scratch; alignment after gates; barriers
        smem_bytes=S_SLOTS * variant.K * TILE * 4
        + (rings["k"] * CHUNK + rings["q"] * NEW_TOKENS) * variant.K * 2
        + rings["v"] * CHUNK * variant.tile_v * 2
        + (rings["a"] * CHUNK + rings["p"] * NEW_TOKENS) * CHUNK * 2
        + rings["gate"] * GATE_ROWS * CHUNK * 4
        + SCRATCH_BYTES
        + 768
        + 1024,
    )


@T.macro
def solve(
    K, s_q, s_k, s_gate, s_l, s_a, s_p, q_ring, k_ring, gate_ring, a_ring, p_ring,
    meet, num_chunks, first, kept, count, scale,
):  # fmt: skip
    r_kk = T.alloc_local((32,), "float32")
    r_kq = T.alloc_local((4,), "float32")
    for i in T.serial(num_chunks):
        k_ring.wait(i)
        q_ring.wait(i)
        T.call_extern(  # 4
            "handle",
            f"qla::start_row_products<{K}>",
            r_kk.data,
            r_kq.data,
            slot_of(s_k, k_ring.slot(i), "r"),
            slot_of(s_q, q_ring.slot(i), "r"),
        )
        gate_ring.wait(i)
        T.call_extern("handle", "qla::finish_row_products", r_kk.data, r_kq.data)
        q_ring.release(i)
        k_ring.release(i)
        p_ring.acquire(i)
        T.call_extern(
            "handle",
            "qla::put_new_scores",
            r_kq.data,
            slot_of(s_gate, gate_ring.slot(i), "r"),
            slot_of(s_p, p_ring.slot(i), "w"),
            scale,
            kept - i * CHUNK,
            count,
        )
        T.fence_proxy_async()  # P: written by threads, read by wgmma
        p_ring.commit(i)
        a_ring.acquire(i)
        T.call_extern(
            "handle",
            "qla::gated_inverse_of_rows",
            r_kk.data,
            slot_of(s_gate, gate_ring.slot(i), "r"),
            T.access_ptr(s_l[0], "rw", s_l.shape[0]),
            slot_of(s_a, a_ring.slot(i)),
            T.min(kept + count - i * CHUNK, CHUNK),
            meet.id(),
            first + i,
        )
        gate_ring.release(i)
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        a_ring.commit(i)


@T.macro
def state(
    variant, anchors, o, s_s, s_q, s_k, s_v, s_gate, s_a, s_p, s_ring, q_ring, k_ring, v_ring,
    gate_ring, a_ring, p_ring, num_chunks, slot, kept, count, tok0, hv, v0, w,
):  # fmt: skip
    K, dtype = variant.K, variant.dtype
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
        s_ring.wait(w)
        for r, c in T.Parallel(TILE, K):  # 5
            r_s[r, c] = s_s[s_ring.slot(w), c, r]
        T.copy(r_s, r_s16)
        s_ring.release(w)
    for i in T.serial(num_chunks):
        k_slot, gate_slot = k_ring.slot(i), gate_ring.slot(i)
        rows = T.min(kept + count - i * CHUNK, CHUNK)
        row = kept - i * CHUNK  # of column 0; may lie outside the chunk
        k_ring.wait(i)
        q_ring.wait(i)
        T.wgmma_gemm(r_s16, s_k[k_slot, :, :], r_x, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(r_s16, s_q[q_ring.slot(i), :, :], r_o, transpose_B=True, clear_accum=True)
        v_ring.wait(i)
        load_transposed(s_v, v_ring.slot(i), w, r_vt)
        gate_ring.wait(i)
        T.wait_wgmma(0)
        q_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):  # 6
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        v_ring.release(i)
        T.copy(r_x, r_w16)
        T.call_extern("handle", "qla::clear_columns", r_w16.data, rows)  # past the end: anything
        a_ring.wait(i)
        T.wgmma_gemm(r_w16, s_a[a_ring.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
        for r, c in T.Parallel(TILE, NEW_TOKENS):
            r_o[r, c] *= s_gate[gate_slot, SCALE_E, T.max(T.min(row + c, CHUNK - 1), 0)]
        T.wait_wgmma(0)
        a_ring.release(i)
        T.copy(r_n, r_n16)
        T.call_extern("handle", "qla::clear_columns", r_n16.data, rows)  # rows that A may not have
        p_ring.wait(i)
        T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)
        T.wait_wgmma(0)
        p_ring.release(i)
        for r, c in T.Parallel(TILE, NEW_TOKENS):
            if (c < count) & (row + c >= 0) & (row + c < CHUNK):
                o[tok0 + c, hv, v0 + w * TILE + r] = r_o[r, c]
        if i + 1 < num_chunks:  # 7
            for r, c in T.Parallel(TILE, CHUNK):
                r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
            for r, c in T.Parallel(TILE, K):
                r_s[r, c] *= s_gate[gate_slot, LAST, 0]
            T.wgmma_gemm(r_dn16, s_k[k_slot, :, :], r_s)
            T.wait_wgmma(0)
            T.copy(r_s, r_s16)
        gate_ring.release(i)
        k_ring.release(i)
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
    K, dtype, rings = variant.K, variant.dtype, plan.rings
    num_tokens, num_sequences, num_slots = T.dynamic("num_tokens, num_sequences, num_slots")
    H, HV, V = T.dynamic("H, HV, V")
    anchor_n, anchor_h, anchor_k, size = T.dynamic("anchor_n, anchor_h, anchor_k, size")
    k_n, v_n, g_n = T.dynamic("k_n, v_n, g_n")  # g_n: of beta, too

    @T.prim_func
    def anchored_fwd(
        q: T.Tensor((num_tokens, H, size), dtype),
        k: T.StridedTensor((num_slots, TAIL_PLACES, H, size), (k_n, H * size, size, 1), dtype),
        v: T.StridedTensor((num_slots, TAIL_PLACES, HV, V), (v_n, HV * V, V, 1), dtype),
        g: T.StridedTensor((num_slots, TAIL_PLACES, HV), (g_n, HV, 1), "float32"),
        beta: T.StridedTensor((num_slots, TAIL_PLACES, HV), (g_n, HV, 1), "float32"),
        steps: T.Tensor((num_sequences, STEP_COLUMNS), "int32"),
        anchors: T.StridedTensor(
            (num_slots, HV, K, V), (anchor_n, anchor_h, anchor_k, 1), "float32"
        ),
        o: T.Tensor((num_tokens, HV, V), dtype),
        tokens_each: T.int32,  # tokens of a sequence in q and o
        scale: T.float32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=plan.block) as block:
            T.import_source(SOURCE)
            s_s = T.alloc_shared((S_SLOTS, K, TILE), "float32")
            s_k = T.alloc_shared((rings["k"], CHUNK, K), dtype)
            s_q = T.alloc_shared((rings["q"], NEW_TOKENS, K), dtype)
            s_v = T.alloc_shared((rings["v"], CHUNK, variant.tile_v), dtype)
            s_a = T.alloc_shared((rings["a"], CHUNK, CHUNK), dtype)
            s_p = T.alloc_shared((rings["p"], NEW_TOKENS, CHUNK), dtype)
            s_gate = T.alloc_shared((rings["gate"], GATE_ROWS, CHUNK), "float32")
            s_l = T.alloc_shared((SCRATCH_BYTES // 4,), "float32")
            tiles = (s_s, s_k, s_q, s_v, s_a, s_p)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in tiles})
            s_full = T.alloc_barrier([plan.arrivals("s_full")] * rings["s"])
            s_free = T.alloc_barrier([plan.arrivals("s_free")] * rings["s"])
            k_full = T.alloc_barrier([plan.arrivals("k_full")] * rings["k"])
            k_free = T.alloc_barrier([plan.arrivals("k_free")] * rings["k"])
            q_full = T.alloc_barrier([plan.arrivals("q_full")] * rings["q"])
            q_free = T.alloc_barrier([plan.arrivals("q_free")] * rings["q"])
            v_full = T.alloc_barrier([plan.arrivals("v_full")] * rings["v"])
            v_free = T.alloc_barrier([plan.arrivals("v_free")] * rings["v"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * rings["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * rings["gate"])
            a_full = T.alloc_barrier([plan.arrivals("a_full")] * rings["a"])
            a_free = T.alloc_barrier([plan.arrivals("a_free")] * rings["a"])
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * rings["p"])
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * rings["p"])
            s_ring = RingInTurns(s_full, s_free, S_SLOTS, rings["s"])
            k_ring = Ring(k_full, k_free, rings["k"])
            q_ring = Ring(q_full, q_free, rings["q"])
            v_ring = Ring(v_full, v_free, rings["v"])
            gates = Ring(gate_full, gate_free, rings["gate"])
            a_ring = Ring(a_full, a_free, rings["a"])
            p_ring = Ring(p_full, p_free, rings["p"])

            n, kh, hv, i_tile = (T.alloc_var("int32") for _ in range(4))
            slot, row0, kept, count = (T.alloc_var("int32") for _ in range(4))
            num_chunks, items, first, live, w = (T.alloc_var("int32") for _ in range(5))
            num_tiles = V // variant.tile_v
            r_step = T.alloc_local((STEP_COLUMNS,), "int32")
            group = T.alloc_var("int32")  # value heads a key head
            group = HV // H
            walk = Walk(
                T.alloc_local((4,), "int32"), T.alloc_local((4,), "int32"),
                (num_tiles, group, H),
            )  # fmt: skip
            first = 0  # chunks of earlier items: the rings' next step
            live = 0  # earlier items with a chunk: the next step of the ring of S
            items = T.ceildiv(num_sequences * HV * num_tiles - block, ctas)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            await_previous()
            begin_walk(block, ctas, walk, steps, r_step)
            if warpgroup == 0:
                T.set_max_nreg(plan.role("solve").regs, 0)
                clear_above(s_a, 0, 1)
                for _ in rolled(items):
                    find(
                        walk, steps, r_step,
                        n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                    )  # fmt: skip
                    solve(
                        K, s_q, s_k, s_gate, s_l, s_a, s_p,
                        After(q_ring, first), After(k_ring, first), After(gates, first),
                        After(a_ring, first), After(p_ring, first), NamedBarrier(plan, "solve"),
                        num_chunks, first, kept, count, scale,
                    )  # fmt: skip
                    first += num_chunks
            elif warpgroup <= variant.states:
                T.set_max_nreg(plan.role("state").regs, 1)
                w = T.shfl_sync(warpgroup - 1, 0)  # uniform, and known to be
                for _ in rolled(items):
                    find(
                        walk, steps, r_step,
                        n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                    )  # fmt: skip
                    if slot < 0:
                        column = i_tile * variant.tile_v + w * TILE
                        clear_rows(o, n * tokens_each, count, hv, column)
                    state(
                        variant, anchors, o, s_s, s_q, s_k, s_v, s_gate, s_a, s_p,
                        After(s_ring, live * variant.states), After(q_ring, first),
                        After(k_ring, first), After(v_ring, first), After(gates, first),
                        After(a_ring, first), After(p_ring, first), num_chunks, slot, kept, count,
                        n * tokens_each, hv, i_tile * variant.tile_v, w,
                    )  # fmt: skip
                    first += num_chunks
                    live += T.min(num_chunks, 1)
            else:
                T.set_max_nreg(plan.role("load_k").regs, 0)
                if tx < 32:
                    for _ in rolled(items):
                        find(
                            walk, steps, r_step,
                            n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                        )  # fmt: skip
                        load_k(
                            K, q, k, s_q, s_k, After(q_ring, first), After(k_ring, first),
                            num_chunks, n * tokens_each, row0, kept + count, kh,
                        )  # fmt: skip
                        first += num_chunks
                elif tx < 64:
                    for _ in rolled(items):
                        find(
                            walk, steps, r_step,
                            n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                        )  # fmt: skip
                        load_s(
                            variant.states, K, anchors, s_s, After(s_ring, live * variant.states),
                            num_chunks, slot, hv, i_tile * variant.tile_v,
                        )  # fmt: skip
                        live += T.min(num_chunks, 1)
                elif tx < 96:
                    for _ in rolled(items):
                        find(
                            walk, steps, r_step,
                            n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                        )  # fmt: skip
                        load_v(
                            variant.tile_v, v, s_v, After(v_ring, first), num_chunks, row0,
                            kept + count, hv, i_tile * variant.tile_v,
                        )  # fmt: skip
                        first += num_chunks
                else:
                    for _ in rolled(items):
                        find(
                            walk, steps, r_step,
                            n, kh, hv, i_tile, slot, row0, kept, count, num_chunks,
                        )  # fmt: skip
                        for i in rolled(num_chunks):
                            gate(
                                PlacedGates(g), PlacedGates(beta), beta, 0, g, s_gate,
                                After(gates, first + i), T.bitwise_xor(row0, i * CHUNK),
                                T.min(kept + count - i * CHUNK, CHUNK), 1, hv, scale, 0, True,
                            )  # fmt: skip
                        first += num_chunks

    return anchored_fwd
