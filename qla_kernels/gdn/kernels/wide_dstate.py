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
    SCALE_E,
    TILE,
    D,
    Rows,
    StateRows,
    accumulator_layout,
    find_row,
    load_transposed,
)
from qla_kernels.gdn.kernels.chain.reverse import ChunkGradients, load, score
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role, score_role, store_role
from qla_kernels.gdn.kernels.dstate_chain import EXACT
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, dO, dS, Y
    K: int  # q and k have so many numbers or, of 128, fewer: `size`

    @property
    def states(self) -> int:
        return self.K // HALF


VARIANTS = tuple(Variant(dtype, K) for dtype in ("bfloat16", "float16") for K in (256, 128))

PASS_CONFIGS = CHAIN_PASSES


def slots(variant: Variant) -> dict[str, int]:
    """Returns the slots of each ring: as many of q, k, dO and A as fit.

    There are at least EXACT of them, as chunks with (9) read slots that they have released.
    """
    if variant.states == 2:
        return {"q": 2, "k": 2, "rows": 2, "gate": 4, "p": 1, "ds0": 1, "ds1": 1, "y": 1}
    return {"q": 3, "k": 3, "rows": 3, "gate": 4, "p": 2, "ds0": 1, "y": 1}


def schedule(variant: Variant) -> Schedule:
    sizes, states, K, dtype = slots(variant), variant.states, variant.K, variant.dtype
    state_regs, score_regs, load_regs = (208, 64, 32) if variant.states == 2 else (240, 120, 40)
    outputs = [f"ds{w}" for w in range(states)]
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=state_regs,
                    waits=(*full("q", "k", "rows", "gate", "p"), f"ds{w}_free", "y_free"),
                    signals=(*free("q", "k", "rows", "gate", "p"), f"ds{w}_full", "y_full"),
                    computes=f"dS of K {HALF * w} to {HALF * w + HALF - 1}, dV', Y",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            score_role(score_regs, "q", "k"),
            load_role(load_regs, "q, k, dO, A", "q", "k", "rows"),
            gate_role(load_regs, GATES),
            store_role(load_regs, "dS, Y and dV out", *outputs, "y"),
            Role("spare", warps=1, regs=load_regs, computes="fills the warpgroup"),
        ),
        rings=sizes,
        named={"meet": meeting(states)},
        tiles={
            "k": Tile((sizes["k"], CHUNK, K), dtype, swizzled=True),
            "q": Tile((sizes["q"], CHUNK, K), dtype, swizzled=True),
            "do": Tile((sizes["rows"], CHUNK, TILE), dtype, swizzled=True),
            "a": Tile((sizes["rows"], CHUNK, CHUNK), dtype, swizzled=True),
            "p": Tile((sizes["p"], CHUNK, CHUNK), dtype, swizzled=True),
            "y": Tile((sizes["y"], CHUNK, TILE), dtype, swizzled=True),
            "dv": Tile((sizes["y"], CHUNK, TILE), dtype, swizzled=True),
            **dict.fromkeys(outputs, Tile((1, TILE, HALF), dtype, swizzled=True)),
            "gate": Tile((sizes["gate"], GATE_ROWS, CHUNK), "float32"),
        },
    )


@T.macro
def state(w, variant, s, ring, meet, enters, leaves, item):
    """Walks a sequence's chunks; `enters` and `leaves` are the rows of its first and last dS."""
    states, dtype = variant.states, variant.dtype
    num_chunks, n, hv, v0, unit = item.num_chunks, item.n, item.hv, item.v0, item.unit
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
    end = T.alloc_var("int32")
    find_row(enters, n, end)
    if end >= 0:
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] = enters.tensor[end, hv, k0 + c, v0 + r] / unit
    else:
        T.clear(r_ds)
    T.copy(r_ds, r_ds16)
    for step in T.serial(num_chunks):
        slot = ring.rows.slot(step)  # also of q and k
        gate_slot = ring.gate.slot(step)
        ring.k.wait(step)
        T.wgmma_gemm(  # 4
            r_ds16, s.k[slot, :, k0 : k0 + HALF], r_x, transpose_B=True, clear_accum=True
        )
        ring.rows.wait(step)
        ring.p.wait(step)
        T.wgmma_gemm(
            s.do[slot, i0 : i0 + CHUNK // states, :],
            s.p[ring.p.slot(step), i0 : i0 + CHUNK // states, :],
            r_d,
            transpose_A=True,
            clear_accum=True,
        )
        ring.gate.wait(step)
        for r, c in T.Parallel(TILE, HALF):
            r_staged[r, c] = r_ds[r, c] * unit
        chain.stage(r_staged, s[f"ds{w}"], ring[f"ds{w}"], step, HALF)
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] *= s.gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        ring.p.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s.gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        ring.y.acquire(step)  # Y and dV of the chunk before have been sent
        if states == 2:
            sum_half(r_x, s.dv, s.y, w, meet)  # 5
        T.copy(r_x, r_dn16)
        if states == 2:
            share_half(r_dn16, s.dv, w, meet)
        T.wgmma_gemm(r_dn16, s.a[slot, :, :], r_y, clear_accum=True)  # 6
        load_transposed(s.do, slot, 0, r_dot)
        for r, c in T.Parallel(TILE, CHUNK):
            r_do16[r, c] = s.gate[gate_slot, SCALE_E, c] * r_dot[c, r]
        ring.q.wait(step)
        T.wgmma_gemm(r_do16, s.q[slot, :, k0 : k0 + HALF], r_ds)  # 7
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        ring.rows.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s.gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s.k[slot, :, k0 : k0 + HALF], r_ds)
        for r, c in T.Parallel(TILE, CHUNK):
            r_y16[r, c] = r_y[r, c] * unit
        stage_half_transposed(r_y16, s.y, w)
        if states == 1:
            stage_half_transposed(r_y16, s.y, 1)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dv16[r, c] = r_y[r, c] * unit * s.gate[gate_slot, BETA, c]
        stage_half_transposed(r_dv16, s.dv, w)
        if states == 1:
            stage_half_transposed(r_dv16, s.dv, 1)
        ring.y.commit(step)
        ring.gate.release(step)
        T.wait_wgmma(1)
        ring.q.release(step)
        T.wait_wgmma(0)
        ring.k.release(step)
        if step >= num_chunks - EXACT:  # 9
            load_transposed(s.do, slot, 0, r_dot)
            for r, c in T.Parallel(TILE, CHUNK):
                r_x[r, c] = s.gate[gate_slot, SCALE_E, c] * r_dot[c, r]
            T.copy(r_x, r_dn16)
            for r, c in T.Parallel(TILE, CHUNK):
                r_do16[r, c] = r_x[r, c] - r_dn16[r, c]
            T.wgmma_gemm(r_do16, s.q[slot, :, k0 : k0 + HALF], r_ds)
            T.wait_wgmma(0)
        T.copy(r_ds, r_ds16)
    if leaves.has != 0:
        for r, c in T.Parallel(TILE, HALF):
            r_ds[r, c] *= unit
        chain.put_state(r_ds, leaves.tensor, n, hv, v0, HALF, k0)


def build(variant: Variant):
    plan, K, dtype, states = schedule(variant), variant.K, variant.dtype, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, num_sequences = T.dynamic("V, num_tiles, num_sequences")
    num_slots, num_dht, num_dh0 = T.dynamic("num_slots, num_dht, num_dh0")
    num_ends, num_firsts = T.dynamic("num_ends, num_firsts")
    size = K if K == 256 else T.dynamic("size")
    rows, value_rows = (num_tokens, num_heads, size), (num_tokens, num_value_heads)

    @T.prim_func
    def wide_dstate(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        do: strided("do", "token head tile", (*value_rows, num_tiles, TILE), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        dht: strided("dht", "n h k v", (num_dht, num_value_heads, K, V), "float32"),
        dS: T.Tensor((num_slots, num_value_heads, V, size), dtype),
        y: T.Tensor((num_slots, num_value_heads, num_tiles, CHUNK, TILE), dtype),
        dv: T.Tensor((*value_rows, num_tiles, TILE), dtype),
        dh0: strided("dh0", "n h k v", (num_dh0, num_value_heads, K, V), "float32"),
        scale: T.float32,
        has_dht: T.int32,
        has_dh0: T.int32,
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + chain.SOURCE + HALVES)
            s, ring = tiles(plan), rings(plan)
            item = Variables(chain.SEQUENCE, unit="float32")
            chain.find_sequence(block, spans, g_cum, num_heads, num_tiles, TILE, item)
            item["unit"] = 1
            if dtype == "bfloat16":
                if (scale != 0) & (item.num_chunks > 0):  # what only passes keeps its bits
                    item["unit"] = scale

            meet = NamedBarrier(plan, "meet").id() if states == 2 else None
            enters, leaves = StateRows(dht, has_dht, ends_of), StateRows(dh0, has_dh0, None)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(0, variant, s, ring, meet, enters, leaves, item)
            elif states == 2 and tx < plan.end("state1"):
                T.set_max_nreg(plan.role("state1").regs, 1)
                state(1, variant, s, ring, meet, enters, leaves, item)
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                score(s, ring, item.num_chunks, scale / item.unit, plan.start("score"))
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    rows_of = Rows(do, (item.hv, item.i_tile), s.do), Rows(A, (item.hv,), s.a)
                    loads = [  # in the order in which slots are released
                        (ring.rows, rows_of),
                        (ring.q, [Rows(q, (item.kh,), s.q)]),
                        (ring.k, [Rows(k, (item.kh,), s.k)]),
                    ]
                    load(loads, ring.tail, item)
                elif tx < plan.end("gate"):
                    chain.gate(g_cum, beta, s.gate, ring.gate, item, True, scale)
                elif tx < plan.end("store"):
                    out = ChunkGradients(dS, y, dv, s.dv, first_chunk[item.n], item, states)
                    outputs = [*(f"ds{w}" for w in range(states)), "y"]
                    chain.store(out, s, ring, outputs, item.num_chunks)

    return wide_dstate
