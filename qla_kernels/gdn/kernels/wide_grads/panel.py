"""The panel warpgroups of wide_grads: steps 3 to 5.

wide_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import SCALE_E, D
from qla_kernels.gdn.kernels.chunk_grads.layout import (
    DO,
    KEY,
    PANEL,
    QUERY,
    ROW_E,
    ROW_MINUS_BETA_E,
    VN,
    F,
    P,
    Y,
)
from qla_kernels.gdn.kernels.chunk_grads.tiles import (
    add_scaled,
    put_number,
    put_tile,
    store_rows,
    tile_dot,
)
from qla_kernels.gdn.kernels.wide_grads.layout import (
    ENTERS,
    LEAVES,
    PART,
    PART_DOTS,
    PART_STATE,
    Y_V,
)
from qla_kernels.gdn.kernels.wide_grads.part_tiles import add_twice_scaled, put_row_dots
from qla_kernels.tile.constants import CHUNK


def own_panel():
    """Returns the number of this warpgroup's panel.

    It is recomputed by a shuffle at each use: kept in a register over the loops, it and descriptors
    made of it would take registers that accumulators need.
    """
    return T.shfl_sync(T.get_thread_binding(1), 0)


@T.macro
def multiply(s, slot, x, state, w, r_x):
    """Starts r_x = X S^T for panel w of S, with X and S by their numbers in the slot."""
    T.wgmma_gemm(
        s.tok[3 * slot + x, :, :],
        s.state[2 * slot + state, :, w * PANEL : w * PANEL + PANEL],
        r_x,
        clear_accum=True,
    )


@T.macro
def add_keys(r_sum, r_x, s, of, row, key, gate, dots, w, dot):
    """Adds a row of gates times r_x to r_sum; `of` is the slot of q and k, `dots` that of sums."""
    add_scaled(
        r_sum,
        r_x,
        s.gate[gate, row, 0],
        s.qk[2 * of + key, 0, w * PANEL],
        s.dots[dots, PART_DOTS + 4 * w + dot, 0],
    )


@T.macro
def add_step(r_dq, r_dk, r_x, r_y, r_dot, s, ring, of, gate, step, with_v):
    """Adds dQi, dKi and dKu of 64 columns of V to panel w of r_dq and r_dk: steps 3 and 4.

    Each product runs while the result of the one before is scaled and added.
    """
    w, slot, dots = (T.alloc_var("int32") for _ in range(3))
    w = own_panel()
    slot = ring.rows.slot(step)
    dots = ring.dots.slot(step)
    ring.rows.wait(step)
    multiply(s, slot, DO, ENTERS, w, r_x)  # 3
    multiply(s, slot, VN, LEAVES, w, r_y)
    ring.dots.acquire(step)
    T.wait_wgmma(1)
    add_keys(r_dq, r_x, s, of, SCALE_E, QUERY, gate, dots, w, 0)
    multiply(s, slot, Y, ENTERS, w, r_x)
    T.wait_wgmma(1)
    add_keys(r_dk, r_y, s, of, D, KEY, gate, dots, w, 1)
    tile_dot(
        r_dot,
        s.state[2 * slot + ENTERS, 0, 0],
        s.state[2 * slot + LEAVES, 0, 0],
        PART // 2 * PANEL,
        w,
    )
    T.wait_wgmma(0)
    add_twice_scaled(
        r_dk,
        r_x,
        s.gate[gate, ROW_MINUS_BETA_E, 0],
        s.gate[gate, ROW_E, 0],
        s.qk[2 * of + KEY, 0, w * PANEL],
        s.dots[dots, PART_DOTS + 4 * w + 2, 0],
        s.dots[dots, PART_DOTS + 4 * w + 3, 0],
    )
    put_number(r_dot, s.gate[gate, ROW_E, CHUNK - 1], s.dots[dots, PART_STATE, 4 * w])
    if with_v:
        put_row_dots(  # 4
            s.tok[3 * slot + Y, 0, 0], s.v[slot, 0, 0], s.dots[dots, Y_V, 0], w
        )
    ring.rows.release(step)
    ring.dots.commit(step)


@T.macro
def finish_keys(r_dq, r_dk, s, of):
    """Adds dP0 K to panel w of dQ, and dP0^T Q + (F + F^T) K to panel w of dK.

    dP0 and F are the sums over all value heads.
    """
    w = T.alloc_var("int32")
    w = own_panel()
    T.wgmma_gemm(s.scores[P, :, :], s.qk[2 * of + KEY, :, w * PANEL : w * PANEL + PANEL], r_dq)  # 5
    T.wgmma_gemm(
        s.scores[P, :, :],
        s.qk[2 * of + QUERY, :, w * PANEL : w * PANEL + PANEL],
        r_dk,
        transpose_A=True,
    )
    T.wgmma_gemm(s.scores[F, :, :], s.qk[2 * of + KEY, :, w * PANEL : w * PANEL + PANEL], r_dk)
    T.wgmma_gemm(
        s.scores[F, :, :],
        s.qk[2 * of + KEY, :, w * PANEL : w * PANEL + PANEL],
        r_dk,
        transpose_A=True,
    )
    T.wait_wgmma(0)


@T.macro
def put_rows(dq, dk, r_dq, r_dk, s, ring, of, tok0, head, k0, rows):
    """Writes panel w of a key head's dQ and dK, by way of the same panel of q and k.

    Nothing else reads that panel any more: the score warpgroup has made dP0 and F.
    """
    w = T.alloc_var("int32")
    w = own_panel()
    put_tile(r_dq, s.qk[2 * of + QUERY, 0, w * PANEL])
    put_tile(r_dk, s.qk[2 * of + KEY, 0, w * PANEL])
    T.fence_proxy_async()  # dQ and dK: written by threads, read by TMA
    ring.own.sync(w)
    if rows == CHUNK:
        for n, x in enumerate((dq, dk)):
            T.tma_copy(
                s.qk[2 * of + n, :, w * PANEL : w * PANEL + PANEL],
                x[tok0 : tok0 + CHUNK, head, k0 + w * PANEL : k0 + w * PANEL + PANEL],
            )
    else:
        for n, x in enumerate((dq, dk)):
            store_rows(
                s.qk[2 * of + n, 0, w * PANEL],
                x[0, 0, k0 + w * PANEL],
                x.shape[2],
                k0 + w * PANEL,
                tok0 * x.shape[1] + head,
                x.shape[1],
                rows,
            )


@T.macro
def panel(dq, dk, s, ring, walk):
    r_x = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_y = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_dot = T.alloc_local((1,), "float32")  # <dS, S0>
    r_dq = T.alloc_fragment((CHUNK, PANEL), "float32")
    r_dk = T.alloc_fragment((CHUNK, PANEL), "float32")
    step, gate_step, of = (T.alloc_var("int32") for _ in range(3))
    chunk, head, tok0, rows = (T.alloc_var("int32") for _ in range(4))
    step = 0
    gate_step = 0
    for i in T.serial(walk.num_pairs):
        chunk = walk.chunk(i)
        head = walk.head(i)
        tok0 = walk.chunks[chunk, 0]
        rows = walk.chunks[chunk, 1]
        of = T.shfl_sync(ring.qk.slot(i), 0)
        ring.qk.wait(i)
        T.clear(r_dq)
        T.clear(r_dk)
        for r in T.serial(walk.group):
            ring.gate.wait(gate_step)
            for t in T.serial(walk.num_tiles):
                add_step(
                    r_dq, r_dk, r_x, r_y, r_dot, s, ring, of, ring.gate.slot(gate_step), step,
                    walk.last_part(i),
                )  # fmt: skip
                step += 1
                if (r == 0) & (t == 0) & (i > 0):  # dQ and dK of the pass before have been sent
                    T.tma_store_wait(0)
                    ring.qk.release(i - 1)
            ring.gate.release(gate_step)
            gate_step += 1
        ring.scores.wait(i)
        finish_keys(r_dq, r_dk, s, of)
        ring.scores.release(i)
        put_rows(dq, dk, r_dq, r_dk, s, ring, of, tok0, head, walk.part(i) * PART, rows)
    T.tma_store_wait(0)  # before the CTA ends, and with it its shared memory
