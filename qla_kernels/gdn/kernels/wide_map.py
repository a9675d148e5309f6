"""wide_map -- segment_map at K = 256: the map of a segment, S_end = M S_start + b.

One CTA per segment, value head and 64 or 128 columns of [b | M]. b, with columns of V, is the end
state if the segment starts from 0. M, with columns of K, is the end state if it starts from the
identity and all values are 0. A sequence's last segment is skipped: no later segment needs its end
state. Its first segment starts from the initial state, so its b is the end state itself and needs
no M. wide_windows says which heads are warm: of these the window's chunks are walked for b, and
there is no M. Of the others, cold heads, the whole segment is walked for both.

Per chunk, with X, 64 columns of b or M, kept transposed in fp32 registers from the first chunk to
the last, and e and d as in wide_fwd:
    W^T   = beta V^T - (beta e) X K^T                                               [64, C]
    V'^T  = W^T A^T                                                                 [64, C]
    X     = e^gamma_last X + (d V'^T) K                                             [64, K]

Steps (numbers appear again in the code):
    1 load    k, A, and v for columns of b, of a chunk
    2 gate    rows of gates of a chunk, which solve_score wrote
    3 state   X to 16 bits, some columns of K at a time; X K^T; W^T
    4 state   V'^T; meanwhile X decayed
    5 state   X
    6 state   write b as the next segment's start state; write M

Bounded by the latency of the chain 3, 4, 5 with 64 columns, and by the tensor cores with 128. Why
this shape: it is wide_fwd's chain without queries, rounded in the same places, so that b has the
bits of the states that wide_fwd computes. Every segment that is mapped consists of whole chunks, so
no tail needs care. M is written in fp32, as wide_scan multiplies it.
"""

from pathlib import Path
from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import move_state
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
    slot_of,
    take_turn,
    turns,
)
from qla_kernels.gdn.kernels.chain.roles import load_role
from qla_kernels.gdn.kernels.chain.wide import SOURCE as WIDE
from qla_kernels.gdn.kernels.chain.wide import await_product, load_gates, product_layout
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.rings import rings
from qla_kernels.tile.schedule import Role, Schedule, Tile, free, full
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

SOURCE = WIDE + Path(__file__).with_suffix(".cuh").read_text()


class Variant(NamedTuple):
    dtype: str  # of k, v, A
    K: int
    tile_v: int  # columns of b or M that a CTA computes: 64 or 128

    @property
    def states(self) -> int:
        return self.tile_v // TILE


VARIANTS = tuple(
    Variant(dtype, 256, tile_v) for dtype in ("bfloat16", "float16") for tile_v in (128, 64)
)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # mbarriers order everything that crosses warps
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the segment's length
}


def schedule(variant: Variant) -> Schedule:
    dtype = variant.dtype
    slots = {"rows": 3, "gate": 3}
    return Schedule(
        roles=(
            Role(
                "state",
                warps=4 * variant.states,
                regs=240,
                waits=full("rows", "gate"),
                signals=free("rows", "gate"),
                computes="X, W, V'; b or M out",
                uses=("wgmma",),
            ),
            load_role(24, "k, v, A", "rows", tail=False),
            load_role(24, "exponentials of gamma, beta", "gate", name="gates", tail=False),
            Role("spare", warps=2, regs=24, computes="fills the warpgroup"),
        ),
        rings=slots,
        named=named_barriers(variant.states),
        tiles={
            "k": Tile((slots["rows"], CHUNK, variant.K), dtype, swizzled=True),
            "v": Tile((slots["rows"], CHUNK, variant.tile_v), dtype, swizzled=True),
            "a": Tile((slots["rows"], CHUNK, CHUNK), dtype, swizzled=True),
            "gate": Tile((slots["gate"], GATE_ROWS, CHUNK), "float32"),
        },
    )


@T.macro
def load(always, values, of_map, ring, begin, num_chunks):
    """Loads the rows of each chunk; `values` for columns of b only."""
    for i in rolled(num_chunks):
        ring.acquire(i)  # 1
        if of_map == 0:
            values.copy(begin + i * CHUNK, ring.slot(i), ring.barrier(i))
        for rows in always:
            rows.copy(begin + i * CHUNK, ring.slot(i), ring.barrier(i))
        ring.commit(i)


@T.macro
def enter(K, r_s, h0, has_start, of_map, n, hv, column):
    """Sets X^T to unit vectors, to 64 columns of the initial state, or to 0."""
    if has_start != 0:
        move_state("load", K, r_s, h0, n, hv, column)
    else:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = T.if_then_else((of_map != 0) & (c == column + r), 1.0, 0.0)


@T.macro
def state(variant, r_s, s, ring, turn, num_chunks, of_map):
    states, K, dtype = variant.states, variant.K, variant.dtype
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # X K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    columns = 32 // states  # of a slab, as in wide_fwd
    r_slabs = T.alloc_local((2 * columns // 4,), "int32")
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK), r_x: product_layout(TILE, CHUNK)})
    w = T.alloc_var("int32")
    w = 0
    if states == 2:
        w = T.shfl_sync(T.get_thread_binding(1), 0)  # uniform, and known to be
    for i in T.serial(num_chunks):
        slot = ring.rows.slot(i)
        gate_slot = ring.gate.slot(i)
        ring.rows.wait(i)
        take_turn(turn, w)
        T.call_extern(  # 3
            "handle",
            f"qla::start_slabs<{K}, {columns}>",
            r_x.data,
            r_slabs.data,
            r_s.data,
            slot_of(s.k, slot, "r"),
        )
        give_turn(turn, w)
        ring.gate.wait(i)
        load_transposed(s.v, slot, w, r_vt)  # for columns of M never written, and not used
        await_product(r_x, 0)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = (
                s.gate[gate_slot, BETA, c]
                * T.if_then_else(of_map != 0, 0.0, T.cast(r_vt[c, r], "float32"))
                - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
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
        T.wait_wgmma(0)  # nothing may be in flight across the back edge: ptxas would serialise all
        ring.rows.release(i)


@T.macro
def leave(K, r_s, starts, maps, of_map, p, hv, column):
    """Writes 64 columns of b, as the next segment's start state, or of M."""
    if of_map != 0:  # 6
        move_state("store", K, r_s, maps, p, hv, column)
    else:
        move_state("store", K, r_s, starts, p + 1, hv, column)


def build(variant: Variant):
    plan = schedule(variant)
    K, dtype = variant.K, variant.dtype
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    V, num_tiles, capacity, room = T.dynamic("V, num_tiles, capacity, room")
    num_h0, num_bounds, num_firsts = T.dynamic("num_h0, num_bounds, num_firsts")
    value_rows, heads_here = (num_tokens, num_value_heads), (capacity, num_value_heads)

    @T.prim_func
    def wide_map(
        k: strided("k", "token head", (num_tokens, num_heads, K), dtype),
        v: strided("v", "token head tile", (*value_rows, num_tiles, variant.tile_v), dtype),
        A: T.Tensor((*value_rows, CHUNK), dtype),
        gates: T.Tensor((room, num_value_heads, GATE_ROWS, CHUNK), "float32"),
        first_chunk: T.Tensor((num_firsts,), "int32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        starts_of: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        heads: T.Tensor((num_value_heads,), "int32"),
        windows: T.Tensor(heads_here, "int32"),
        h0: strided("h0", "n h k v", (num_h0, num_value_heads, K, V), "float32"),
        starts: strided("starts", "n h 1 v", (*heads_here, K, V), "float32"),
        maps: strided("maps", "n h 1 v", (*heads_here, K, K), "float32"),
        has_h0: T.int32,
    ):
        with T.Kernel(
            capacity, num_tiles + K // variant.tile_v, num_value_heads, threads=plan.block
        ) as (p, i_slice, place):
            T.import_source(SOURCE)
            s, ring = tiles(plan), rings(plan)
            n, hv, window = (T.alloc_var("int32") for _ in range(3))
            column, of_map = T.alloc_var("int32"), T.alloc_var("int32")
            begin, length, num_chunks, skipped = (T.alloc_var("int32") for _ in range(4))
            has_start = T.alloc_var("int32")
            await_previous()
            hv = heads[place]
            of_map = 0
            column = i_slice * variant.tile_v
            if i_slice >= num_tiles:
                of_map = 1
                column = (i_slice - num_tiles) * variant.tile_v
            n = starts_of[p]
            sequence_span(bounds, p, num_tokens, begin, length)
            num_chunks = 0
            skipped = 0
            has_start = 0
            if (ends_of[p] < 0) & ((of_map == 0) | (n < 0)):  # a first segment needs no M
                num_chunks = T.ceildiv(length, CHUNK)
                window = windows[p, hv]
                if window > 0:
                    skipped = num_chunks - window
                    num_chunks = T.if_then_else(of_map != 0, 0, window)  # nor does a warm one
                elif n >= 0:
                    has_start = has_h0
            begin += skipped * CHUNK
            turn = turns(plan)
            tx, warpgroup = T.get_thread_binding(0), T.get_thread_binding(1)
            if warpgroup < variant.states:
                T.set_max_nreg(plan.role("state").regs, 1)
                num_chunks = T.shfl_sync(num_chunks, 0)  # uniform, and known to be
                if num_chunks > 0:
                    r_s = T.alloc_fragment((TILE, K), "float32")  # X^T: from first to last chunk
                    enter(K, r_s, h0, has_start, of_map, n, hv, column + warpgroup * TILE)
                    first_turn(turn, warpgroup)
                    state(variant, r_s, s, ring, turn, num_chunks, of_map)
                    last_turn(turn, warpgroup)
                    leave(K, r_s, starts, maps, of_map, p, hv, column + warpgroup * TILE)
            else:
                T.set_max_nreg(plan.role("load").regs, 0)
                if tx < 32:
                    always = [
                        Rows(k, (hv // (num_value_heads // num_heads),), s.k),
                        Rows(A, (hv,), s.a),
                    ]
                    values = Rows(v, (hv, i_slice), s.v)
                    load(always, values, of_map, ring.rows, begin, num_chunks)
                elif tx < 64:
                    load_gates(gates, first_chunk[p] + skipped, hv, s.gate, ring.gate, num_chunks)

    return wide_map
