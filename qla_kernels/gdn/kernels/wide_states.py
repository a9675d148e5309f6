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
from qla_kernels.gdn.kernels.chain.cumulated import (
    SOURCE,
    gate,
    load,
    longest_first,
    stage,
    store,
)
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
    GATE_ROWS,
    LAST,
    TILE,
    D,
    Rows,
    accumulator_layout,
    load_transposed,
)
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of k, v, h, V'
    K: int  # k has so many numbers or, of 128, fewer: `size`

    @property
    def states(self) -> int:
        return self.K // HALF


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (256, 128))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the sequence's length
    "tl.disable_buffer_init_check": True,  # staging tiles: see `stage`; fragments: see halves.py
}


def slots(variant: Variant) -> dict[str, int]:
    """Returns the slots of each ring: as many of k, v and A as fit."""
    if variant.states == 2:
        return {"rows": 3, "gate": 4, "h0": 1, "h1": 1, "vn": 1}
    return {"rows": 5, "gate": 4, "h0": 2, "vn": 2}


def schedule(variant: Variant) -> Schedule:
    sizes, states = slots(variant), variant.states
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=232,
                    waits=("rows_full", "gate_full", f"h{w}_free", "vn_free"),
                    signals=("rows_free", "gate_free", f"h{w}_full", "vn_full"),
                    computes=f"S of K {HALF * w} to {HALF * w + HALF - 1}, W, V'",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            Role(
                "load",
                warps=1,
                regs=40,
                waits=("rows_free", "tail_full"),
                signals=("rows_full", "tail_full"),
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
                waits=(*(f"h{w}_full" for w in range(states)), "vn_full"),
                signals=(*(f"h{w}_free" for w in range(states)), "vn_free"),
                computes="h and V' out",
                uses=("tma_store",),
            ),
            Role("spare", warps=1, regs=40, computes="fills the warpgroup"),
        ),
        rings=sizes,
        named={"meet": meeting(states)},
        # k, v, A; staged states; staged V', and summands; gates; barriers and alignment
        smem_bytes=sizes["rows"] * CHUNK * (variant.K + TILE + CHUNK) * 2
        + sizes["h0"] * TILE * variant.K * 2
        + 2 * CHUNK * TILE * 2
        + sizes["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


class ChunkStates(NamedTuple):
    """The tensors to which role `store` writes the state and V' of a head's chunks."""

    h: Any  # [slots, HV, V, K]
    vn: Any  # [slots, HV, V / 64, 64, 64]
    first: Any  # slot of the sequence's first chunk
    hv: Any
    i_tile: Any
    states: int  # state warpgroups, of HALF columns of K each; the tensor h may have fewer

    def put(self, tile, step, w):
        chunk, v0 = self.first + step, self.i_tile * TILE
        if w == self.states:
            return T.tma_copy(tile, self.vn[chunk, self.hv, self.i_tile, :, :])
        k0, k1 = w * HALF, w * HALF + HALF
        return T.tma_copy(tile, self.h[chunk, self.hv, v0 : v0 + TILE, k0:k1])


@T.macro
def state(
    w, states, dtype, h0, s_k, s_v, s_a, s_gate, s_h, s_low, s_vn, rows, gate_ring, h_ring, vn_ring,
    meet, num_chunks, n, hv, v0, has_h0, starts_of,
):  # fmt: skip
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
    start = T.alloc_var("int32")  # row of h0
    start = -1
    if has_h0 == 1:
        start = n
    if has_h0 == 2:
        start = starts_of[n]  # the row in which this node's parent ends, if any
    if start >= 0:
        for r, c in T.Parallel(TILE, HALF):
            r_s[r, c] = h0[start, hv, k0 + c, v0 + r]
    else:
        T.clear(r_s)
    T.copy(r_s, r_s16)
    for i in T.serial(num_chunks):
        slot = rows.slot(i)
        gate_slot = gate_ring.slot(i)
        rows.wait(i)
        T.wgmma_gemm(  # 3
            r_s16, s_k[slot, :, k0 : k0 + HALF], r_x, transpose_B=True, clear_accum=True
        )
        gate_ring.wait(i)
        load_transposed(s_v, slot, 0, r_vt)
        vn_ring.acquire(i)  # V' of the chunk before has been sent
        T.wait_wgmma(0)
        if states == 2:
            sum_half(r_x, s_low, s_vn, w, meet)
        for r, c in T.Parallel(TILE, CHUNK):  # of other tokens r_x may be a summand, not used
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        T.copy(r_x, r_w16)
        if states == 2:
            share_half(r_w16, s_low, w, meet)
        T.wgmma_gemm(r_w16, s_a[slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 4
        for r, c in T.Parallel(TILE, HALF):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
        gate_ring.release(i)
        T.wgmma_gemm(r_dn16, s_k[slot, :, k0 : k0 + HALF], r_s)  # 5
        stage(r_s16, s_h, h_ring, i, HALF)
        T.copy(r_n, r_n16)
        stage_half_transposed(r_n16, s_vn, w, vn_ring.slot(i))
        if states == 1:
            stage_half_transposed(r_n16, s_vn, 1, vn_ring.slot(i))
        vn_ring.commit(i)
        T.wait_wgmma(0)
        rows.release(i)
        T.copy(r_s, r_s16)


def build(variant: Variant):
    plan, sizes, K, states = schedule(variant), slots(variant), variant.K, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_sequences = T.dynamic("V, num_tiles, num_sequences")
    num_slots, num_h0, span_step = T.dynamic("num_slots, num_h0, span_step")
    num_starts, num_firsts = T.dynamic("num_starts, num_firsts")
    size = K if K == 256 else T.dynamic("size")
    k_token, k_head = T.dynamic("k_token, k_head")
    v_token, v_head, v_tile = T.dynamic("v_token, v_head, v_tile")
    h0_n, h0_h, h0_k, h0_v = T.dynamic("h0_n, h0_h, h0_k, h0_v")

    def tile(*shape: int):
        return T.alloc_shared(shape, variant.dtype)

    def barrier(name: str):
        return T.alloc_barrier([plan.arrivals(name)] * plan.slots(name))

    @T.prim_func
    def wide_states(
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        v: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, TILE),
            (v_token, v_head, v_tile, 1),
            variant.dtype,
        ),
        g_cum: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), variant.dtype),
        spans: T.StridedTensor((num_sequences, 2), (span_step, 1), "int32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        starts_of: T.Tensor((num_starts,), "int32"),
        h0: T.StridedTensor((num_h0, num_value_heads, K, V), (h0_n, h0_h, h0_k, h0_v), "float32"),
        h: T.Tensor((num_slots, num_value_heads, V, size), variant.dtype),
        vn: T.Tensor((num_slots, num_value_heads, num_tiles, CHUNK, TILE), variant.dtype),
        has_h0: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + SOURCE + HALVES)
            s_k, s_v = tile(sizes["rows"], CHUNK, K), tile(sizes["rows"], CHUNK, TILE)
            s_a = tile(sizes["rows"], CHUNK, CHUNK)
            s_vn = tile(sizes["vn"], CHUNK, TILE)
            s_low = tile(1, CHUNK, TILE) if states == 2 else None
            s_h0 = tile(sizes["h0"], TILE, HALF)
            s_h = [s_h0]
            if states == 2:
                s_h1 = tile(sizes["h1"], TILE, HALF)
                s_h.append(s_h1)
            s_gate = T.alloc_shared((sizes["gate"], GATE_ROWS, CHUNK), "float32")
            swizzled = (s_k, s_v, s_a, s_vn, *s_h)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            rows_full, rows_free = barrier("rows_full"), barrier("rows_free")
            gate_full, gate_free = barrier("gate_full"), barrier("gate_free")
            h0_full, h0_free = barrier("h0_full"), barrier("h0_free")
            h_rings = [Ring(h0_full, h0_free, sizes["h0"])]
            if states == 2:
                h1_full, h1_free = barrier("h1_full"), barrier("h1_free")
                h_rings.append(Ring(h1_full, h1_free, sizes["h1"]))
            vn_full, vn_free = barrier("vn_full"), barrier("vn_free")
            tail_full = barrier("tail_full")
            rows = Ring(rows_full, rows_free, sizes["rows"])
            gates = Ring(gate_full, gate_free, sizes["gate"])
            vn_ring = Ring(vn_full, vn_free, sizes["vn"])

            hv, n, kh = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            i_tile, v0 = T.alloc_var("int32"), T.alloc_var("int32")
            i_tile = block % num_tiles
            v0 = i_tile * TILE
            hv = block // num_tiles % num_value_heads
            place = T.alloc_local((1,), "int32")
            longest_first(spans, num_sequences, block // num_tiles // num_value_heads, place)
            n = T.shfl_sync(place[0], 0)  # so that the compiler sees it is uniform
            kh = hv // (num_value_heads // num_heads)
            read_span(spans, n, num_tokens, begin, length)
            num_chunks = T.ceildiv(length, CHUNK)

            meet = NamedBarrier(plan, "meet").id() if states == 2 else None
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, states, variant.dtype, h0, s_k, s_v, s_a, s_gate, s_h0, s_low, s_vn, rows,
                    gates, h_rings[0], vn_ring, meet, num_chunks, n, hv, v0, has_h0, starts_of,
                )  # fmt: skip
            elif tx < plan.start("load"):  # no thread if the CTA has one state warpgroup
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, states, variant.dtype, h0, s_k, s_v, s_a, s_gate, s_h[-1], s_low, s_vn, rows,
                    gates, h_rings[-1], vn_ring, meet, num_chunks, n, hv, v0, has_h0, starts_of,
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        [Rows(k, (kh,), s_k), Rows(v, (hv, i_tile), s_v), Rows(A, (hv,), s_a)],
                        rows, tail_full, begin, length, num_chunks, False,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(g_cum, beta, s_gate, gates, begin, length, num_chunks, hv, False, None)
                elif tx < plan.end("store"):
                    store(
                        ChunkStates(h, vn, first_chunk[n], hv, i_tile, states), [*s_h, s_vn],
                        [*h_rings, vn_ring], num_chunks,
                    )  # fmt: skip

    return wide_states
