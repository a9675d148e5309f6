"""The panel warpgroups of chunk_grads: steps 3 to 7, then dQ and dK of all value heads.

chunk_grads states the maths and what each step is for, under the numbers used here.
"""

import tilelang.language as T

from qla_kernels.gdn import grad_tiles as tiles
from qla_kernels.gdn import grads_out
from qla_kernels.gdn.grads import (
    BETA,
    DO,
    DOTS,
    DS,
    FACTORS,
    GROUP,
    KEY,
    PANEL,
    QUERY,
    STATE,
    VN,
    Y_W,
    D,
    E,
    F,
    P,
    Y,
)
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.math import CHUNK

OWN = 8  # named barriers, one a warpgroup


@T.macro
def sync_own(w):
    T.call_extern("handle", "tl::__sync_thread_partial", OWN + w, GROUP)


@T.macro
def of_values(r_x, r_w, s, ring, i, step, w, K):
    """Panel w of W, V', dV', Y and dV."""
    p_step = step + i
    gate, h = ring.gate.slot(step), ring.h.slot(step)
    ring.h.wait(step)
    T.wgmma_gemm(
        s.qk[KEY, :, :],
        s.state[h, w, :, :],
        r_w,
        transpose_B=True,
        clear_accum=True,
    )
    ring.gate.wait(step)
    ring.rows.wait(step)
    T.wait_wgmma(0)
    tiles.correct_values(r_w, s.v[0, 0, w * PANEL], s.gate[gate, E, 0], s.gate[gate, BETA, 0])  # 3
    T.fence_proxy_async()  # beta W: written by threads, read by wgmma
    sync_own(w)
    T.wgmma_gemm(s.a[0, :, :], s.v[0, :, w * PANEL : w * PANEL + PANEL], r_x, clear_accum=True)
    ring.vn.acquire(step)
    T.wait_wgmma(0)
    tiles.put_tile(r_x, s.tok[VN, 0, w * PANEL])  # 4
    T.fence_proxy_async()  # V': written by threads, read by wgmma
    ring.vn.commit(step)
    ring.ds.wait(step)
    T.wgmma_gemm(
        s.qk[KEY, :, :],
        s.state[DS, w, :, :],
        r_x,
        transpose_B=True,
        clear_accum=True,
    )
    ring.sums.acquire(step)
    tiles.put_tile_dot(
        s.state[h, 0, 0, 0],
        s.state[DS, 0, 0, 0],
        K * PANEL,
        w,
        s.gate[gate, E, CHUNK - 1],
        s.sums[STATE, 4 * w],
    )
    T.wait_wgmma(0)
    for row, column in T.Parallel(CHUNK, PANEL):
        r_x[row, column] *= s.gate[gate, D, row]
    ring.scores.wait(p_step)
    T.wgmma_gemm(  # 5
        s.scores[P, :, :], s.tok[DO, :, w * PANEL : w * PANEL + PANEL], r_x, transpose_A=True
    )
    ring.y.acquire(step)
    T.wait_wgmma(0)
    tiles.put_tile(r_x, s.tok[Y, 0, w * PANEL])
    T.fence_proxy_async()  # dV': written by threads, read by wgmma
    sync_own(w)
    T.wgmma_gemm(
        s.a[0, :, :],
        s.tok[Y, :, w * PANEL : w * PANEL + PANEL],
        r_x,
        transpose_A=True,
        clear_accum=True,
    )
    T.wait_wgmma(0)
    sync_own(w)  # all warps' products have read dV' and beta W
    tiles.finish_values(  # 6
        r_x,
        r_w,
        s.tok[Y, 0, w * PANEL],
        s.v[0, 0, w * PANEL],
        s.gate[gate, BETA, 0],
        s.sums[Y_W + w, 0],
    )
    T.fence_proxy_async()  # Y and dV: written by threads, read by wgmma and TMA
    ring.y.commit(step)
    ring.dv.commit(step)


@T.macro
def arrive(ring, i, step):
    """In place of `of_values`, for a warpgroup that has no panel of V."""
    ring.h.wait(step)
    ring.gate.wait(step)
    ring.ds.wait(step)
    ring.rows.wait(step)
    ring.sums.acquire(step)
    ring.scores.wait(step + i)


@T.macro
def of_keys(r_dq, r_dk, r_x, s, ring, step):
    """Panel w of dQi, dKi and dKu."""
    gate, h = ring.gate.slot(step), ring.h.slot(step)
    w, state = T.alloc_var("int32"), T.alloc_var("int32")
    for j in rolled(3):  # 7
        w = T.shfl_sync(T.get_thread_binding(1), 0)
        state = T.if_then_else(j == VN, DS, h)
        if j == VN:
            ring.vn.wait(step)
        elif j == Y:
            ring.y.wait(step)
        for t in T.unroll(s.state.shape[1]):
            T.wgmma_gemm(
                s.tok[j, :, t * PANEL : t * PANEL + PANEL],
                s.state[state, t, :, w * PANEL : w * PANEL + PANEL],
                r_x,
                clear_accum=t == 0,
            )
        T.wait_wgmma(0)
        if j == DO:
            ring.rows.release(step)
        elif j == VN:
            ring.vn.release(step)
            ring.ds.release(step)
        else:
            ring.y.release(step)
            ring.h.release(step)
        tiles.add_scaled(
            r_dq,
            r_dk,
            r_x,
            j,
            s.gate[gate, FACTORS + j, 0],
            s.qk[T.min(j, KEY), 0, w * PANEL],
            s.sums[DOTS + 3 * w + j, 0],
        )
    ring.gate.release(step)


@T.macro
def finish_keys(r_dq, r_dk, s, w):
    """To panel w of dQ and dK, what dP0 and F of all value heads give."""
    T.wgmma_gemm(s.scores[P, :, :], s.qk[KEY, :, w * PANEL : w * PANEL + PANEL], r_dq)
    T.wgmma_gemm(
        s.scores[P, :, :], s.qk[QUERY, :, w * PANEL : w * PANEL + PANEL], r_dk, transpose_A=True
    )
    T.wgmma_gemm(s.scores[F, :, :], s.qk[KEY, :, w * PANEL : w * PANEL + PANEL], r_dk)
    T.wgmma_gemm(
        s.scores[F, :, :], s.qk[KEY, :, w * PANEL : w * PANEL + PANEL], r_dk, transpose_A=True
    )
    T.wait_wgmma(0)


@T.macro
def leave(ring, step):
    """In place of `of_keys`, for a warpgroup that has no panel of K."""
    ring.vn.wait(step)
    ring.y.wait(step)
    ring.rows.release(step)
    ring.vn.release(step)
    ring.ds.release(step)
    ring.y.release(step)
    ring.h.release(step)
    ring.gate.release(step)


@T.macro
def panel(dq, dk, s, ring, walk, K, V):
    r_x = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_w = T.alloc_fragment((CHUNK, PANEL), "float32")  # K S0, then W
    r_dq = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_dk = T.alloc_fragment((CHUNK, PANEL), "float32")
    w, step, p_step = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    step = 0
    for i in T.serial(walk.num_pairs):
        ring.qk.wait(i)
        T.clear(r_dq)
        T.clear(r_dk)
        for _ in T.serial(walk.group):
            # again and again: descriptors kept over the loops would take accumulators' registers
            w = T.shfl_sync(T.get_thread_binding(1), 0)
            if V < K:
                if w < V // PANEL:
                    of_values(r_x, r_w, s, ring, i, step, w, K)
                else:
                    arrive(ring, i, step)
            else:
                of_values(r_x, r_w, s, ring, i, step, w, K)
            ring.scores.release(step + i)
            if K < V:
                if w < K // PANEL:
                    of_keys(r_dq, r_dk, r_x, s, ring, step)
                else:
                    leave(ring, step)
            else:
                of_keys(r_dq, r_dk, r_x, s, ring, step)
            ring.sums.commit(step)
            step += 1
        p_step = step + i
        ring.scores.wait(p_step)
        w = T.shfl_sync(T.get_thread_binding(1), 0)
        if K < V:
            if w < K // PANEL:
                finish_keys(r_dq, r_dk, s, w)
        else:
            finish_keys(r_dq, r_dk, s, w)
        ring.scores.release(p_step)
        ring.qk.release(i)
        if K < V:
            if w < K // PANEL:
                grads_out.put_rows(dq, dk, r_dq, r_dk, walk, i, w)
        else:
            grads_out.put_rows(dq, dk, r_dq, r_dk, walk, i, w)
