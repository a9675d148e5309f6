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
from qla_kernels.gdn.kernels.chain import cumulated as chain
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import (
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
    first_turn,
    give_turn,
    last_turn,
    load_transposed,
    named_barriers,
    take_turn,
    turns,
)
from qla_kernels.gdn.kernels.chain.roles import GATES, gate_role, load_role, score_role, store_role
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.record import Variables
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of q, k, dO, dS
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


EXACT = 2  # chunks with (8): their slots are not filled again


def schedule(variant: Variant) -> Schedule:
    states, K, dtype = variant.states, variant.K, variant.dtype
    state_regs, score_regs, load_regs = (192, 96, 32) if states == 2 else (240, 120, 40)
    # A fourth slot of rows, against late loads, is worth more than a second slot of P.
    slots = {"rows": 3, "gate": 4, "p": 2} if states == 2 else {"rows": 4, "gate": 4, "p": 1}
    outputs = [f"ds{w}" for w in range(states)]
    return Schedule(
        roles=(
            *(
                Role(
                    f"state{w}",
                    warps=4,
                    regs=state_regs,
                    waits=(*full("rows", "gate", "p"), f"ds{w}_free"),
                    signals=(*free("rows", "gate", "p"), f"ds{w}_full"),
                    computes=f"dS, dV', Y of columns {TILE * w} to {TILE * w + TILE - 1}",
                    uses=("wgmma",),
                )
                for w in range(states)
            ),
            score_role(score_regs, "rows"),
            load_role(load_regs, "q, k, dO, A", "rows"),
            gate_role(load_regs, GATES),
            store_role(load_regs, "dS out", *outputs),
            Role("spare", warps=1, regs=load_regs, computes="fills the warpgroup"),
        ),
        rings={**slots, "tail": 1, **dict.fromkeys(outputs, 1)},
        named=named_barriers(states),
        tiles={
            "k": Tile((slots["rows"], CHUNK, K), dtype),
            "q": Tile((slots["rows"], CHUNK, K), dtype),
            "do": Tile((slots["rows"], CHUNK, variant.tile_v), dtype, swizzled=True),
            "a": Tile((slots["rows"], CHUNK, CHUNK), dtype),
            "p": Tile((slots["p"], CHUNK, CHUNK), dtype, swizzled=True),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
            **dict.fromkeys(outputs, Tile((1, TILE, K), dtype, swizzled=True)),
        },
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
    first_chunk: Any
    item: Any
    held: Any
    K: int  # columns of a dS; those are written that the tensor dS has

    def put(self, tile, step, w):
        item = self.item
        return put_gradient(self, tile, item.num_chunks - 1 - step, item.v0 + w * TILE)


@T.macro
def put_gradient(out, tile, i, v):
    row, tok0, chunk = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    row = v - out.held * TILE
    tok0 = out.item.begin + i * CHUNK
    chunk = out.first_chunk + i
    if row >= 0:  # 7
        T.tma_copy(tile, out.dS[chunk, out.item.hv, row : row + TILE, 0 : out.K])
    elif out.item.length - i * CHUNK >= CHUNK:
        T.tma_copy(tile, out.dv[tok0 : tok0 + CHUNK, out.item.hv, 0 : out.K])
    else:
        T.tma_copy(tile, out.tails[out.item.n, out.item.hv, :, 0 : out.K])
        if chunk < out.owner.shape[0]:  # unlike TMA, a thread's store needs the bound
            out.owner[chunk] = out.item.n


@T.macro
def prepare(r_ds, r_staged, r_dot, r_do16, s, ring, at, K, unit):
    """Does the work that needs no product: stages dS, makes scale e dO^T, and decays dS."""
    step, slot, gate_slot, w = at
    for r, c in T.Parallel(TILE, K):
        r_staged[r, c] = r_ds[r, c] * unit
    chain.stage(r_staged, s[f"ds{w}"], ring[f"ds{w}"], step, K)
    load_transposed(s.do, slot, w, r_dot)
    for r, c in T.Parallel(TILE, CHUNK):
        r_do16[r, c] = s.gate[gate_slot, SCALE_E, c] * r_dot[c, r]
    for r, c in T.Parallel(TILE, K):
        r_ds[r, c] *= s.gate[gate_slot, LAST, 0]


@T.macro
def state(w, variant, s, ring, turn, enters, leaves, item):
    """Walks a sequence's chunks; `enters` and `leaves` are the rows of its first and last dS."""
    states, K, dtype = variant.states, variant.K, variant.dtype
    num_chunks, n, hv, v0, unit = item.num_chunks, item.n, item.hv, item.v0, item.unit
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
    end = T.alloc_var("int32")
    find_row(enters, n, end)
    if end >= 0:
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] = enters.tensor[end, hv, c, v0 + w * TILE + r] / unit
    else:
        T.clear(r_ds)
    T.copy(r_ds, r_ds16)
    first_turn(turn, w)
    for step in T.serial(num_chunks):
        slot = ring.rows.slot(step)
        gate_slot = ring.gate.slot(step)
        at = (step, slot, gate_slot, w)
        ring.rows.wait(step)
        ring.p.wait(step)
        take_turn(turn, w)
        T.wgmma_gemm(r_ds16, s.k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 4
        T.wgmma_gemm(
            s.do[slot, :, w * TILE : w * TILE + TILE],
            s.p[ring.p.slot(step), :, :],
            r_d,
            transpose_A=True,
            clear_accum=True,
        )
        give_turn(turn, w)
        ring.gate.wait(step)
        if states == 1:
            prepare(r_ds, r_staged, r_dot, r_do16, s, ring, at, K, unit)  # 9
        T.wait_wgmma(0)
        ring.p.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s.gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        T.copy(r_x, r_dn16)
        take_turn(turn, w)
        T.wgmma_gemm(r_dn16, s.a[slot, :, :], r_y, clear_accum=True)  # 5
        give_turn(turn, w)
        if states == 2:
            prepare(r_ds, r_staged, r_dot, r_do16, s, ring, at, K, unit)  # 9
        take_turn(turn, w)
        T.wgmma_gemm(r_do16, s.q[slot, :, :], r_ds)  # 6
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s.gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s.k[slot, :, :], r_ds)
        give_turn(turn, w)
        ring.gate.release(step)
        T.wait_wgmma(0)
        ring.rows.release(step)
        if step >= num_chunks - EXACT:  # 8
            load_transposed(s.do, slot, w, r_dot)
            for r, c in T.Parallel(TILE, CHUNK):
                r_x[r, c] = s.gate[gate_slot, SCALE_E, c] * r_dot[c, r]
            T.copy(r_x, r_dn16)
            for r, c in T.Parallel(TILE, CHUNK):
                r_do16[r, c] = r_x[r, c] - r_dn16[r, c]
            T.wgmma_gemm(r_do16, s.q[slot, :, :], r_ds)
            T.wait_wgmma(0)
        T.copy(r_ds, r_ds16)
    last_turn(turn, w)
    if leaves.has != 0:
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] *= unit
        chain.put_state(r_ds, leaves.tensor, n, hv, v0 + w * TILE, K)


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype, states = variant.K, variant.dtype, variant.states
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_sequences, num_slots = T.dynamic("V, num_sequences, num_slots")
    num_tiles = T.dynamic("num_tiles") if variant.tile_v == 64 else 1  # V is 128: _tile_v
    num_dht, num_dh0, num_rows = T.dynamic("num_dht, num_dh0, num_rows")
    num_tails, num_owners, size = T.dynamic("num_tails, num_owners, size")
    num_ends, num_firsts = T.dynamic("num_ends, num_firsts")
    rows, value_rows = (num_tokens, num_heads, size), (num_tokens, num_value_heads)

    @T.prim_func
    def dstate_chain(
        q: strided("q", "token head", rows, dtype),
        k: strided("k", "token head", rows, dtype),
        do: strided("do", "token head tile", (*value_rows, num_tiles, variant.tile_v), dtype),
        g_cum: T.Tensor(value_rows, "float32"),
        beta: T.Tensor(value_rows, "float32"),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        spans: strided("span", "step", (num_sequences, 2), "int32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        ends_of: T.Tensor((num_ends,), "int32"),
        dht: strided("dht", "n h k v", (num_dht, num_value_heads, K, V), "float32"),
        dS: T.Tensor((num_slots, num_value_heads, num_rows, size), dtype),
        dh0: strided("dh0", "n h k v", (num_dh0, num_value_heads, K, V), "float32"),
        dv: strided("dv", "token head", (*value_rows, V), dtype),
        tails: T.Tensor((num_tails, num_value_heads, TILE, size), dtype),
        owner: T.Tensor((num_owners,), "int32"),
        scale: T.float32,
        has_dht: T.int32,
        has_dh0: T.int32,
        held: T.int32,  # tiles of 64 rows of V that lie in dv and tails, not in dS: 0 or 1
    ):
        with T.Kernel(num_sequences * num_value_heads * num_tiles, threads=plan.threads) as block:
            T.import_source(GATED_TILES + chain.SOURCE)
            s, ring = tiles(plan), rings(plan)
            item = Variables(chain.SEQUENCE, unit="float32")
            chain.find_sequence(block, spans, g_cum, num_heads, num_tiles, variant.tile_v, item)
            item["unit"] = 1
            if dtype == "bfloat16":
                if (scale != 0) & (item.num_chunks > 0):  # what only passes keeps its bits
                    item["unit"] = scale

            turn = turns(plan)
            enters, leaves = StateRows(dht, has_dht, ends_of), StateRows(dh0, has_dh0, None)
            tx = T.get_thread_binding()
            if tx < plan.end("state0"):
                T.set_max_nreg(plan.role("state0").regs, 1)
                state(0, variant, s, ring, turn, enters, leaves, item)
            elif states == 2 and tx < plan.end("state1"):
                T.set_max_nreg(plan.role("state1").regs, 1)
                state(1, variant, s, ring, turn, enters, leaves, item)
            elif tx < plan.end("score"):
                T.set_max_nreg(plan.role("score").regs, 0)
                chain.score(s, ring, item.num_chunks, scale / item.unit, plan.start("score"))
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < plan.end("load"):
                    inputs = [
                        Rows(k, (item.kh,), s.k),
                        Rows(q, (item.kh,), s.q),
                        Rows(do, (item.hv, item.i_tile), s.do),
                        Rows(A, (item.hv,), s.a),
                    ]
                    chain.load(inputs, ring.rows, ring.tail, item, True)
                elif tx < plan.end("gate"):
                    chain.gate(g_cum, beta, s.gate, ring.gate, item, True, scale)
                elif tx < plan.end("store"):
                    out = ChainGradients(dS, dv, tails, owner, first_chunk[item.n], item, held, K)
                    outputs = [f"ds{w}" for w in range(states)]
                    chain.store(out, s, ring, outputs, item.num_chunks)

    return dstate_chain
