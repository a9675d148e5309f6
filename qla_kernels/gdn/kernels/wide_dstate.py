"""wide_dstate -- dstate_chain for wide_grads: it also writes Y and dV of each chunk; K may be 256.

One CTA per sequence, value head and 64 columns of V. Per chunk (C = 64 tokens; gamma, e and d as in
dstate_chain, as are A and P; dS is kept transposed, [V, K], in fp32 registers for the whole
sequence). Two state warpgroups hold half of K each, dS_w [V, 128] with w = 0, 1; at K = 128 there
is one, and no sum to complete:
    dS_out  = dS, rounded, for every chunk                                          [V, K]
    dV'^T   = d (dS_0 K_0^T + dS_1 K_1^T) + dO^T P                                  [V, C]
    Y^T     = dV'^T A               dV^T = beta Y^T                                 [V, C]
    dS_w    = e^gamma_last dS_w - (beta e Y^T) K_w + (scale e dO^T) Q_w             [V, 128]

Steps (numbers appear again in the roles):
    1 load    q, k, dO, A of a chunk; in a tail, rows past the end become zero
    2 gate    gamma, decays to blocks' ends, beta e, scale e, d, e^gamma_last of a chunk
    3 score   Q K^T, then P, one chunk ahead of the state
    4 state   dS_w K_w^T from dS_w in 16 bits, and half of dO^T P: tokens 32 w to 32 w + 31 of P;
              meanwhile dS_w in 16 bits to the staging tile, and dS_w decayed
    5 state   dV'^T of these tokens, from both summands; then all of dV'^T, rounded
    6 state   Y^T, by both warpgroups; meanwhile scale e dO^T
    7 state   dS_w += (scale e dO^T) Q_w; meanwhile beta e Y^T; then the product with K_w; Y and dV
              of 32 tokens to their staging tiles
    8 store   write dS_out, Y and dV by TMA; of a tail, dV row by row
    9 state   in a sequence's first two chunks: dS_w += (scale e dO^T - its rounding) Q_w

Bounded by latency, then by shared memory, as dstate_chain is. Why this shape: 64 columns of dS at K
= 256 take 128 registers a thread if one warpgroup holds them, and leave too few for products; two
warpgroups with 32 columns each do not fill wgmma's 64 rows. So they share K. Then dS K^T is a sum
of two, which meet in fp32. Each warpgroup completes half of the tokens and hands them on, rounded:
that moves 48 KB where an exchange of whole summands moves 64, and half of the shared memory
suffices. The order of a sum of two does not change its bits. Products with one half of K are half
as long as those of dstate_chain, so both warpgroups use the tensor cores at the same time, without
turns. At K = 128 one warpgroup holds dS, as in dstate_chain. Shared memory has room for two chunks
of q and k, or three. What is read last, k, and q before it, are loaded again as soon as they have
been, so q, k and the other tiles have rings of their own; and `score` makes P without waiting for
the chunk after.

Y is written because chunk products over all of K end here: wide_grads then needs nothing but 128
columns of K at a time. dV is written because Y is in fp32 here. Rows of Y past a tail's end are 0,
because rows of A are. In bf16 all numbers but inputs and outputs are in units of scale; why, and
what (9) is for, is in dstate_chain. With wrong bounds there may be more chunks than dS and Y have
room for: TMA writes nothing outside a tensor.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.cumulated import (
    SOURCE,
    gate,
    longest_first,
    put_state,
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
    SCALE_E,
    TILE,
    D,
    Rows,
    accumulator_layout,
    load_transposed,
)
from qla_kernels.gdn.kernels.chain.reverse import ChunkGradients, load, score
from qla_kernels.gdn.kernels.dstate_chain import EXACT
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.ring import Ring
from qla_kernels.tile.schedule import Role, Schedule


class Variant(NamedTuple):
    dtype: str  # of q, k, dO, dS, Y
    K: int  # q and k have so many numbers or, of 128, fewer: `size`

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
    """Returns the slots of each ring: as many of q, k, dO and A as fit.

    There are at least EXACT of them, as chunks with (9) read slots that they have released.
    """
    if variant.states == 2:
        return {"q": 2, "k": 2, "rows": 2, "gate": 4, "p": 1, "ds0": 1, "ds1": 1, "y": 1}
    return {"q": 3, "k": 3, "rows": 3, "gate": 4, "p": 2, "ds0": 1, "y": 1}


def schedule(variant: Variant) -> Schedule:
    sizes, states = slots(variant), variant.states
    state_regs, score_regs, load_regs = (208, 64, 32) if variant.states == 2 else (240, 120, 40)
    loaded_full = ("q_full", "k_full", "rows_full")
    loaded_free = ("q_free", "k_free", "rows_free")
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=state_regs,
                    waits=(*loaded_full, "gate_full", "p_full", f"ds{w}_free", "y_free"),
                    signals=(*loaded_free, "gate_free", "p_free", f"ds{w}_full", "y_full"),
                    computes=f"dS of K {HALF * w} to {HALF * w + HALF - 1}, dV', Y",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            Role(
                "score",
                warps=4,
                regs=score_regs,
                waits=("q_full", "k_full", "gate_full", "p_free"),
                signals=("q_free", "k_free", "gate_free", "p_full"),
                computes="P",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=load_regs,
                waits=(*loaded_free, "tail_full"),
                signals=(*loaded_full, "tail_full"),
                computes="q, k, dO, A",
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
            Role(
                "store",
                warps=1,
                regs=load_regs,
                waits=(*(f"ds{w}_full" for w in range(states)), "y_full"),
                signals=(*(f"ds{w}_free" for w in range(states)), "y_free"),
                computes="dS, Y and dV out",
                uses=("tma_store",),
            ),
            Role("spare", warps=1, regs=load_regs, computes="fills the warpgroup"),
        ),
        rings=sizes,
        named={"meet": meeting(states)},
        # q, k; dO, A; P; staged dS; staged Y and dV, and summands; gates; barriers and alignment
        smem_bytes=(sizes["q"] + sizes["k"]) * CHUNK * variant.K * 2
        + sizes["rows"] * CHUNK * (TILE + CHUNK) * 2
        + sizes["p"] * CHUNK * CHUNK * 2
        + TILE * variant.K * 2
        + 2 * CHUNK * TILE * 2
        + sizes["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


@T.macro
def state(
    w, states, dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate, s_ds, s_dv, s_y,
    q_ring, k_ring, rows, gate_ring, p_ring, ds_ring, y_ring, meet, num_chunks, n, hv, v0, has_dht,
    has_dh0, unit, ends_of,
):  # fmt: skip
    r_ds = T.alloc_fragment((TILE, HALF), "float32")  # dS_w^T: stays here from last to first chunk
    r_ds16 = T.alloc_fragment((TILE, HALF), dtype)
    r_staged = T.alloc_fragment((TILE, HALF), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # dS_w K_w^T, then dV'^T
    r_d = T.alloc_fragment((TILE, CHUNK), "float32")  # half of dO^T P
    r_y = T.alloc_fragment((TILE, CHUNK), "float32")  # Y^T
    r_y16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dv16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dot = T.alloc_fragment((CHUNK, TILE), dtype)
    r_do16 = T.alloc_fragment((TILE, CHUNK), dtype)  # scale e dO^T
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_du16 = T.alloc_fragment((TILE, CHUNK), dtype)  # -beta e Y^T
    T.annotate_layout({r_dot: accumulator_layout(TILE, CHUNK)})
    k0 = w * HALF
    i0 = w * (CHUNK // states)
    end = T.alloc_var("int32")  # row of dht
    end = -1
    if has_dht == 1:
        end = n
    if has_dht == 2:
        end = ends_of[n]  # the row of this node's end, if it has a gradient
    if end >= 0:
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] = dht[end, hv, k0 + c, v0 + r] / unit
    else:
        T.clear(r_ds)
    T.copy(r_ds, r_ds16)
    for step in T.serial(num_chunks):
        slot = rows.slot(step)  # also of q and k
        gate_slot = gate_ring.slot(step)
        k_ring.wait(step)
        T.wgmma_gemm(  # 4
            r_ds16, s_k[slot, :, k0 : k0 + HALF], r_x, transpose_B=True, clear_accum=True
        )
        rows.wait(step)
        p_ring.wait(step)
        T.wgmma_gemm(
            s_do[slot, i0 : i0 + CHUNK // states, :],
            s_p[p_ring.slot(step), i0 : i0 + CHUNK // states, :],
            r_d,
            transpose_A=True,
            clear_accum=True,
        )
        gate_ring.wait(step)
        for r, c in T.Parallel(TILE, HALF):
            r_staged[r, c] = r_ds[r, c] * unit
        stage(r_staged, s_ds, ds_ring, step, HALF)
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] *= s_gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        p_ring.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s_gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        y_ring.acquire(step)  # Y and dV of the chunk before have been sent
        if states == 2:
            sum_half(r_x, s_dv, s_y, w, meet)  # 5
        T.copy(r_x, r_dn16)
        if states == 2:
            share_half(r_dn16, s_dv, w, meet)
        T.wgmma_gemm(r_dn16, s_a[slot, :, :], r_y, clear_accum=True)  # 6
        load_transposed(s_do, slot, 0, r_dot)
        for r, c in T.Parallel(TILE, CHUNK):
            r_do16[r, c] = s_gate[gate_slot, SCALE_E, c] * r_dot[c, r]
        q_ring.wait(step)
        T.wgmma_gemm(r_do16, s_q[slot, :, k0 : k0 + HALF], r_ds)  # 7
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        rows.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s_gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s_k[slot, :, k0 : k0 + HALF], r_ds)
        for r, c in T.Parallel(TILE, CHUNK):
            r_y16[r, c] = r_y[r, c] * unit
        stage_half_transposed(r_y16, s_y, w)
        if states == 1:
            stage_half_transposed(r_y16, s_y, 1)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dv16[r, c] = r_y[r, c] * unit * s_gate[gate_slot, BETA, c]
        stage_half_transposed(r_dv16, s_dv, w)
        if states == 1:
            stage_half_transposed(r_dv16, s_dv, 1)
        y_ring.commit(step)
        gate_ring.release(step)
        T.wait_wgmma(1)
        q_ring.release(step)
        T.wait_wgmma(0)
        k_ring.release(step)
        if step >= num_chunks - EXACT:  # 9
            load_transposed(s_do, slot, 0, r_dot)
            for r, c in T.Parallel(TILE, CHUNK):
                r_x[r, c] = s_gate[gate_slot, SCALE_E, c] * r_dot[c, r]
            T.copy(r_x, r_dn16)
            for r, c in T.Parallel(TILE, CHUNK):
                r_do16[r, c] = r_x[r, c] - r_dn16[r, c]
            T.wgmma_gemm(r_do16, s_q[slot, :, k0 : k0 + HALF], r_ds)
            T.wait_wgmma(0)
        T.copy(r_ds, r_ds16)
    if has_dh0 != 0:
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] *= unit
        put_state(r_ds, dh0, n, hv, v0, HALF, k0)


def build(variant: Variant):
    plan, sizes, K, states = schedule(variant), slots(variant), variant.K, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_sequences = T.dynamic("V, num_tiles, num_sequences")
    num_slots, num_dht, num_dh0 = T.dynamic("num_slots, num_dht, num_dh0")
    span_step, num_ends, num_firsts = T.dynamic("span_step, num_ends, num_firsts")
    size = K if K == 256 else T.dynamic("size")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    do_token, do_head, do_tile = T.dynamic("do_token, do_head, do_tile")
    dht_n, dht_h, dht_k, dht_v = T.dynamic("dht_n, dht_h, dht_k, dht_v")
    dh0_n, dh0_h, dh0_k, dh0_v = T.dynamic("dh0_n, dh0_h, dh0_k, dh0_v")

    def tile(*shape: int):
        return T.alloc_shared(shape, variant.dtype)

    def barrier(name: str):
        return T.alloc_barrier([plan.arrivals(name)] * plan.slots(name))

    @T.prim_func
    def wide_dstate(
        q: T.StridedTensor((num_tokens, num_heads, size), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        do: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, TILE),
            (do_token, do_head, do_tile, 1),
            variant.dtype,
        ),
        g_cum: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        A: T.Tensor((num_tokens, num_value_heads, CHUNK), variant.dtype),
        spans: T.StridedTensor((num_sequences, 2), (span_step, 1), "int32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        dht: T.StridedTensor(
            (num_dht, num_value_heads, K, V), (dht_n, dht_h, dht_k, dht_v), "float32"
        ),
        dS: T.Tensor((num_slots, num_value_heads, V, size), variant.dtype),
        y: T.Tensor((num_slots, num_value_heads, num_tiles, CHUNK, TILE), variant.dtype),
        dv: T.Tensor((num_tokens, num_value_heads, num_tiles, TILE), variant.dtype),
        dh0: T.StridedTensor(
            (num_dh0, num_value_heads, K, V), (dh0_n, dh0_h, dh0_k, dh0_v), "float32"
        ),
        scale: T.float32,
        has_dht: T.int32,
        has_dh0: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + SOURCE + HALVES)
            s_k, s_q = tile(sizes["k"], CHUNK, K), tile(sizes["q"], CHUNK, K)
            s_do, s_a = tile(sizes["rows"], CHUNK, TILE), tile(sizes["rows"], CHUNK, CHUNK)
            s_p = tile(sizes["p"], CHUNK, CHUNK)
            s_y, s_dv = tile(sizes["y"], CHUNK, TILE), tile(sizes["y"], CHUNK, TILE)
            s_ds0 = tile(sizes["ds0"], TILE, HALF)
            s_ds = [s_ds0]
            if states == 2:
                s_ds1 = tile(sizes["ds1"], TILE, HALF)
                s_ds.append(s_ds1)
            s_gate = T.alloc_shared((sizes["gate"], GATE_ROWS, CHUNK), "float32")
            swizzled = (s_k, s_q, s_do, s_a, s_p, s_y, s_dv, *s_ds)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            q_full, q_free = barrier("q_full"), barrier("q_free")
            k_full, k_free = barrier("k_full"), barrier("k_free")
            rows_full, rows_free = barrier("rows_full"), barrier("rows_free")
            gate_full, gate_free = barrier("gate_full"), barrier("gate_free")
            p_full, p_free = barrier("p_full"), barrier("p_free")
            ds0_full, ds0_free = barrier("ds0_full"), barrier("ds0_free")
            ds_rings = [Ring(ds0_full, ds0_free, sizes["ds0"])]
            if states == 2:
                ds1_full, ds1_free = barrier("ds1_full"), barrier("ds1_free")
                ds_rings.append(Ring(ds1_full, ds1_free, sizes["ds1"]))
            y_full, y_free = barrier("y_full"), barrier("y_free")
            tail_full = barrier("tail_full")
            q_ring = Ring(q_full, q_free, sizes["q"])
            k_ring = Ring(k_full, k_free, sizes["k"])
            rows = Ring(rows_full, rows_free, sizes["rows"])
            gates = Ring(gate_full, gate_free, sizes["gate"])
            p_ring = Ring(p_full, p_free, sizes["p"])
            y_ring = Ring(y_full, y_free, sizes["y"])

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

            unit = T.alloc_var("float32")
            unit = 1
            if variant.dtype == "bfloat16":
                if (scale != 0) & (num_chunks > 0):  # what only passes stays as it is, bit for bit
                    unit = scale

            meet = NamedBarrier(plan, "meet").id() if states == 2 else None
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, states, variant.dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate, s_ds0,
                    s_dv, s_y, q_ring, k_ring, rows, gates, p_ring, ds_rings[0], y_ring, meet,
                    num_chunks, n, hv, v0, has_dht, has_dh0, unit, ends_of,
                )  # fmt: skip
            elif tx < plan.start("score"):  # no thread if the CTA has one state warpgroup
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, states, variant.dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate, s_ds[-1],
                    s_dv, s_y, q_ring, k_ring, rows, gates, p_ring, ds_rings[-1], y_ring, meet,
                    num_chunks, n, hv, v0, has_dht, has_dh0, unit, ends_of,
                )  # fmt: skip
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                score(
                    s_q, s_k, s_gate, s_p, q_ring, k_ring, gates, p_ring, num_chunks, scale / unit,
                    plan.start("score"),
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        [  # in the order in which slots are released
                            (rows, [Rows(do, (hv, i_tile), s_do), Rows(A, (hv,), s_a)]),
                            (q_ring, [Rows(q, (kh,), s_q)]),
                            (k_ring, [Rows(k, (kh,), s_k)]),
                        ],
                        tail_full, begin, length, num_chunks,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(
                        g_cum, beta, s_gate, gates, begin, length, num_chunks, hv, True,
                        scale / unit,
                    )  # fmt: skip
                elif tx < plan.end("store"):
                    store(
                        ChunkGradients(
                            dS, y, dv, s_dv, first_chunk[n], begin, length, num_chunks, hv, i_tile,
                            states,
                        ),
                        [*s_ds, s_y], [*ds_rings, y_ring], num_chunks,
                    )  # fmt: skip

    return wide_dstate
