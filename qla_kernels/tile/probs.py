"""Probabilities again from the log of their sum, and the gradient of scores: a backward's softmax.

Tiles are fp32 accumulators, [queries, keys] or transposed. `lse2` and `delta` say where a pair's
row statistics lie, as functions of the tile's two indices, e.g. `lambda i, j: s_lse2[slot, j]`, and
`hidden` which pairs do not see each other. Base 2, as `qla_kernels.attn.kernels.delta` makes lse2.

A tile that has hidden pairs clears them, of P and where they could be NaN of dS too: a branch for
few tiles. It had better stand between probs_from_lse and the wait for dP: ptxas lifts that wait
above the exponentials, which dP's product is to run under, unless a branch is between them.
"""

import tilelang.language as T


@T.macro
def probs_from_lse(r_s, lse2, scale2):
    """S -> P = exp2(scale2 S - lse2), scale2 = scale log2(e)."""
    for i, j in T.Parallel(*r_s.shape):
        r_s[i, j] = T.exp2(r_s[i, j] * scale2 - lse2(i, j))


@T.macro
def ds_from_dp(r_dp, r_p, delta):
    """dP -> dS = P (dP - delta)."""
    for i, j in T.Parallel(*r_dp.shape):
        r_dp[i, j] = r_p[i, j] * (r_dp[i, j] - delta(i, j))


@T.macro
def clear_hidden(r_x, hidden):
    """P or dS is 0 where hidden, even if it is NaN."""
    for i, j in T.Parallel(*r_x.shape):
        if hidden(i, j):
            r_x[i, j] = 0
