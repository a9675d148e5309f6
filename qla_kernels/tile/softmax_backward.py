"""Macros for the softmax of a backward: P from the saved LSE, and the gradient dS of the scores.

Tiles are fp32 accumulators, [queries, keys] or transposed. `lse2` and `delta` are functions of a
tile's two indices that return a pair's row statistics, e.g. `lambda i, j: s_lse2[slot, j]`.
`hidden` is such a function that is true if the query does not see the key. LSEs are in base 2, as
`qla_kernels.attn.kernels.delta` makes them.

A tile with hidden pairs clears them in P, and in dS as well if they could be NaN there. Few tiles
need this, so it is under a branch. The branch should be between probs_from_lse and the wait for dP:
without a branch there, ptxas moves the wait above the exponentials, which then no longer overlap
with the product dP.
"""

import qla_kernels.tile.language as T


@T.macro
def probs_from_lse(r_s, lse2, scale2):
    """Replaces S in r_s by P = exp2(scale2 S - lse2), with scale2 = scale log2(e)."""
    for i, j in T.Parallel(*r_s.shape):
        r_s[i, j] = T.exp2(r_s[i, j] * scale2 - lse2(i, j))


@T.macro
def ds_from_dp(r_dp, r_p, delta):
    """Replaces dP in r_dp by dS = P (dP - delta)."""
    for i, j in T.Parallel(*r_dp.shape):
        r_dp[i, j] = r_p[i, j] * (r_dp[i, j] - delta(i, j))


@T.macro
def clear_hidden(r_x, hidden):
    """Sets P or dS to 0 for hidden pairs, also where it is NaN."""
    for i, j in T.Parallel(*r_x.shape):
        if hidden(i, j):
            r_x[i, j] = 0
