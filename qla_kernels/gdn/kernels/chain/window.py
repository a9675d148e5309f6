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


def warm_chunks(K, k, gates, growth, grows, s_sum, item, limit, at_end, cumulated):
    """Returns the number of chunks over which a segment's map falls below e^limit, or 0 if none.

    All threads of the CTA call it, and synchronise in it; see window.cuh. K is the variant's; k has
    that many columns or fewer. If `grows`, growth is kkt_solve's; it is None in kernels that never
    have it, as is gates.beta16. `item` has begin, length, kh and hv.
    """
    begin, length, kh, hv = item.begin, item.length, item.kh, item.hv
    g, beta16 = gates.g, gates.beta16
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
        T.access_ptr(gates.beta[begin, hv], "r", 1),
        T.access_ptr(beta16[begin, hv], "r", 1) if beta16 is not None else k_begin,
        gates.is_16,
        g.shape[1],
        length,
        limit,
        T.access_ptr(s_sum[0], "rw", warps),
    )


@T.macro
def read_values(s, ring, r_vt, r_v, r_e, i, of_map):
    """Reads the other inputs of W^T of chunk i, beta V^T and beta e, during another product.

    With of_map, V is 0 and only beta e is read.
    """
    gate_slot = ring.gate.slot(i)
    ring.rows.wait(i)
    ring.gate.wait(i)
    if of_map == 0:
        load_transposed(s.v, ring.rows.slot(i), 0, r_vt)
        for r, c in T.Parallel(TILE, CHUNK):
            r_v[r, c] = s.gate[gate_slot, BETA, c] * r_vt[c, r]
    for r, c in T.Parallel(TILE, CHUNK):
        r_e[r, c] = s.gate[gate_slot, BETA_E, c]


@T.macro
def columns(variant, s, ring, h0, starts, maps, p, item):
    """Computes 64 columns of b or, if item.of_map is set, of M: the state role of segment_map.

    A pass of the loop begins after X K^T of its chunk and ends with X K^T of the next chunk, so
    that the next chunk's other inputs are read during step 7. If this kernel does not solve, A is
    loaded along with the rows of k and v.
    """
    K, dtype, solves = variant.K, variant.dtype, variant.solves
    num_chunks, n, hv, column = item.num_chunks, item.n, item.hv, item.column
    of_map, has_start = item.of_map, item.has_start
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
        read_values(s, ring, r_vt, r_v, r_e, 0, of_map)
        T.copy(r_s, r_s16)
        T.wgmma_gemm(
            r_s16, s.k[ring.rows.slot(0), :, :], r_x, transpose_B=True, clear_accum=True
        )  # 5
        T.wait_wgmma(0)
    for i in T.serial(num_chunks):
        slot = ring.rows.slot(i)
        gate_slot = ring.gate.slot(i)
        a_slot = ring.a.slot(i) if solves else slot
        for r, c in T.Parallel(TILE, CHUNK):
            r_w16[r, c] = r_v[r, c] - r_e[r, c] * r_x[r, c]
        if solves:
            ring.a.wait(i)
        T.wgmma_gemm(r_w16, s.a[a_slot, :, :], r_n, transpose_B=True, clear_accum=True)  # 6
        for r, c in T.Parallel(TILE, CHUNK):
            r_d[r, c] = s.gate[gate_slot, D, c]
        for r, c in T.Parallel(TILE, K):
            r_s[r, c] *= s.gate[gate_slot, LAST, 0]
        T.wait_wgmma(0)
        if solves:
            ring.a.release(i)
        for r, c in T.Parallel(TILE, CHUNK):
            r_dn16[r, c] = r_n[r, c] * r_d[r, c]
        ring.gate.release(i)
        T.wgmma_gemm(r_dn16, s.k[slot, :, :], r_s)  # 7
        after = T.min(i + 1, num_chunks - 1)  # the last pass repeats its own product, unused
        read_values(s, ring, r_vt, r_v, r_e, after, of_map)
        T.wait_wgmma(0)
        T.copy(r_s, r_s16)
        T.wgmma_gemm(
            r_s16, s.k[ring.rows.slot(after), :, :], r_x, transpose_B=True, clear_accum=True
        )  # 5
        ring.rows.release(i)
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
def solve(s, ring, meet, num_chunks, first_thread):
    """Makes A of each chunk; all chunks are whole."""
    r_kk = T.alloc_fragment((CHUNK, CHUNK), "float32")
    thread = T.get_thread_binding() - first_thread
    for slot, j in T.grid(ring.a.stages, CHUNK // 2):  # above the diagonal A stays zero for good
        s.a[slot, thread // 2, thread % 2 * (CHUNK // 2) + j] = 0
    for i in T.serial(num_chunks):
        slot = ring.rows.slot(i)
        ring.rows.wait(i)
        T.wgmma_gemm(  # 4
            s.k[slot, :, :], s.k[slot, :, :], r_kk, transpose_B=True, clear_accum=True
        )
        ring.gate.wait(i)
        ring.a.acquire(i)
        T.wait_wgmma(0)
        ring.rows.release(i)
        T.call_extern(
            "handle",
            "qla::gated_inverse",
            r_kk.data,
            slot_of(s.gate, ring.gate.slot(i)),
            T.access_ptr(s.l[0], "rw", s.l.shape[0]),
            slot_of(s.a, ring.a.slot(i)),
            CHUNK,
            meet.id(),
            i,
        )
        ring.gate.release(i)
        T.fence_proxy_async()  # A: written by threads, read by wgmma
        ring.a.commit(i)


@T.macro
def gradient_columns(variant, s, ring, dht, ends, item):
    """Computes 64 columns (of V) of b': the state role of segment_map_bwd.

    b' becomes the gradient of the state that enters a segment.
    """
    K, dtype = variant.K, variant.dtype
    num_chunks, p, n, hv = item.num_chunks, item.p, item.n, item.hv
    column, has_end, unit = item.column, item.has_end, item.unit
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
        slot = ring.rows.slot(step)
        gate_slot = ring.gate.slot(step)
        ring.rows.wait(step)
        ring.p.wait(step)
        T.wgmma_gemm(r_ds16, s.k[slot, :, :], r_x, transpose_B=True, clear_accum=True)  # 5
        T.wgmma_gemm(
            s.do[slot, :, :], s.p[ring.p.slot(step), :, :], r_d, transpose_A=True, clear_accum=True
        )
        ring.gate.wait(step)
        T.wait_wgmma(0)
        ring.p.release(step)
        for r, c in T.Parallel(TILE, CHUNK):
            r_x[r, c] = s.gate[gate_slot, D, c] * r_x[r, c] + r_d[r, c]
        T.copy(r_x, r_dn16)
        T.wgmma_gemm(r_dn16, s.a[slot, :, :], r_y, clear_accum=True)  # 6
        load_transposed(s.do, slot, 0, r_dot)
        for r, c in T.Parallel(TILE, CHUNK):
            r_do16[r, c] = s.gate[gate_slot, SCALE_E, c] * r_dot[c, r]
        for r, c in T.Parallel(TILE, K):
            r_ds[r, c] *= s.gate[gate_slot, LAST, 0]
        T.wgmma_gemm(r_do16, s.q[slot, :, :], r_ds)  # 7
        T.wait_wgmma(1)  # Y is ready, dO'^T Q in flight
        for r, c in T.Parallel(TILE, CHUNK):
            r_du16[r, c] = -s.gate[gate_slot, BETA_E, c] * r_y[r, c]
        T.wgmma_gemm(r_du16, s.k[slot, :, :], r_ds)
        ring.gate.release(step)
        T.wait_wgmma(0)
        ring.rows.release(step)
        T.copy(r_ds, r_ds16)
    if num_chunks > 0:
        for r, c in T.Parallel(TILE, K):  # 8
            ends[p - 1, hv, column + r, c] = r_ds[r, c] * unit
