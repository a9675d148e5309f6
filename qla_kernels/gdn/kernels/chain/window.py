"""Roles of segment_map and segment_map_bwd, and the number of chunks that a segment's map needs.

segment_map.py and segment_map_bwd.py state the maths and the steps, with the numbers used here.
Both kernels are chains like those of cumulated.py, but they write only at their end.
"""

from pathlib import Path

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import (
    BETA,
    BETA_E,
    LAST,
    SCALE_E,
    TILE,
    D,
    accumulator_layout,
    load_transposed,
    slot_of,
)
from qla_kernels.tile.constants import CHUNK

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


def warm_chunks(
    K, k, g, growth, grows, beta, beta16, is_16, s_sum, begin, length, kh, hv, limit,
    at_end, cumulated,
):  # fmt: skip
    """Returns the number of chunks over which a segment's map falls below e^limit, or 0 if none.

    All threads of the CTA call it, and synchronise in it; see window.cuh. K is the variant's; k has
    that many columns or fewer. If `grows`, growth is kkt_solve's; it is None in kernels that never
    have it. beta is read in fp32 or, if is_16, from beta16 in 16 bits; beta16 is None in kernels
    that never have it.
    """
    warps, size = s_sum.shape[0], k.shape[-1]
    k_begin = T.access_ptr(k[begin, kh, 0], "r", 1)
    return T.call_extern(
        "int32",
        f"qla::warm_chunks<{int(at_end)}, {int(cumulated)}, {K}, {warps}>",
        k_begin,
        size,
        k.strides[0],
        T.access_ptr(g[begin, hv], "r", 1),
        T.access_ptr((g if growth is None else growth)[begin, hv], "r", 1),
        grows,
        T.access_ptr(beta[begin, hv], "r", 1),
        T.access_ptr(beta16[begin, hv], "r", 1) if beta16 is not None else k_begin,
        is_16,
        g.shape[1],
        length,
        limit,
        T.access_ptr(s_sum[0], "rw", warps),
    )


@T.macro
def read_values(s_v, s_gate, r_vt, r_v, r_e, rows, gate_ring, i, of_map):
    """Reads the other inputs of W^T of chunk i, beta V^T and beta e, during another product.

    With of_map, V is 0 and only beta e is read.
    """
    gate_slot = gate_ring.slot(i)
    rows.wait(i)
    gate_ring.wait(i)
    if of_map == 0:
        load_transposed(s_v, rows.slot(i), 0, r_vt)
        for r, c in T.Parallel(TILE, CHUNK):
            r_v[r, c] = s_gate[gate_slot, BETA, c] * r_vt[c, r]
    for r, c in T.Parallel(TILE, CHUNK):
        r_e[r, c] = s_gate[gate_slot, BETA_E, c]


@T.macro
def columns(
    K, dtype, h0, starts, maps, s_k, s_v, s_a, s_gate, rows, gate_ring, a_ring,
    num_chunks, p, n, hv, column, of_map, has_start,
):  # fmt: skip
    """Computes 64 columns of b or, if of_map is set, of M: the state role of segment_map.

    A pass of the loop begins after X K^T of its chunk and ends with X K^T of the next chunk, so
    that the next chunk's other inputs are read during step 7. a_ring is None if A is loaded along
    with the rows of k and v.
    """
    r_s = T.alloc_fragment((TILE, K), "float32")  # X^T: stays here from first to last chunk
    r_s16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # X K^T, then W^T
    r_n = T.alloc_fragment((TILE, CHUNK), "float32")  # V'^T
    r_v = T.alloc_fragment((TILE, CHUNK), "float32")  # beta V^T
    r_e = T.alloc_fragment((TILE, CHUNK), "float32")  # beta e, the same in all rows
    r_d = T.alloc_fragment((TILE, CHUNK), "float32")  # d, the same in all rows
    r_w16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_vt = T.alloc_fragment((CHUNK, TILE), dtype)
    r_term = T.alloc_fragment((TILE, K), maps.dtype)
    T.annotate_layout({r_vt: accumulator_layout(TILE, CHUNK)})
    T.clear(r_v)  # for columns of M it stays 0
    if of_map != 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = T.if_then_else(c == column + r, 1.0, 0.0)
    elif has_start != 0:
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] = h0[n, hv, c, column + r]
    else:
        T.clear(r_s)
    if num_chunks > 0:
        read_values(s_v, s_gate, r_vt, r_v, r_e, rows, gate_ring, 0, of_map)
        T.copy(r_s, r_s16)
        T.wgmma_gemm(r_s16, s_k[rows.slot(0), :, :], r_x, transpose_B=True, clear_accum=True)  # 5
        T.wait_wgmma(0)
    for i in T.serial(num_chunks):
        slot = rows.slot(i)
        gate_slot = gate_ring.slot(i)
        a_slot = slot if a_ring is None else a_ring.slot(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_w16[r, c] = r_v[r, c] - r_e[r, c] * r_x[r, c]
        if a_ring is not None:
            a_ring.wait(i)
        T.wgmma_gemm(r_w16, s_a[a_slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 6
        for r, c in T.Parallel(TILE, CHUNK):
            r_d[r, c] = s_gate[gate_slot, D, c]
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s_gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        if a_ring is not None:
            a_ring.release(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * r_d[r, c]
        gate_ring.release(i)
        T.wgmma_gemm(r_dn16, s_k[slot, :, :], r_s)  # 7
        after = T.min(i + 1, num_chunks - 1)  # the last pass repeats its own product, unused
        read_values(s_v, s_gate, r_vt, r_v, r_e, rows, gate_ring, after, of_map)
        T.wait_wgmma(0)
        T.copy(r_s, r_s16)
        T.wgmma_gemm(
            r_s16, s_k[rows.slot(after), :, :], r_x, transpose_B=True, clear_accum=True
        )  # 5
        rows.release(i)
        T.wait_wgmma(0)
    if num_chunks > 0:
        if of_map != 0:  # 8
            T.copy(r_s, r_term)
            for r, c in T.Parallel(TILE, K):
                maps[p, hv, 0, column + r, c] = r_term[r, c]
            for r, c in T.Parallel(TILE, K):
                maps[p, hv, 1, column + r, c] = r_s[r, c] - r_term[r, c]
        else:
            for r, c in T.Parallel(TILE, K):
                starts[p + 1, hv, column + r, c] = r_s[r, c]


@T.macro
def solve(s_k, s_gate, s_l, s_a, rows, gate_ring, a_ring, meet, num_chunks, first_thread):
    """Makes A of each chunk; all chunks are whole."""
    r_kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    thread = T.get_thread_binding() - first_thread
    for slot, j in T.grid(a_ring.stages, CHUNK // 2):  # above the diagonal A stays zero for good
        s_a[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(num_chunks):
        slot = rows.slot(i)
        rows.wait(i)
        T.wgmma_gemm(  # 4
            s_k[slot, :, :], s_k[slot, :, :], r_kk, transpose_B=True, clear_accum=True
        )
        gate_ring.wait(i)
        a_ring.acquire(i)
        T.wait_wgmma(0)
        rows.release(i)
        T.call_extern(
            "handle",
            "qla::gated_inverse",
            r_kk.data,
            slot_of(s_gate, gate_ring.slot(i)),
            T.access_ptr(s_l[0], "rw", s_l.shape[0]),
            slot_of(s_a, a_ring.slot(i)),
            CHUNK,
            meet.id(),
            i,
        )
        gate_ring.release(i)
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        a_ring.commit(i)


@T.macro
def gradient_columns(
    K, dtype, dht, ends, s_q, s_k, s_do, s_a, s_p, s_gate, rows, gate_ring, p_ring,
    num_chunks, p, n, hv, column, has_end, unit,
):  # fmt: skip
    """Computes 64 columns (of V) of b': the state role of segment_map_bwd.

    b' becomes the gradient of the state that enters a segment.
    """
    r_ds = T.alloc_fragment((TILE, K), "float32")  # dS^T: stays here from last to first chunk
    r_ds16 = T.alloc_fragment((TILE, K), dtype)
    r_x = T.alloc_fragment((TILE, CHUNK), "float32")  # dS K^T, then dV'^T
    r_d = T.alloc_fragment((TILE, CHUNK), "float32")  # dO^T P
    r_y = T.alloc_fragment((TILE, CHUNK), "float32")  # Y^T
    r_dot = T.alloc_fragment((CHUNK, TILE), dtype)
    r_do16 = T.alloc_fragment((TILE, CHUNK), dtype)  # scale e dO^T
    r_dn16 = T.alloc_fragment((TILE, CHUNK), dtype)
    r_du16 = T.alloc_fragment((TILE, CHUNK), dtype)  # -beta e Y^T
    T.annotate_layout({r_dot: accumulator_layout(TILE, CHUNK)})
    if has_end != 0:
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] = dht[n, hv, c, column + r] / unit
    else:
        T.clear(r_ds)
    T.copy(r_ds, r_ds16)
    for step in T.serial(num_chunks):
        slot = rows.slot(step)
        gate_slot = gate_ring.slot(step)
        rows.wait(step)
        p_ring.wait(step)
        T.wgmma_gemm(r_ds16, s_k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 5
        T.wgmma_gemm(
            s_do[slot, :, :], s_p[p_ring.slot(step), :, :], r_d, transpose_A=True, clear_accum=True
        )
        gate_ring.wait(step)
        T.wait_wgmma(0)
        p_ring.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s_gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        T.copy(r_x, r_dn16)
        T.wgmma_gemm(r_dn16, s_a[slot, :, :], r_y, clear_accum=True)  # 6
        load_transposed(s_do, slot, 0, r_dot)
        for r, c in T.Parallel(TILE, CHUNK):
            r_do16[r, c] = s_gate[gate_slot, SCALE_E, c] * r_dot[c, r]
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] *= s_gate[gate_slot, LAST, 0]
        T.wgmma_gemm(r_do16, s_q[slot, :, :], r_ds)  # 7
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s_gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s_k[slot, :, :], r_ds)
        gate_ring.release(step)
        T.wait_wgmma(0)
        rows.release(step)
        T.copy(r_ds, r_ds16)
    if num_chunks > 0:
        for r, c in T.Parallel(TILE, K):  # 8
            ends[p - 1, hv, column + r, c] = r_ds[r, c] * unit
