"""The parts of wide_grads that write dg and dbeta, and zeros for padding.

wide_grads/__init__.py states the maths and the steps, with the numbers used here.
"""

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chunk_grads.store import sum_over_rows
from qla_kernels.gdn.kernels.chunk_grads.tiles import clear_piece
from qla_kernels.gdn.kernels.wide_grads.layout import (
    PART_DOTS,
    PART_E_KK,
    PART_PANELS,
    PART_STATE,
    PART_X_COLUMNS,
    PART_X_ROWS,
    Y_V,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.loops import rolled


@T.macro
def take_dots(s_dots, slot, r_gamma, before, r_beta, state, with_v):
    """Adds a step's sums: to dgamma, <K, dKi> and dbeta of tokens 2 lane and 2 lane + 1."""
    lane = T.get_thread_binding() % 32
    for e in T.unroll(2):
        if with_v:
            r_beta[e] += s_dots[slot, Y_V, 2 * lane + e]
        for w in T.unroll(PART_PANELS):
            r_gamma[e] += (
                s_dots[slot, PART_DOTS + 4 * w, 2 * lane + e]
                + s_dots[slot, PART_DOTS + 4 * w + 2, 2 * lane + e]
            )
            before[e] += s_dots[slot, PART_DOTS + 4 * w + 1, 2 * lane + e]
            r_beta[e] -= s_dots[slot, PART_DOTS + 4 * w + 3, 2 * lane + e]
    for w in T.unroll(4 * PART_PANELS):
        state[0] += s_dots[slot, PART_STATE, w]


@T.macro
def take_x(s_x, slot, r_gamma, r_beta):
    """Adds the sums of a value head that concern X and E."""
    lane = T.get_thread_binding() % 32
    for e in T.unroll(2):
        r_beta[e] -= s_x[slot, PART_E_KK, 2 * lane + e]
        for j in T.unroll(2):
            r_gamma[e] += s_x[slot, PART_X_ROWS + j, 2 * lane + e]
    for w in rolled(lane // 8, CHUNK // 16):  # a warp has no columns right of its own rows
        for e in T.unroll(2):
            for j in T.unroll(2):
                r_gamma[e] -= s_x[slot, PART_X_COLUMNS + 4 * j + w, 2 * lane + e]


@T.macro
def sums(dg, dbeta, s, ring, walk):
    lane = T.get_thread_binding() % 32
    r_gamma = T.alloc_local((2,), "float32")  # dgamma, then its sum over the rows from this one on
    before = T.alloc_local((2,), "float32")  # <K, dKi>, then its sum over the rows before this one
    r_beta = T.alloc_local((2,), "float32")
    state = T.alloc_local((1,), "float32")
    after, earlier = (T.alloc_var("float32") for _ in range(2))
    step, chunk, head, hv = (T.alloc_var("int32") for _ in range(4))
    tok0, rows = T.alloc_var("int32"), T.alloc_var("int32")
    step = 0
    for i in rolled(walk.num_pairs):
        chunk = walk.chunk(i)
        head = walk.head(i)
        tok0 = walk.chunks[chunk, 0]
        rows = walk.chunks[chunk, 1]
        for r in rolled(walk.group):
            for e in T.unroll(2):
                r_gamma[e] = 0
                before[e] = 0
                r_beta[e] = 0
            state[0] = 0
            for _ in rolled(walk.num_tiles):
                ring.dots.wait(step)
                take_dots(
                    s.dots, ring.dots.slot(step), r_gamma, before, r_beta, state, walk.last_part(i)
                )
                ring.dots.release(step)
                step += 1
            ring.x.wait(i * walk.group + r)
            take_x(s.x, ring.x.slot(i * walk.group + r), r_gamma, r_beta)
            ring.x.release(i * walk.group + r)
            sum_over_rows(r_gamma, before, after, earlier)
            hv = head * walk.group + r
            for e in T.unroll(2):
                if 2 * lane + e < rows:  # 7
                    r_gamma[e] += before[e] + state[0]
                    if walk.part(i) > 0:  # this thread wrote the sums of the parts before
                        r_gamma[e] += dg[tok0 + 2 * lane + e, hv]
                        r_beta[e] += dbeta[tok0 + 2 * lane + e, hv]
                    dg[tok0 + 2 * lane + e, hv] = r_gamma[e]
                    dbeta[tok0 + 2 * lane + e, hv] = r_beta[e]


@T.macro
def clear_padding(dq, dk, dv, dg, dbeta, walk, num_chunks, num_tokens):
    """Writes zeros to the gradients of tokens behind the last chunk; the CTAs share these rows."""
    lane = T.get_thread_binding() % 32
    row, end = T.alloc_var("int32"), T.alloc_var("int32")
    end = 0
    if num_chunks > 0:
        end = walk.chunks[num_chunks - 1, 0] + walk.chunks[num_chunks - 1, 1]
    for j in rolled(T.ceildiv(num_tokens - end - walk.first, walk.stride)):
        row = end + walk.first + j * walk.stride
        for head in rolled(walk.num_heads):
            if walk.parts == 1:  # the size of a row is known to the call alone
                if lane * 8 < dq.shape[2]:
                    clear_piece(dq[row, head, lane * 8])
                    clear_piece(dk[row, head, lane * 8])
            else:
                for e in T.vectorized(8):
                    dq[row, head, lane * 8 + e] = 0
                for e in T.vectorized(8):
                    dk[row, head, lane * 8 + e] = 0
        for hv in rolled(dg.shape[1]):
            for t in rolled(walk.num_tiles):
                for e in T.vectorized(2):
                    dv[row, hv, t, lane * 2 + e] = 0
            if lane == 0:
                dg[row, hv] = 0
                dbeta[row, hv] = 0
