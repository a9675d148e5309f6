"""chunk_states -- the state that enters each chunk, recomputed: fused_fwd's chain without output.

One CTA per sequence, value head and V tile. Per chunk, with S kept transposed, [V, K], in fp32
registers from the first chunk to the last, and e and d as in fused_fwd:
    h     = S, rounded, for every chunk whose number in the sequence is a multiple of `every`
    W^T   = beta V^T - (beta e) S K^T                                               [V, C]
    V'^T  = W^T A^T                                                                 [V, C]
    S     = e^gamma_last S + (d V'^T) K                                             [V, K]

Steps (numbers appear again in the roles):
    1 load    k, v, A of a chunk; in a tail, rows past the end become zero
    2 gate    beta, beta e, d, e^gamma_last of a chunk
    3 state   S K^T from S in 16 bits; W^T
    4 state   V'^T; meanwhile S decayed
    5 state   S; meanwhile S in 16 bits, as it was, to the staging tile
    6 store   write h by TMA

Bounded by the latency of the chain 3, 4, 5, and by writing h, half of all bytes.
Why this shape: as fused_fwd. Writing h must not delay the chain: a staging tile has two slots, and
is filled while the last product of the chunk runs. With wrong bounds there may be more states than
h has room for: TMA writes nothing outside a tensor.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.cumulated import (
    SOURCE,
    States,
    gate,
    load,
    longest_first,
    put_state,
    stage,
    store,
)
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    GATE_ROWS,
    LAST,
    TILE,
    D,
    Rows,
    accumulator_layout,
    first_turn,
    give_turn,
    last_turn,
    load_transposed,
    named_barriers,
    take_turn,
    turns,
)
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of k, v, h
    K: int  # q and k have so many numbers or fewer: `size`
    tile_v: int  # columns of V a CTA computes: 64 or 128


VARIANTS = tuple(
    Variant(dtype, K, tile_v)
    for dtype in ("bfloat16", "float16")
    for K in (128, 64)
    for tile_v in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
    "tl.disable_buffer_init_check": True,  # staging tiles: see `stage`
}


def slots(variant: Variant) -> dict[str, int]:
    """Returns the slots of each ring: as many as fit, because loads are slow if both chains run."""
    kva, gate = (3, 4) if variant.tile_v == 128 else (5, 6)
    return {"kva": kva, "gate": gate, "h": 2}


def schedule(variant: Variant) -> Schedule:
    states = variant.tile_v // TILE
    sizes = slots(variant)
    rings = {"kva": sizes["kva"], "gate": sizes["gate"]}
    rings |= {f"h{w}": sizes["h"] for w in range(states)}
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=232,
                    waits=("kva_full", "gate_full", f"h{w}_free"),
                    signals=("kva_free", "gate_free", f"h{w}_full"),
                    computes=f"S, W, V' of columns {TILE * w} to {TILE * w + TILE - 1}",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("kva_free", "tail_full"),
                signals=("kva_full", "tail_full"),
                computes="k, v, A",
                uses=("tma_load",),
            ),
            Role(
                "gate",
                warps=1,
                regs=40,
                waits=("gate_free",),
                signals=("gate_full",),
                computes="exponentials of gamma, beta",
            ),
            Role(
                "store",
                warps=1,
                regs=40,
                waits=tuple(f"h{w}_full" for w in range(states)),
                signals=tuple(f"h{w}_free" for w in range(states)),
                computes="h out",
                uses=("tma_store",),
            ),
            Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings=rings,
        named=named_barriers(states),
        # k, v, A; staged states; gates; barriers and alignment
        smem_bytes=sizes["kva"] * CHUNK * (variant.K + variant.tile_v + CHUNK) * 2
        + sizes["h"] * variant.tile_v * variant.K * 2
        + sizes["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


@T.macro
def state(
    w, K, dtype, h0, ht, s_k, s_v, s_a, s_gate, s_h, kva, gate_ring, h_ring, turn,
    num_chunks, every, n, hv, v0, has_h0, has_ht, starts_of,
):  # fmt: skip
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    stored = T.alloc_var("int32")
    start = T.alloc_var("int32")  # row of h0
    start = -1
    if has_h0 == 1:
        start = n
    if has_h0 == 2:
        start = starts_of[n]  # the row in which this node's parent ends, if any
    if start >= 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = h0[start, hv, c, v0 + w * TILE + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    stored = 0
    first_turn(turn, w)
    for i in T.serial(num_chunks):
        slot = kva.slot(i)
        gate_slot = gate_ring.slot(i)
        kva.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_s16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 3
        give_turn(turn, w)
        gate_ring.wait(i)
        load_transposed(s_v, slot, w, r_vt)
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        T.copy(r_x, r_w16)
        take_turn(turn, w)
        T.wgmma_gemm(r_w16, s_a[slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 4
        give_turn(turn, w)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
        gate_ring.release(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 5
        give_turn(turn, w)
        if i == stored * every:
            stage(r_s16, s_h, h_ring, stored, K)
            stored += 1
        T.wait_wgmma(0)
        kva.release(i)
        T.copy(r_s, r_s16)
    last_turn(turn, w)
    if has_ht != 0:
        put_state(r_s, ht, n, hv, v0 + w * TILE, K)


def build(variant: Variant):
    plan, sizes = schedule(variant), slots(variant)
    K, states = variant.K, variant.tile_v // TILE
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_sequences, num_slots, size = T.dynamic("V, num_sequences, num_slots, size")
    num_tiles = T.dynamic("num_tiles") if variant.tile_v == 64 else 1  # V is 128: _tile_v
    num_h0, num_ht = T.dynamic("num_h0, num_ht")
    span_step, num_starts, num_firsts = T.dynamic("span_step, num_starts, num_firsts")
    k_token, k_head = T.dynamic("k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")
    ht_n, ht_h, ht_k, ht_v = T.dynamic("ht_n, ht_h, ht_k, ht_v")

    @T.prim_func
    def chunk_states(
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, variant.tile_v),
            (v_token, v_head, v_tile, 1),
            variant.dtype,
        ),
        g_cum: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), variant.dtype),
        spans: T.StridedTensor((num_sequences, 2), (span_step, 1), "int32"),
        first_slot: T.Tensor((num_firsts,), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        h: T.Tensor((num_slots, num_value_heads, V, size), variant.dtype),
        ht: T.StridedTensor((num_ht, num_value_heads, K, V), (ht_n, ht_h, ht_k, ht_v), "float32"),
        every: T.int32,
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(SOURCE)
            s_k = T.alloc_shared((sizes["kva"], CHUNK, K), variant.dtype)
            s_v = T.alloc_shared((sizes["kva"], CHUNK, variant.tile_v), variant.dtype)
            s_a = T.alloc_shared((sizes["kva"], CHUNK, CHUNK), variant.dtype)
            s_gate = T.alloc_shared((sizes["gate"], GATE_ROWS, CHUNK), "float32")
            kva_full = T.alloc_barrier([plan.arrivals("kva_full")] * sizes["kva"])
            kva_free = T.alloc_barrier([plan.arrivals("kva_free")] * sizes["kva"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * sizes["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * sizes["gate"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            s_h0 = T.alloc_shared((sizes["h"], TILE, K), variant.dtype)
            h0_full = T.alloc_barrier([plan.arrivals("h0_full")] * sizes["h"])
            h0_free = T.alloc_barrier([plan.arrivals("h0_free")] * sizes["h"])
            s_h = [s_h0]
            h_rings = [Ring(h0_full, h0_free, sizes["h"])]
            if states == 2:
                s_h1 = T.alloc_shared((sizes["h"], TILE, K), variant.dtype)
                h1_full = T.alloc_barrier([plan.arrivals("h1_full")] * sizes["h"])
                h1_free = T.alloc_barrier([plan.arrivals("h1_free")] * sizes["h"])
                s_h.append(s_h1)
                h_rings.append(Ring(h1_full, h1_free, sizes["h"]))
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in (s_v, *s_h)})
            kva = Ring(kva_full, kva_free, sizes["kva"])
            gates = Ring(gate_full, gate_free, sizes["gate"])

            hv, n, kh = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            i_tile, v0 = T.alloc_var("int32"), T.alloc_var("int32")
            i_tile = block % num_tiles
            v0 = i_tile * variant.tile_v
            hv = block // num_tiles % num_value_heads
            place = T.alloc_local((1,), "int32")
            longest_first(spans, num_sequences, block // num_tiles // num_value_heads, place)
            n = T.shfl_sync(place[0], 0)  # so that the compiler sees it is uniform
            kh = hv // (num_value_heads // num_heads)
            read_span(spans, n, num_tokens, begin, length)
            num_chunks = T.ceildiv(length, CHUNK)

            turn = turns(plan)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, K, variant.dtype, h0, ht, s_k, s_v, s_a, s_gate, s_h[0], kva, gates,
                    h_rings[0], turn, num_chunks, every, n, hv, v0, has_h0, has_ht, starts_of,
                )  # fmt: skip
            elif tx < plan.start("load"):  # no thread if the CTA has one state warpgroup
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, K, variant.dtype, h0, ht, s_k, s_v, s_a, s_gate, s_h[-1], kva, gates,
                    h_rings[-1], turn, num_chunks, every, n, hv, v0, has_h0, has_ht, starts_of,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        [Rows(k, (kh,), s_k), Rows(v, (hv, i_tile), s_v), Rows(A, (hv,), s_a)],
                        kva, tail_full, begin, length, num_chunks, False,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(g_cum, beta, s_gate, gates, begin, length, num_chunks, hv, False, None)
                elif tx < plan.end("store"):
                    out = States(h, first_slot[n], hv, v0, K)
                    store(out, s_h, h_rings, T.ceildiv(num_chunks, every))

    return chunk_states
