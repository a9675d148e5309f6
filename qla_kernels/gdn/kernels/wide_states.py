"""wide_states -- chunk_states for wide_grads: it also writes V' of each chunk, and K may be 256.

One CTA per sequence, value head and 64 columns of V. Per chunk, with S kept transposed, [V, K], in
fp32 registers from the first chunk to the last, and e and d as in fused_fwd. Two state warpgroups
hold half of K each, S_w [V, 128] with w = 0, 1; at K = 128 there is one, and no sum to complete:
    h     = S, rounded, for every chunk                                             [V, K]
    W^T   = beta V^T - (beta e) (S_0 K_0^T + S_1 K_1^T)                             [V, C]
    V'^T  = W^T A^T                                                                 [V, C]
    S_w   = e^gamma_last S_w + (d V'^T) K_w                                         [V, 128]

Steps (numbers appear again in the roles):
    1 load    k, v, A of a chunk; in a tail, rows past the end become zero
    2 gate    beta, beta e, d, e^gamma_last of a chunk
    3 state   S_w K_w^T from S_w in 16 bits; W^T of 32 tokens from both summands, then all of W^T
    4 state   V'^T, by both warpgroups; meanwhile S_w decayed
    5 state   S_w; meanwhile S_w in 16 bits, as it was, and V' of 32 tokens to the staging tiles
    6 store   write h and V' by TMA

Bounded by the latency of the chain 3, 4, 5, and by writing h, more than half of all bytes. Why this
shape: as wide_dstate, which says why warpgroups share K. V' is written because wide_grads needs it,
and would need all of K, and the state of each tile of V again, to compute it. Its rows past a
tail's end are 0, because rows of A are. With wrong bounds there may be more chunks than h and V'
have room for: TMA writes nothing outside a tensor.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain import cumulated as chain
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.halves import (
    HALF,
    meeting,
    share_half,
    stage_half_transposed,
    sum_half,
)
from qla_kernels.gdn.kernels.chain.halves import SOURCE as HALVES
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
    load_transposed,
)
from qla_kernels.gdn.kernels.chain.roles import gate_role, load_role, store_role
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of k, v, h, V'
    K: int  # k has so many numbers or, of 128, fewer: `size`

    @property
    def states(self) -> int:
        return self.K // HALF


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (256, 128))

PASS_CONFIGS = CHAIN_PASSES


def schedule(variant: Variant) -> Schedule:
    states, dtype = variant.states, variant.dtype
    outputs = [f"h{w}" for w in range(states)]
    slots = {"rows": 3, "gate": 4} if states == 2 else {"rows": 5, "gate": 4}  # as many as fit
    slots |= dict.fromkeys((*outputs, "vn"), 1 if states == 2 else 2)
    smem = {
        "k": Tile((slots["rows"], CHUNK, variant.K), dtype, swizzled=True),
        "v": Tile((slots["rows"], CHUNK, TILE), dtype, swizzled=True),
        "a": Tile((slots["rows"], CHUNK, CHUNK), dtype, swizzled=True),
        "vn": Tile((slots["vn"], CHUNK, TILE), dtype, swizzled=True),
    }
    if states == 2:
        smem["low"] = Tile((1, CHUNK, TILE), dtype)
    smem |= dict.fromkeys(outputs, Tile((slots["h0"], TILE, HALF), dtype, swizzled=True))
    smem["gate"] = Tile((slots["gate"], GATE_ROWS, CHUNK), "float32")
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=232,
                    waits=(*full("rows", "gate"), f"h{w}_free", "vn_free"),
                    signals=(*free("rows", "gate"), f"h{w}_full", "vn_full"),
                    computes=f"S of K {HALF * w} to {HALF * w + HALF - 1}, W, V'",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            load_role(40, "k, v, A", "rows"),
            gate_role(40),
            store_role(40, "h and V' out", *outputs, "vn"),
            Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings=slots,
        named={"meet": meeting(states)},
        tiles=smem,
    )


class ChunkStates(NamedTuple):
    """The tensors to which role `store` writes the state and V' of a head's chunks."""

    h: Any  # [slots, HV, V, K]
    vn: Any  # [slots, HV, V / 64, 64, 64]
    first: Any  # slot of the sequence's first chunk
    item: Any
    states: int  # state warpgroups, of HALF columns of K each; the tensor h may have fewer

    def put(self, tile, step, w):
        chunk, hv, i_tile = self.first + step, self.item.hv, self.item.i_tile
        v0 = i_tile * TILE
        if w == self.states:
            return T.tma_copy(tile, self.vn[chunk, hv, i_tile, :, :])
        k0, k1 = w * HALF, w * HALF + HALF
        return T.tma_copy(tile, self.h[chunk, hv, v0 : v0 + TILE, k0:k1])


@T.macro
def state(w, variant, s, ring, meet, enters, item):
    """Walks a sequence's chunks; `enters` are the rows of its first state."""
    states, dtype = variant.states, variant.dtype
    num_chunks, n, hv, v0 = item.num_chunks, item.n, item.hv, item.v0
    r_s = T.alloc_fragment((TILE, HALF), "float32")  # S_w^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, HALF), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S_w K_w^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    k0 = w * HALF
    start = T.alloc_var("int32")
    find_row(enters, n, start)
    if start >= 0:
        for r, c in T.Parallel(TILE, HALF):
            r_s[r, c] = enters.tensor[start, hv, k0 + c, v0 + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    for i in T.serial(num_chunks):
        slot = ring.rows.slot(i)
        gate_slot = ring.gate.slot(i)
        ring.rows.wait(i)
        T.wgmma_gemm(  # 3
            r_s16, s.k[slot, :, k0 : k0 + HALF], r_x, transpose_B=True, clear_accum=True
        )
        ring.gate.wait(i)
        load_transposed(s.v, slot, 0, r_vt)
        ring.vn.acquire(i)  # V' of the chunk before has been sent
        T.wait_wgmma(0)
        if states == 2:
            sum_half(r_x, s.low, s.vn, w, meet)
        for r, c in T.Parallel(TILE, CHUNK):  # of other tokens r_x may be a summand, not used
            r_x[r, c] = (
                s.gate[gate_slot, BETA, c] * r_vt[c, r] - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        T.copy(r_x, r_w16)
        if states == 2:
            share_half(r_w16, s.low, w, meet)
        T.wgmma_gemm(r_w16, s.a[slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 4
        for r, c in T.Parallel(TILE, HALF):
            r_s[r, c] *= s.gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s.gate[gate_slot, D, c]
        ring.gate.release(i)
        T.wgmma_gemm(r_dn16, s.k[slot, :, k0 : k0 + HALF], r_s)  # 5
        chain.stage(r_s16, s[f"h{w}"], ring[f"h{w}"], i, HALF)
        T.copy(r_n, r_n16)
        stage_half_transposed(r_n16, s.vn, w, ring.vn.slot(i))
        if states == 1:
            stage_half_transposed(r_n16, s.vn, 1, ring.vn.slot(i))
        ring.vn.commit(i)
        T.wait_wgmma(0)
        ring.rows.release(i)
        T.copy(r_s, r_s16)


def build(variant: Variant):
    plan, K, dtype, states = schedule(variant), variant.K, variant.dtype, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_sequences, num_slots = T.dynamic("V, num_tiles, num_sequences, num_slots")
    num_h0, num_starts, num_firsts = T.dynamic("num_h0, num_starts, num_firsts")
    size = K if K == 256 else T.dynamic("size")
    value_rows = num_tokens, num_value_heads

    @T.prim_func
    def wide_states(
        k: strided("k", "token head", (num_tokens, num_heads, size), dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, TILE), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        h: T.Tensor((num_slots, num_value_heads, V, size), dtype),
        vn: T.Tensor((num_slots, num_value_heads, num_tiles, CHUNK, TILE), dtype),
        has_h0: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + chain.SOURCE + HALVES)
            s, ring = tiles(plan), rings(plan)
            item = Variables(chain.SEQUENCE)
            chain.find_sequence(block, spans, g_cum, num_heads, num_tiles, TILE, item)
            meet = NamedBarrier(plan, "meet").id() if states == 2 else None
            enters = StateRows(h0, has_h0, starts_of)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(0, variant, s, ring, meet, enters, item)
            elif states == 2 and tx < plan.end("state1"):
                T.set_max_nreg(plan.role("state1").regs, 1)
                state(1, variant, s, ring, meet, enters, item)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    inputs = [
                        Rows(k, (item.kh,), s.k),
                        Rows(v, (item.hv, item.i_tile), s.v),
                        Rows(A, (item.hv,), s.a),
                    ]
                    chain.load(inputs, ring.rows, ring.tail, item, False)
                elif tx < plan.end("gate"):
                    chain.gate(g_cum, beta, s.gate, ring.gate, item, False, None)
                elif tx < plan.end("store"):
                    out = ChunkStates(h, vn, first_chunk[item.n], item, states)
                    outputs = [*(f"h{w}" for w in range(states)), "vn"]
                    chain.store(out, s, ring, outputs, item.num_chunks)

    return wide_states
