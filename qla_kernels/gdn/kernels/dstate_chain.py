"""dstate_chain -- the gradient of the state that leaves each chunk, last chunk first.

One CTA per sequence, value head and V tile. Per chunk (C = 64 tokens; gamma, e = e^gamma and
d = e^(gamma_last - gamma) restart in each; dS is kept transposed, [V, K], in fp32 registers for the
whole sequence), with A and P as in fused_fwd:
    dS_out  = dS, rounded, for every chunk                                          [V, K]
    dV'^T   = d dS K^T + dO^T P                                                     [V, C]
    Y^T     = dV'^T A                                                               [V, C]
    dS      = e^gamma_last dS - (beta e Y^T) K + (scale e dO^T) Q                   [V, K]

Steps (numbers appear again in the roles):
    1 load    q, k, dO, A of a chunk; in a tail, rows past the end become zero
    2 gate    gamma, decays to blocks' ends, beta e, scale e, d, e^gamma_last of a chunk
    3 score   Q K^T, then P, one chunk ahead of the state
    4 state   dS K^T from dS in 16 bits, and dO^T P; dV'^T
    5 state   Y^T
    6 state   dS += (scale e dO^T) Q; meanwhile beta e Y^T; then the product with K
    7 store   write dS_out by TMA
    8 state   in a sequence's first two chunks: dS += (scale e dO^T - its rounding) Q
    9 state   during 4 or, with two state warpgroups, which have too few registers then, during 5:
              dS in 16 bits to the staging tile, scale e dO^T, dS decayed

Bounded by latency, then by shared memory, which the right operands of all products come from.
Why this shape: it is fused_fwd reversed. The right operands are the same four tiles, q, k, A and P,
transposed. dO^T is a left operand twice: once transposed by wgmma itself, from shared memory,
because few registers are free during dS K^T, and once loaded by ldmatrix, to be scaled. Only dV', Y
and beta e Y wait for dS; everything else is done while a product runs. The kernel needs neither v
nor a state of the forward, so chunk_states may run at the same time.

In bf16 all numbers but inputs and outputs are in units of scale: e dO is then exact if nothing is
forgotten, the case in which most errors add up. The range of fp16 is too small for such units. If
much is forgotten, (scale e dO^T) Q of the first chunks is nearly all of dh0, and its rounding would
be nearly all of the error. For these chunks a second product (8) adds the rounding's remainder.

A dS of 128x128 has two tiles of 64 rows (of V). The first tile needs no memory of its own: it has
as many bytes as dV of its chunk, and chunk_grads reads dS before it writes dV. With wrong bounds
there may be more chunks than dS has room for: TMA writes nothing outside a tensor.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.cumulated import (
    SOURCE,
    gate,
    load,
    longest_first,
    put_state,
    score,
    stage,
    store,
)
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import (
    BETA_E,
    GATE_ROWS,
    LAST,
    SCALE_E,
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
    dtype: str  # of q, k, dO, dS
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
    """Returns the slots of each ring. A fourth slot of rows, against late loads, is worth more than
    a second slot of P.
    """
    rows, p = (3, 2) if variant.tile_v == 128 else (4, 1)
    return {"rows": rows, "gate": 4, "p": p, "ds": 1}


EXACT = 2  # chunks with (8): their slots are not filled again


def schedule(variant: Variant) -> Schedule:
    states = variant.tile_v // TILE
    state_regs, score_regs, load_regs = (192, 96, 32) if states == 2 else (240, 120, 40)
    sizes = slots(variant)
    rings = {datum: sizes[datum] for datum in ("rows", "gate", "p")}
    rings |= {f"ds{w}": sizes["ds"] for w in range(states)}
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=state_regs,
                    waits=("rows_full", "gate_full", "p_full", f"ds{w}_free"),
                    signals=("rows_free", "gate_free", "p_free", f"ds{w}_full"),
                    computes=f"dS, dV', Y of columns {TILE * w} to {TILE * w + TILE - 1}",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            Role(
                "score",
                warps=4,
                regs=score_regs,
                waits=("rows_full", "gate_full", "p_free"),
                signals=("rows_free", "gate_free", "p_full"),
                computes="P",
                uses=("wgmma",),
            ),
            Role(
                "load",
                warps=1,
                regs=load_regs,
                waits=("rows_free", "tail_full"),
                signals=("rows_full", "tail_full"),
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
                waits=tuple(f"ds{w}_full" for w in range(states)),
                signals=tuple(f"ds{w}_free" for w in range(states)),
                computes="dS out",
                uses=("tma_store",),
            ),
            Role("spare", warps=1, regs=load_regs, computes="fills the warpgroup"),
        ),
        rings=rings,
        named=named_barriers(states),
        # q, k, dO, A; P; staged gradients; gates; barriers and alignment
        smem_bytes=sizes["rows"] * CHUNK * (2 * variant.K + variant.tile_v + CHUNK) * 2
        + sizes["p"] * CHUNK * CHUNK * 2
        + sizes["ds"] * variant.tile_v * variant.K * 2
        + sizes["gate"] * GATE_ROWS * CHUNK * 4
        + 1024,
    )


class ChainGradients(NamedTuple):
    """The tensors to which role `store` writes dS of a value head's chunks, last chunk first.

    All rows (of V) go to the tensor dS if `held` is 0. If it is 1, the first 64 rows of a chunk go
    to dv, or to tails if the chunk has fewer than 64 tokens, and the other rows to dS.
    """

    dS: Any
    dv: Any
    tails: Any
    owner: Any
    begin: Any
    length: Any
    num_chunks: Any
    first_chunk: Any
    n: Any
    hv: Any
    v0: Any
    held: Any
    K: int  # columns of a dS; those are written that the tensor dS has

    def put(self, tile, step, w):
        return put_gradient(self, tile, self.num_chunks - 1 - step, self.v0 + w * TILE)


@T.macro
def put_gradient(out, tile, i, v):
    row, tok0, chunk = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    row = v - out.held * TILE
    tok0 = out.begin + i * CHUNK
    chunk = out.first_chunk + i
    if row >= 0:  # 7
        T.tma_copy(tile, out.dS[chunk, out.hv, row : row + TILE, 0 : out.K])
    elif out.length - i * CHUNK >= CHUNK:
        T.tma_copy(tile, out.dv[tok0 : tok0 + CHUNK, out.hv, 0 : out.K])
    else:
        T.tma_copy(tile, out.tails[out.n, out.hv, :, 0 : out.K])
        if chunk < out.owner.shape[0]:  # unlike TMA, a thread's store needs the bound
            out.owner[chunk] = out.n


@T.macro
def prepare(r_ds, r_staged, r_dot, r_do16, s_do, s_gate, s_ds, ds_ring, at, K, unit):
    """Does the work that needs no product: stages dS, makes scale e dO^T, and decays dS."""
    step, slot, gate_slot, w = at
    for r, c in T.Parallel(TILE, K):
        r_staged[r, c] = r_ds[r, c] * unit
    stage(r_staged, s_ds, ds_ring, step, K)
    load_transposed(s_do, slot, w, r_dot)
    for r, c in T.Parallel(TILE, CHUNK):
        r_do16[r, c] = s_gate[gate_slot, SCALE_E, c] * r_dot[c, r]
    for r, c in T.Parallel(TILE, K):
        r_ds[r, c] *= s_gate[gate_slot, LAST, 0]


@T.macro
def state(
    w, states, K, dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate, s_ds,
    rows, gate_ring, p_ring, ds_ring, turn, num_chunks, n, hv, v0, has_dht, has_dh0, unit,
    ends_of,
):  # fmt: skip
    r_ds = T.alloc_fragment((TILE, K), "float32")  # dS^T: stays here from last to first chunk
    r_ds16 = T.alloc_fragment((TILE, K), dtype)
    r_staged = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # dS K^T, then dV'^T
    r_d = T.alloc_fragment((TILE, CHUNK), "float32")  # dO^T P
    r_y = T.alloc_fragment((TILE, CHUNK), "float32")  # Y^T
    r_dot = T.alloc_fragment((CHUNK, TILE), dtype)
    r_do16 = T.alloc_fragment((TILE, CHUNK), dtype)  # scale e dO^T
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_du16 = T.alloc_fragment((TILE, CHUNK), dtype)  # -beta e Y^T
    T.annotate_layout({r_dot: accumulator_layout(TILE, CHUNK)})
    end = T.alloc_var("int32")  # row of dht
    end = -1
    if has_dht == 1:
        end = n
    if has_dht == 2:
        end = ends_of[n]  # the row of this node's end, if it has a gradient
    if end >= 0:
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] = dht[end, hv, c, v0 + w * TILE + r] / unit
    else:
        T.clear(r_ds)
    T.copy(r_ds, r_ds16)
    first_turn(turn, w)
    for step in T.serial(num_chunks):
        slot = rows.slot(step)
        gate_slot = gate_ring.slot(step)
        at = (step, slot, gate_slot, w)
        rows.wait(step)
        p_ring.wait(step)
        take_turn(turn, w)
        T.wgmma_gemm(r_ds16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
        T.wgmma_gemm(
            s_do[slot, :, w * TILE : w * TILE + TILE],
            s_p[p_ring.slot(step), :, :],
            r_d,
            transpose_A=True,
            clear_accum=True,
        )
        give_turn(turn, w)
        gate_ring.wait(step)
        if states == 1:
            prepare(r_ds, r_staged, r_dot, r_do16, s_do, s_gate, s_ds, ds_ring, at, K, unit)  # 9
        T.wait_wgmma(0)
        p_ring.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s_gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        T.copy(r_x, r_dn16)
        take_turn(turn, w)
        T.wgmma_gemm(r_dn16, s_a[slot, :, :], r_y, clear_accum=True)  # 5
        give_turn(turn, w)
        if states == 2:
            prepare(r_ds, r_staged, r_dot, r_do16, s_do, s_gate, s_ds, ds_ring, at, K, unit)  # 9
        take_turn(turn, w)
        T.wgmma_gemm(r_do16, s_q[slot, :, :], r_ds)  # 6
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s_gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s_k[slot, :, :], r_ds)
        give_turn(turn, w)
        gate_ring.release(step)
        T.wait_wgmma(0)
        rows.release(step)
        if step >= num_chunks - EXACT:  # 8
            load_transposed(s_do, slot, w, r_dot)
            for r, c in T.Parallel(TILE, CHUNK):
                r_x[r, c] = s_gate[gate_slot, SCALE_E, c] * r_dot[c, r]
            T.copy(r_x, r_dn16)
            for r, c in T.Parallel(TILE, CHUNK):
                r_do16[r, c] = r_x[r, c] - r_dn16[r, c]
            T.wgmma_gemm(r_do16, s_q[slot, :, :], r_ds)
            T.wait_wgmma(0)
        T.copy(r_ds, r_ds16)
    last_turn(turn, w)
    if has_dh0 != 0:
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] *= unit
        put_state(r_ds, dh0, n, hv, v0 + w * TILE, K)


def build(variant: Variant):
    plan, sizes = schedule(variant), slots(variant)
    K, states = variant.K, variant.tile_v // TILE
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_sequences, num_slots = T.dynamic("V, num_sequences, num_slots")
    num_tiles = T.dynamic("num_tiles") if variant.tile_v == 64 else 1  # V is 128: _tile_v
    num_dht, num_dh0, num_rows = T.dynamic("num_dht, num_dh0, num_rows")
    num_tails, num_owners, size = T.dynamic("num_tails, num_owners, size")
    span_step, num_ends, num_firsts = T.dynamic("span_step, num_ends, num_firsts")
    dv_token, dv_head = T.dynamic("dv_token, dv_head")
    q_token, q_head, k_token, k_head = T.dynamic("q_token, q_head, k_token, k_head")
    do_token, do_head, do_tile = T.dynamic("do_token, do_head, do_tile")
    dht_n, dht_h, dht_k, dht_v = T.dynamic("dht_n, dht_h, dht_k, dht_v")
    dh0_n, dh0_h, dh0_k, dh0_v = T.dynamic("dh0_n, dh0_h, dh0_k, dh0_v")

    @T.prim_func
    def dstate_chain(
        q: T.StridedTensor((num_tokens, num_heads, size), (q_token, q_head, 1), variant.dtype),
        k: T.StridedTensor((num_tokens, num_heads, size), (k_token, k_head, 1), variant.dtype),
        do: T.StridedTensor(
            (num_tokens, num_value_heads, num_tiles, variant.tile_v),
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
        dS: T.Tensor((num_slots, num_value_heads, num_rows, size), variant.dtype),
        dh0: T.StridedTensor(
            (num_dh0, num_value_heads, K, V), (dh0_n, dh0_h, dh0_k, dh0_v), "float32"
        ),
        dv: T.StridedTensor(
            (num_tokens, num_value_heads, V), (dv_token, dv_head, 1), variant.dtype
        ),
        tails: T.Tensor((num_tails, num_value_heads, TILE, size), variant.dtype),
        owner: T.Tensor((num_owners,), "int32"),
        scale: T.float32,
        has_dht: T.int32,
        has_dh0: T.int32,
        held: T.int32,  # tiles of 64 rows of V that lie in dv and tails, not in dS: 0 or 1
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + SOURCE)
            s_k = T.alloc_shared((sizes["rows"], CHUNK, K), variant.dtype)
            s_q = T.alloc_shared((sizes["rows"], CHUNK, K), variant.dtype)
            s_do = T.alloc_shared((sizes["rows"], CHUNK, variant.tile_v), variant.dtype)
            s_a = T.alloc_shared((sizes["rows"], CHUNK, CHUNK), variant.dtype)
            s_p = T.alloc_shared((sizes["p"], CHUNK, CHUNK), variant.dtype)
            s_gate = T.alloc_shared((sizes["gate"], GATE_ROWS, CHUNK), "float32")
            rows_full = T.alloc_barrier([plan.arrivals("rows_full")] * sizes["rows"])
            rows_free = T.alloc_barrier([plan.arrivals("rows_free")] * sizes["rows"])
            gate_full = T.alloc_barrier([plan.arrivals("gate_full")] * sizes["gate"])
            gate_free = T.alloc_barrier([plan.arrivals("gate_free")] * sizes["gate"])
            p_full = T.alloc_barrier([plan.arrivals("p_full")] * sizes["p"])
            p_free = T.alloc_barrier([plan.arrivals("p_free")] * sizes["p"])
            tail_full = T.alloc_barrier([plan.arrivals("tail_full")])
            s_ds0 = T.alloc_shared((sizes["ds"], TILE, K), variant.dtype)
            ds0_full = T.alloc_barrier([plan.arrivals("ds0_full")] * sizes["ds"])
            ds0_free = T.alloc_barrier([plan.arrivals("ds0_free")] * sizes["ds"])
            s_ds = [s_ds0]
            ds_rings = [Ring(ds0_full, ds0_free, sizes["ds"])]
            if states == 2:
                s_ds1 = T.alloc_shared((sizes["ds"], TILE, K), variant.dtype)
                ds1_full = T.alloc_barrier([plan.arrivals("ds1_full")] * sizes["ds"])
                ds1_free = T.alloc_barrier([plan.arrivals("ds1_free")] * sizes["ds"])
                s_ds.append(s_ds1)
                ds_rings.append(Ring(ds1_full, ds1_free, sizes["ds"]))
            swizzled = (s_do, s_p, *s_ds)
            T.annotate_layout({s: make_full_bank_swizzled_layout(s) for s in swizzled})
            rows = Ring(rows_full, rows_free, sizes["rows"])
            gates = Ring(gate_full, gate_free, sizes["gate"])
            p_ring = Ring(p_full, p_free, sizes["p"])

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

            unit = T.alloc_var("float32")
            unit = 1
            if variant.dtype == "bfloat16":
                if (scale != 0) & (num_chunks > 0):  # what only passes stays as it is, bit for bit
                    unit = scale

            turn = turns(plan)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    0, states, K, variant.dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate,
                    s_ds[0], rows, gates, p_ring, ds_rings[0], turn, num_chunks, n, hv, v0, has_dht,
                    has_dh0, unit, ends_of,
                )  # fmt: skip
            elif tx < plan.start("score"):  # no thread if the CTA has one state warpgroup
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(
                    1, states, K, variant.dtype, dht, dh0, s_q, s_k, s_do, s_a, s_p, s_gate,
                    s_ds[-1], rows, gates, p_ring, ds_rings[-1], turn, num_chunks, n, hv, v0,
                    has_dht, has_dh0, unit, ends_of,
                )  # fmt: skip
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                score(
                    s_q, s_k, s_gate, s_p, rows, gates, p_ring, num_chunks, scale / unit,
                    plan.start("score"),
                )  # fmt: skip
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    load(
                        [
                            Rows(k, (kh,), s_k),
                            Rows(q, (kh,), s_q),
                            Rows(do, (hv, i_tile), s_do),
                            Rows(A, (hv,), s_a),
                        ],
                        rows, tail_full, begin, length, num_chunks, True,
                    )  # fmt: skip
                elif tx < plan.end("gate"):
                    gate(
                        g_cum, beta, s_gate, gates, begin, length, num_chunks, hv, True,
                        scale / unit,
                    )  # fmt: skip
                elif tx < plan.end("store"):
                    store(
                        ChainGradients(
                            dS, dv, tails, owner, begin, length, num_chunks, first_chunk[n],
                            n, hv, v0, held, K,
                        ),
                        s_ds, ds_rings, num_chunks,
                    )  # fmt: skip

    return dstate_chain
