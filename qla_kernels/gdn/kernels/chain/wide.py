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
def find(
    x, spans, num_tokens, num_tiles, n: T.Ref, i_tile: T.Ref, begin: T.Ref, length: T.Ref,
    num_chunks: T.Ref,
):  # fmt: skip
    i_tile = x % num_tiles
    n = x // num_tiles
    read_span(spans, n, num_tokens, begin, length)
    num_chunks = T.ceildiv(length, CHUNK)


@T.macro
def enter(K, r_s, h0, has_h0, starts_of, n, hv, v0):
    """Loads S^T of the 64 columns of V from v0 on, or clears it."""
    row = T.alloc_var("int32")  # row of h0
    row = -1
    if has_h0 == 1:
        row = n
    if has_h0 == 2:
        row = starts_of[n]  # the row in which this node's parent ends, if any
    if row >= 0:
        move_state("load", K, r_s, h0, row, hv, v0)
    else:
        T.clear(r_s)


@T.macro
def leave(K, r_s, ht, has_ht, ends_of, n, hv, v0):
    """Stores S^T, if it is asked for."""
    row = T.alloc_var("int32")  # row of ht
    row = -1
    if has_ht == 1:
        row = n
    if has_ht == 2:
        row = ends_of[n]  # the sequence that this segment ends, or the row of this node, if any
    if row >= 0:
        move_state("store", K, r_s, ht, row, hv, v0)


@T.macro
def state(
    states, K, dtype, r_s, s_q, s_k, s_v, s_gate, s_a, s_p, s_o,
    q_ring, k_ring, v_ring, gate_ring, a_ring, p_ring, o_ring, turn, num_chunks,
):  # fmt: skip
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
        slot = k_ring.slot(i)
        gate_slot = gate_ring.slot(i)
        q_ring.wait(i)
        k_ring.wait(i)
        take_turn(turn, w)
        T.call_extern(  # 2
            "handle",
            f"qla::start_products<{K}, {columns}>",
            r_x.data,
            r_o.data,
            r_slabs.data,
            r_s.data,
            slot_of(s_k, slot, "r"),
            slot_of(s_q, q_ring.slot(i), "r"),
        )
        give_turn(turn, w)
        v_ring.wait(i)
        gate_ring.wait(i)
        await_product(r_x, 1)  # S Q^T is in flight
        load_transposed(s_v, v_ring.slot(i), w, r_vt)
        for r, c in T.Parallel(TILE, CHUNK):  # 3
            r_x[r, c] = (
                s_gate[gate_slot, BETA, c] * r_vt[c, r] - s_gate[gate_slot, BETA_E, c] * r_x[r, c]
            )
        v_ring.release(i)
        T.copy(r_x, r_w16)
        await_product(r_o, 0)
        q_ring.release(i)
        a_ring.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_w16, s_a[a_ring.slot(i), :, :], r_n, transpose_B=True, clear_accum=True)
        give_turn(turn, w)
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        for r, c in T.Parallel(TILE, CHUNK):
            r_o[r, c] *= s_gate[gate_slot, SCALE_E, c]
        T.wait_wgmma(0)
        a_ring.release(i)
        T.copy(r_n, r_n16)
        p_ring.wait(i)
        take_turn(turn, w)
        T.wgmma_gemm(r_n16, s_p[p_ring.slot(i), :, :], r_o, transpose_B=True)  # 4
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * s_gate[gate_slot, D, c]
        gate_ring.release(i)
        T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)
        give_turn(turn, w)
        T.wait_wgmma(0)  # nothing may be in flight across the back edge: ptxas would serialise all
        k_ring.release(i)
        p_ring.release(i)
        T.copy(r_o, r_o16)
        put_out(r_o16, s_o, o_ring, w, i * states + w)


@T.macro
def load_gates(gates, first, hv, s_gate, ring, num_chunks):
    """Loads gates[first + i, hv], what solve_score wrote, for each chunk i of a sequence."""
    for i in rolled(num_chunks):  # 1
        ring.acquire(i)
        T.tma_copy(gates[first + i, hv, :, :], s_gate[ring.slot(i), :, :], barrier=ring.barrier(i))
        ring.commit(i)


@T.macro
def store(states, o, s_o, ring, begin, length, hv, first_column):
    """Stores O of all chunks: by TMA, and the tail's rows by predicated writes."""
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
