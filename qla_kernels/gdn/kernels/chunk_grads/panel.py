"""The panel warpgroups of chunk_grads: steps 3 to 7, then dQ and dK of all value heads.

chunk_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import BETA, D
from qla_kernels.gdn.kernels.chunk_grads import tiles
from qla_kernels.gdn.kernels.chunk_grads.layout import (
    DO,
    DOTS,
    FACTORS,
    KEY,
    PANEL,
    QUERY,
    ROW_E,
    STATE,
    VN,
    Y_W,
    F,
    P,
    Y,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.record import Variables


def first_tile(i):
    """Returns the first tile of pair i's q and k in `turns`; its dS has the other two tiles.

    The number is recomputed by a shuffle at each use, as the number of a panel is. Otherwise
    descriptors would be kept in registers over the loops, and accumulators need these registers.
    """
    return T.shfl_sync(i, 0) % 2 * 2


@T.macro
def of_values(r_x, r_w, r_dot, s, ring, i, step, w, K):
    """Computes panel w of W, V', dV', Y and dV: steps 3 to 6."""
    p_step = step + i
    gate, h = ring.gate.slot(step), ring.h.slot(step)
    turn = T.alloc_var("int32")
    turn = first_tile(i)
    ring.h.wait(step)
    T.wgmma_gemm(
        s.turns[turn + KEY, :, :],
        s.state[h * s.panels + w, :, :],
        r_w,
        transpose_B=True,
        clear_accum=True,
    )
    ring.gate.wait(step)
    ring.rows.wait(step)
    T.wait_wgmma(0)
    tiles.correct_values(  # 3
        r_w, s.v[0, 0, w * PANEL], s.gate[gate, ROW_E, 0], s.gate[gate, BETA, 0]
    )
    T.fence_proxy_async()  # beta W: written by threads, read by wgmma
    T.tma_store_wait(0)  # tiles of V' and Y: dQ and dK of the pair before have been sent
    ring.own.sync(w)
    T.wgmma_gemm(s.a[0, :, :], s.v[0, :, w * PANEL : w * PANEL + PANEL], r_x, clear_accum=True)
    ring.vn.acquire(step)
    T.wait_wgmma(0)
    tiles.put_tile(r_x, s.tok[VN, 0, w * PANEL])  # 4
    T.fence_proxy_async()  # V': written by threads, read by wgmma
    ring.vn.commit(step)
    ring.ds.wait(step)
    T.wgmma_gemm(
        s.turns[turn + KEY, :, :],
        s.turns[2 - turn + w, :, :],
        r_x,
        transpose_B=True,
        clear_accum=True,
    )
    tiles.tile_dot(
        r_dot,
        s.state[h * s.panels, 0, 0],
        s.turns[2 - turn, 0, 0],
        K * PANEL,
        w,
    )
    T.wait_wgmma(0)
    tiles.scale_rows(r_x, s.gate[gate, D, 0])
    ring.scores.wait(p_step)
    T.wgmma_gemm(  # 5
        s.scores[P, :, :], s.tok[DO, :, w * PANEL : w * PANEL + PANEL], r_x, transpose_A=True
    )
    ring.y.acquire(step)
    T.wait_wgmma(0)
    tiles.put_tile(r_x, s.tok[Y, 0, w * PANEL])
    T.fence_proxy_async()  # dV': written by threads, read by wgmma
    ring.own.sync(w)
    T.wgmma_gemm(
        s.a[0, :, :],
        s.tok[Y, :, w * PANEL : w * PANEL + PANEL],
        r_x,
        transpose_A=True,
        clear_accum=True,
    )
    T.wait_wgmma(0)
    ring.own.sync(w)  # all warps' products have read dV' and beta W
    ring.sums.acquire(step)
    tiles.put_number(r_dot, s.gate[gate, ROW_E, CHUNK - 1], s.sums[STATE, 4 * w])
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
def arrive(ring, i, step, w):
    """Replaces `of_values` in a warpgroup without a panel of V.

    It computes nothing, and waits for the same barriers as the panel warpgroups.
    """
    T.tma_store_wait(0)  # as in of_values, for this warpgroup's own tiles
    ring.own.sync(w)
    ring.h.wait(step)
    ring.gate.wait(step)
    ring.ds.wait(step)
    ring.rows.wait(step)
    ring.sums.acquire(step)
    ring.scores.wait(step + i)


@T.macro
def of_state(r_x, s, j, state, first, w):
    """Starts the products r_x = X S^T for 64 columns, and does not wait for them.

    X [64, size] is the tile in slot j of `s.tok`, such as Q or dO of a chunk. S is the shared copy
    of h or dS from slot `first` on; r_x gets its columns 64 w to 64 w + 63. There is one wgmma for
    every 64 columns of X.
    """
    for t in T.unroll(s.panels):
        T.wgmma_gemm(
            s.tok[j, :, t * PANEL : t * PANEL + PANEL],
            state[first + t, :, w * PANEL : w * PANEL + PANEL],
            r_x,
            clear_accum=t == 0,
        )


@T.macro
def add_keys(r_sum, r_x, s, turn, j, gate, w):
    tiles.add_scaled(
        r_sum,
        r_x,
        s.gate[gate, FACTORS + j, 0],
        s.turns[turn + min(j, KEY), 0, w * PANEL],
        s.sums[DOTS + 3 * w + j, 0],
    )


@T.macro
def of_keys(r_dq, r_dk, r_x, r_y, s, ring, i, step):
    """Adds panel w of dQi, dKi and dKu to r_dq and r_dk: step 7.

    Each product runs while the result of the one before is scaled and added.
    """
    gate, h = ring.gate.slot(step), ring.h.slot(step)
    w, turn = T.alloc_var("int32"), T.alloc_var("int32")
    w = T.shfl_sync(T.get_thread_binding(1), 0)
    turn = first_tile(i)
    of_state(r_x, s, DO, s.state, h * s.panels, w)  # 7
    ring.vn.wait(step)
    of_state(r_y, s, VN, s.turns, 2 - turn, w)
    T.wait_wgmma(s.panels)
    ring.rows.release(step)
    add_keys(r_dq, r_x, s, turn, DO, gate, w)
    ring.y.wait(step)
    of_state(r_x, s, Y, s.state, h * s.panels, w)
    T.wait_wgmma(s.panels)
    ring.vn.release(step)
    ring.ds.release(step)
    add_keys(r_dk, r_y, s, turn, VN, gate, w)
    T.wait_wgmma(0)
    ring.y.release(step)
    ring.h.release(step)
    add_keys(r_dk, r_x, s, turn, Y, gate, w)
    ring.gate.release(step)


@T.macro
def finish_keys(r_dq, r_dk, s, i, w):
    """Adds dP0 K to panel w of dQ, and dP0^T Q + (F + F^T) K to panel w of dK.

    dP0 and F are the sums over all value heads.
    """
    turn = T.alloc_var("int32")
    turn = first_tile(i)
    T.wgmma_gemm(s.scores[P, :, :], s.turns[turn + KEY, :, w * PANEL : w * PANEL + PANEL], r_dq)
    T.wgmma_gemm(
        s.scores[P, :, :],
        s.turns[turn + QUERY, :, w * PANEL : w * PANEL + PANEL],
        r_dk,
        transpose_A=True,
    )
    T.wgmma_gemm(s.scores[F, :, :], s.turns[turn + KEY, :, w * PANEL : w * PANEL + PANEL], r_dk)
    T.wgmma_gemm(
        s.scores[F, :, :],
        s.turns[turn + KEY, :, w * PANEL : w * PANEL + PANEL],
        r_dk,
        transpose_A=True,
    )
    T.wait_wgmma(0)


@T.macro
def put_rows(dq, dk, r_dq, r_dk, s, ring, at):
    """Writes panel w of a key head's dQ and dK, as far as they have columns.

    They pass through the panel's tiles of V' and Y. A panel without such tiles has two of its own.
    """
    tok0, head, rows, w = at.tok0, at.head, at.rows, at.w
    K, num_heads = s.turns.shape[2], dq.shape[1]
    panel = w * PANEL
    slot, column = (VN, panel) if s.tok.shape[2] >= K else (VN + 2 * w, 0)
    tiles.put_tile(r_dq, s.tok[slot, 0, column])
    tiles.put_tile(r_dk, s.tok[slot + 1, 0, column])
    T.fence_proxy_async()  # dQ and dK: written by threads, read by TMA
    ring.own.sync(w)
    if rows == CHUNK:
        for n, x in enumerate((dq, dk)):
            T.tma_copy(
                s.tok[slot + n, :, column : column + PANEL],
                x[tok0 : tok0 + CHUNK, head, panel : panel + PANEL],
            )
    else:
        first = tok0 * num_heads + head
        for n, x in enumerate((dq, dk)):
            tile = s.tok[slot + n, 0, column]
            tiles.store_rows(tile, x[0, 0, panel], x.shape[2], panel, first, num_heads, rows)


@T.macro
def leave(ring, step):
    """Replaces `of_keys` in a warpgroup without a panel of K: makes the same waits and releases."""
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
    r_dot = T.alloc_local((1,), "float32")  # <dS, S0>
    r_dq = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_dk = T.alloc_fragment((CHUNK, PANEL), "float32")
    at = Variables("w step p_step chunk head tok0 rows")
    at["step"] = 0
    for i in T.serial(walk.num_pairs):
        ring.qk.wait(i)
        T.clear(r_dq)
        T.clear(r_dk)
        for _ in T.serial(walk.group):
            at["w"] = T.shfl_sync(T.get_thread_binding(1), 0)
            if V < K:
                if at.w < V // PANEL:
                    of_values(r_x, r_w, r_dot, s, ring, i, at.step, at.w, K)
                else:
                    arrive(ring, i, at.step, at.w)
            else:
                of_values(r_x, r_w, r_dot, s, ring, i, at.step, at.w, K)
            ring.scores.release(at.step + i)
            if K < V:
                if at.w < K // PANEL:
                    of_keys(r_dq, r_dk, r_x, r_w, s, ring, i, at.step)
                else:
                    leave(ring, at.step)
            else:
                of_keys(r_dq, r_dk, r_x, r_w, s, ring, i, at.step)
            ring.sums.commit(at.step)
            at["step"] += 1
        at["p_step"] = at.step + i
        at["chunk"] = walk.chunk(i)  # looked up while dP0 and F are made
        at["tok0"] = walk.chunks[at.chunk, 0]
        at["rows"] = walk.chunks[at.chunk, 1]
        ring.scores.wait(at.p_step)
        at["w"] = T.shfl_sync(T.get_thread_binding(1), 0)
        if K < V:
            if at.w < K // PANEL:
                finish_keys(r_dq, r_dk, s, i, at.w)
        else:
            finish_keys(r_dq, r_dk, s, i, at.w)
        ring.scores.release(at.p_step)
        ring.qk.release(i)
        ring.vn.acquire(at.step)
        ring.y.acquire(at.step)
        at["head"] = walk.head(i)
        if K < V:
            if at.w < K // PANEL:
                put_rows(dq, dk, r_dq, r_dk, s, ring, at)
        else:
            put_rows(dq, dk, r_dq, r_dk, s, ring, at)
    T.tma_store_wait(0)  # before the CTA ends, and with it its shared memory
