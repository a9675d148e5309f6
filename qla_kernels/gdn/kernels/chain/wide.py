"""The state role of chains whose state fills the registers: K = 256.

wide_fwd.py states the maths and the steps, with the numbers used here. wide.cuh says how S^T
becomes the left operand of a product when there is no room for all of it in 16 bits.
"""

from __future__ import annotations

from pathlib import Path

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import move_state, put_out
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    LAST,
    SCALE_E,
    TILE,
    D,
    accumulator_layout,
    find_row,
    give_turn,
    load_transposed,
    slot_of,
    take_turn,
)
from qla_kernels.gdn.kernels.chain.transfer import chunk_out, tail_out
from qla_kernels.gdn.kernels.tables import read_span
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()


def product_layout(rows: int, columns: int) -> T.Fragment:
    """Returns the layout of a (rows, columns) wgmma accumulator, for products of inline CUDA."""
    return T.Fragment(
        [rows, columns],
        forward_fn=lambda r, c: (
            r // 16 * 32 + r % 8 * 4 + c % 8 // 2,
            c // 8 * 4 + r % 16 // 8 * 2 + c % 2,
        ),
    )


def await_product(r_c, in_flight):
    """Waits for a product that inline CUDA started, while so many later ones stay in flight."""
    return T.call_extern("handle", f"qla::await_product<{in_flight}>", r_c.data)


@T.macro
def find(x, spans, num_tokens, num_tiles, item):
    """Sets `item` to a CTA's sequence and V tile."""
    item["i_tile"] = x % num_tiles
    item["n"] = x // num_tiles
    read_span(spans, item.n, num_tokens, item.begin, item.length)
    item["num_chunks"] = T.ceildiv(item.length, CHUNK)


@T.macro
def enter(variant, r_s, states, w, item, hv):
    """Loads S^T of the 64 columns of V of state warpgroup w, or clears it."""
    n, v0 = item.n, item.i_tile * variant.tile_v + w * TILE
    row = T.alloc_var("int32")
    find_row(states, n, row)
    if row >= 0:
        move_state("load", variant.K, r_s, states.tensor, row, hv, v0)
    else:
        T.clear(r_s)


@T.macro
def leave(variant, r_s, states, w, item, hv):
    """Stores S^T, if it is asked for."""
    n, v0 = item.n, item.i_tile * variant.tile_v + w * TILE
    row = T.alloc_var("int32")
    find_row(states, n, row)
    if row >= 0:
        move_state("store", variant.K, r_s, states.tensor, row, hv, v0)


@T.macro
def state(variant, r_s, s, ring, turn, num_chunks):
    states, K, dtype = variant.states, variant.K, variant.dtype
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # S K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_o = T.alloc_fragment((TILE, CHUNK), "float32")  # O^T
    columns = 32 // states  # of a slab: there are fewer registers if K and Q are shared
    r_slabs = T.alloc_local((2 * columns // 4,), "int32")
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_n16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_o16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK), r_x: product_layout(TILE, CHUNK)})
    w = T.alloc_var("int32")
    w = 0
    if states == 2:
        w = T.shfl_sync(T.get_thread_binding(1), 0)  # uniform, and known to be
    for i in T.serial(num_chunks):
        slot = ring.k.slot(i)
        gate_slot = ring.gate.slot(i)
        ring.q.wait(i)
        ring.k.wait(i)
        take_turn(turn, w)
        T.call_extern(  # 2
            "handle",
            f"qla::start_products<{K}, {columns}>",
            r_x.data,
            r_o.data,
            r_slabs.data,
            r_s.data,
            slot_of(s.k, slot, "r"),
            slot_of(s.q, ring.q.slot(i), "r"),
        )
        give_turn(turn, w)
        ring.v.wait(i)
        ring.gate.wait(i)
        await_product(r_x, 1)  # S Q^T is in flight
        load_transposed(s.v, ring.v.slot(i), w, r_vt)
        for r, c in T.Parallel(TILE, CHUNK):  # 3
            r_x[r, c] = (
                s.gate[gate_slot, BETA, c] * r_vt[c, r] - s.gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        ring.v.release(i)
        T.copy(r_x, r_w16)
        await_product(r_o, 0)
        ring.q.release(i)
        ring.a.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_w16, s.a[ring.a.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
        give_turn(turn, w)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s.gate[gate_slot, LAST, 0]
        for r, c in T.Parallel(TILE, CHUNK):
            r_o[r, c] *= s.gate[gate_slot, SCALE_E, c]
        T.wait_wgmma(0)
        ring.a.release(i)
        T.copy(r_n, r_n16)
        ring.p.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_n16, s.p[ring.p.slot(i), :, :], r_o, transpose_B=True)  # 4
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s.gate[gate_slot, D, c]
        ring.gate.release(i)
        T.wgmma_gemm(r_dn16, s.k[slot, :, :], r_s)
        give_turn(turn, w)
        T.wait_wgmma(0)  # nothing may be in flight across the back edge: ptxas would serialise all
        ring.k.release(i)
        ring.p.release(i)
        T.copy(r_o, r_o16)
        put_out(r_o16, s.o, ring.o, w, i * states + w)


@T.macro
def load_gates(gates, first, hv, s_gate, ring, num_chunks):
    """Loads gates[first + i, hv], what solve_score wrote, for each chunk i of a sequence."""
    for i in rolled(num_chunks):  # 1
        ring.acquire(i)
        T.tma_copy(gates[first + i, hv, :, :], s_gate[ring.slot(i), :, :], barrier=ring.barrier(i))
        ring.commit(i)


@T.macro
def store(states, o, s_o, ring, item, hv):
    """Stores O of all chunks: by TMA, and the tail's rows by predicated writes."""
    begin, length, first_column = item.begin, item.length, item.i_tile * states
    whole, tail = T.alloc_var("int32"), T.alloc_var("int32")
    whole = length // CHUNK
    tail = length % CHUNK
    for i in rolled(whole):
        for w in range(states):
            ring.wait(i * states + w)
            T.fence_proxy_async()  # s_o: written by threads, read by the TMA store
            chunk_out(o, s_o, w, begin + i * CHUNK, hv, first_column + w)  # 5
            ring.release(i * states + w)
    if tail > 0:
        for w in range(states):
            ring.wait(whole * states + w)
            tail_out(o, s_o, w, begin + whole * CHUNK, tail, hv, first_column + w)
