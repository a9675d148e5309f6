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
from qla_kernels.gdn.kernels.chain import cumulated as chain
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    CHAIN_PASSES,
    GATE_ROWS,
    LAST,
    TILE,
    D,
    Rows,
    StateRows,
    accumulator_layout,
    find_row,
    first_turn,
    give_turn,
    last_turn,
    load_transposed,
    named_barriers,
    take_turn,
    turns,
)
from qla_kernels.gdn.kernels.chain.roles import gate_role, load_role, store_role
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of k, v, h
    K: int  # q and k have so many numbers or fewer: `size`
    tile_v: int  # columns of V a CTA computes: 64 or 128

    @property
    def states(self) -> int:
        return self.tile_v // TILE


VARIANTS = tuple(
    Variant(dtype, K, tile_v)
    for dtype in ("bfloat16", "float16")
    for K in (128, 64)
    for tile_v in (128, 64)
)

PASS_CONFIGS = CHAIN_PASSES


def schedule(variant: Variant) -> Schedule:
    states, K, dtype = variant.states, variant.K, variant.dtype
    # As many slots as fit, because loads are slow if both chains run.
    slots = {"kva": 3, "gate": 4} if states == 2 else {"kva": 5, "gate": 6}
    outputs = [f"h{w}" for w in range(states)]
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
            load_role(40, "k, v, A", "kva"),
            gate_role(40),
            store_role(40, "h out", *outputs),
            Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings={**slots, "tail": 1, **dict.fromkeys(outputs, 2)},
        named=named_barriers(states),
        tiles={
            "k": Tile((slots["kva"], CHUNK, K), dtype),
            "v": Tile((slots["kva"], CHUNK, variant.tile_v), dtype, swizzled=True),
            "a": Tile((slots["kva"], CHUNK, CHUNK), dtype),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
            **dict.fromkeys(outputs, Tile((2, TILE, K), dtype, swizzled=True)),
        },
    )


@T.macro
def state(w, variant, s, ring, turn, enters, leaves, item, every):
    """Walks a sequence's chunks; `enters` and `leaves` are the rows of its first and last state."""
    K, dtype, kva = variant.K, variant.dtype, ring.kva
    num_chunks, n, hv, v0 = item.num_chunks, item.n, item.hv, item.v0
    r_s = T.alloc_fragment((TILE, K), "float32")  # S^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    stored = T.alloc_var("int32")
    start = T.alloc_var("int32")
    find_row(enters, n, start)
    if start >= 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = enters.tensor[start, hv, c, v0 + w * TILE + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    stored = 0
    first_turn(turn, w)
    for i in T.serial(num_chunks):
        slot = kva.slot(i)
        gate_slot = ring.gate.slot(i)
        kva.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_s16, s.k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 3
        give_turn(turn, w)
        ring.gate.wait(i)
        load_transposed(s.v, slot, w, r_vt)
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = (
                s.gate[gate_slot, BETA, c] * r_vt[c, r] - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        T.copy(r_x, r_w16)
        take_turn(turn, w)
        T.wgmma_gemm(r_w16, s.a[slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 4
        give_turn(turn, w)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s.gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s.gate[gate_slot, D, c]
        ring.gate.release(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_dn16, s.k[slot, :, :], r_s)  # 5
        give_turn(turn, w)
        if i == stored * every:
            chain.stage(r_s16, s[f"h{w}"], ring[f"h{w}"], stored, K)
            stored += 1
        T.wait_wgmma(0)
        kva.release(i)
        T.copy(r_s, r_s16)
    last_turn(turn, w)
    if leaves.has != 0:
        chain.put_state(r_s, leaves.tensor, n, hv, v0 + w * TILE, K)


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype, states = variant.K, variant.dtype, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_sequences, num_slots, size = T.dynamic("V, num_sequences, num_slots, size")
    num_tiles = T.dynamic("num_tiles") if variant.tile_v == 64 else 1  # V is 128: _tile_v
    num_h0, num_ht, num_starts, num_firsts = T.dynamic("num_h0, num_ht, num_starts, num_firsts")
    value_rows = num_tokens, num_value_heads

    @T.prim_func
    def chunk_states(
        k: strided("k", "token head", (num_tokens, num_heads, size), dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, variant.tile_v), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        first_slot: T.Tensor((num_firsts,), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        h: T.Tensor((num_slots, num_value_heads, V, size), dtype),
        ht: strided("ht", "n h k v", (num_ht, num_value_heads, K, V), "float32"),
        every: T.int32,
        has_h0: T.int32,
        has_ht: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(chain.SOURCE)
            s, ring = tiles(plan), rings(plan)
            item = Variables(chain.SEQUENCE)
            chain.find_sequence(block, spans, g_cum, num_heads, num_tiles, variant.tile_v, item)
            turn = turns(plan)
            enters, leaves = StateRows(h0, has_h0, starts_of), StateRows(ht, has_ht, None)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(0, variant, s, ring, turn, enters, leaves, item, every)
            elif states == 2 and tx < plan.end("state1"):
                T.set_max_nreg(plan.role("state1").regs, 1)
                state(1, variant, s, ring, turn, enters, leaves, item, every)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    kva = [
                        Rows(k, (item.kh,), s.k),
                        Rows(v, (item.hv, item.i_tile), s.v),
                        Rows(A, (item.hv,), s.a),
                    ]
                    chain.load(kva, ring.kva, ring.tail, item, False)
                elif tx < plan.end("gate"):
                    chain.gate(g_cum, beta, s.gate, ring.gate, item, False, None)
                elif tx < plan.end("store"):
                    outputs = [f"h{w}" for w in range(states)]
                    out = chain.States(h, first_slot[item.n], item.hv, item.v0, K)
                    num_states = T.ceildiv(item.num_chunks, every)
                    chain.store(out, s, ring, outputs, num_states)

    return chunk_states
