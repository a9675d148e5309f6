"""The parts of chunk_grads that write: the roles `store` and `sums`, and zeros for padding.

chunk_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chunk_grads.layout import (
    DOTS,
    E_KK,
    PANEL,
    STATE,
    X_COLUMNS,
    X_ROWS,
    Y_W,
    find_pair,
)
from qla_kernels.gdn.kernels.chunk_grads.tiles import clear_piece
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.record import Variables


@T.macro
def store(dv, s_v, ring, walk, V):
    lane = T.get_thread_binding() % 32
    lanes = V // 8  # a row in pieces of 16 bytes
    at = Variables("chunk head step tok0 rows")
    for i in rolled(walk.num_pairs):
        find_pair(walk, i, at)
        for r in rolled(walk.group):
            at["step"] = i * walk.group + r
            ring.wait(at.step)
            if at.rows == CHUNK:  # 9
                T.tma_copy(s_v[0, :, :], dv[at.tok0 : at.tok0 + CHUNK, at.head, r, :])
                T.tma_store_wait(0)
            else:
                for piece in rolled(T.ceildiv(at.rows * lanes, 32)):
                    row = piece * (32 // lanes) + lane // lanes
                    if row < at.rows:
                        for e in T.vectorized(8):
                            dv[at.tok0 + row, at.head, r, lane % lanes * 8 + e] = s_v[
                                0, row, lane % lanes * 8 + e
                            ]
            ring.release(at.step)


@T.macro
def sum_over_rows(r_gamma, before, after: "T.Ref", earlier: "T.Ref"):
    """Makes r_gamma a sum from each row on, and `before` one of the rows before; a lane has two."""
    lane = T.get_thread_binding() % 32
    # Sum the other rows only: a total minus the own row would cancel small decayed terms.
    after = r_gamma[0] + r_gamma[1]
    earlier = before[0] + before[1]
    for d in rolled(5):
        above = T.shfl_down(after, 1 << d)
        below = T.shfl_up(earlier, 1 << d)
        if lane + (1 << d) < 32:
            after += above
        if lane >= 1 << d:
            earlier += below
    after = T.shfl_down(after, 1)
    earlier = T.shfl_up(earlier, 1)
    if lane == 31:
        after = 0
    if lane == 0:
        earlier = 0
    r_gamma[1] += after
    r_gamma[0] += r_gamma[1]
    before[1] = earlier + before[0]
    before[0] = earlier


@T.macro
def sums(dg, dbeta, s_sums, ring, walk, K, V):
    lane = T.get_thread_binding() % 32
    r_gamma = T.alloc_local((2,), "float32")  # dgamma, then its sum over the rows from this one on
    before = T.alloc_local((2,), "float32")  # <K, dKi>, then its sum over the rows before this one
    r_beta = T.alloc_local((2,), "float32")
    state, after, earlier = (T.alloc_var("float32") for _ in range(3))
    at = Variables("chunk head step tok0 rows")
    for i in rolled(walk.num_pairs):
        find_pair(walk, i, at)
        for r in rolled(walk.group):
            at["step"] = i * walk.group + r
            ring.wait(at.step)
            for e in T.unroll(2):
                r_beta[e] = -s_sums[E_KK, 2 * lane + e]
                for w in T.unroll(V // PANEL):
                    r_beta[e] += s_sums[Y_W + w, 2 * lane + e]
                r_gamma[e] = s_sums[X_ROWS, 2 * lane + e] + s_sums[X_ROWS + 1, 2 * lane + e]
                before[e] = 0
                for w in T.unroll(K // PANEL):
                    r_gamma[e] += (
                        s_sums[DOTS + 3 * w, 2 * lane + e] + s_sums[DOTS + 3 * w + 2, 2 * lane + e]
                    )
                    before[e] += s_sums[DOTS + 3 * w + 1, 2 * lane + e]
            for w in rolled(lane // 8, CHUNK // 16):  # a warp has no columns right of its own rows
                for e in T.unroll(2):
                    r_gamma[e] -= (
                        s_sums[X_COLUMNS + w, 2 * lane + e]
                        + s_sums[X_COLUMNS + 4 + w, 2 * lane + e]
                    )
            state = 0
            for w in T.unroll(4 * (V // PANEL)):
                state += s_sums[STATE, w]
            ring.release(at.step)
            sum_over_rows(r_gamma, before, after, earlier)
            for e in T.unroll(2):
                if 2 * lane + e < at.rows:  # 10
                    dg[at.tok0 + 2 * lane + e, at.head, r] = r_gamma[e] + before[e] + state
                    dbeta[at.tok0 + 2 * lane + e, at.head, r] = r_beta[e]


@T.macro
def clear_padding(dq, dk, dv, dg, dbeta, walk, num_chunks, num_tokens, V):
    """Writes zeros to the gradients of tokens behind the last chunk; the CTAs share these rows."""
    lane = T.get_thread_binding() % 32
    row, end = T.alloc_var("int32"), T.alloc_var("int32")
    end = 0
    if num_chunks > 0:
        end = walk.chunks[num_chunks - 1, 0] + walk.chunks[num_chunks - 1, 1]
    for j in rolled(T.ceildiv(num_tokens - end - walk.first, walk.stride)):
        row = end + walk.first + j * walk.stride
        for head in rolled(walk.num_heads):
            if lane < dq.shape[2] // 8:
                clear_piece(dq[row, head, lane * 8])
                clear_piece(dk[row, head, lane * 8])
            for r in rolled(walk.group):
                if lane < V // 8:
                    for e in T.vectorized(8):
                        dv[row, head, r, lane * 8 + e] = 0
                if lane == 0:
                    dg[row, head, r] = 0
                    dbeta[row, head, r] = 0
