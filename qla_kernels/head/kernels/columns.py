"""A lane's columns of a row of logits: loaded, scaled and capped."""

import qla_kernels.tile.language as T
from qla_kernels.head.shapes import BIAS, PIECE

SPAN = 32 * PIECE  # columns that a warp covers at a time
NOTHING = -1e30  # a maximum before the first column: finite, so that a difference is never NaN
LEAST = -1e4  # a logarithm of which 2^x is 0 already; keeps 0 x (-inf) from being NaN


@T.macro
def capped(z, top2, curve):
    """Sets z to x in base 2: top2 z, or with a cap top2 tanh(z curve / (2 log2 e))."""
    if curve != 0:
        z[0] = top2 * (1.0 - 2.0 / (1.0 + T.exp2(z[0] * curve)))
    else:
        z[0] = top2 * z[0]


@T.macro
def one_column(logits, bias, r_z, row, column, flags, top2, curve):
    """Sets r_z[0] to x of one column, in base 2."""
    r_z[0] = logits[row, T.truncdiv(column, PIECE), column % PIECE]
    if (flags & BIAS) != 0:
        r_z[0] += bias[column]
    capped(r_z, top2, curve)


@T.macro
def load_columns(logits, bias, r_x, row, begin, num_columns, flags, top2, curve):
    """Loads x of a lane's pieces, in base 2: piece i is at begin + i SPAN; past the end -inf."""
    ahead = r_x.shape[0]
    lane = T.get_thread_binding() % 32
    for i in T.unroll(ahead):
        if begin + i * SPAN + lane * PIECE < num_columns:
            for e in T.vectorized(PIECE):
                r_x[i, e] = logits[row, T.truncdiv(begin + i * SPAN, PIECE) + lane, e]
        else:
            for e in T.unroll(PIECE):
                r_x[i, e] = 0.0
    if (flags & BIAS) != 0:
        for i in T.unroll(ahead):
            for e in T.unroll(PIECE):
                r_x[i, e] += bias[T.min(begin + i * SPAN + lane * PIECE + e, num_columns - 1)]
    if curve != 0:
        for i in T.unroll(ahead):
            for e in T.unroll(PIECE):
                r_x[i, e] = 1.0 - 2.0 / (1.0 + T.exp2(r_x[i, e] * curve))
    for i in T.unroll(ahead):
        for e in T.unroll(PIECE):
            r_x[i, e] = T.if_then_else(
                begin + i * SPAN + lane * PIECE + e < num_columns,
                r_x[i, e] * top2,
                -T.infinity("float32"),
            )
