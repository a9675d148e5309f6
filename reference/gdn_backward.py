"""Gradients of the chunked gated delta rule, written out by hand.

Given dO and dS, the gradient of the state S1 that leaves a chunk (names as in `gdn_chunked`):

    dV' = d o (K dS) + P^T dO
    Y   = A^T dV'                            dV = beta o Y
    dS0 = e^gC dS - K^T (e o dV) + Q^T (s e o dO)             dS of the chunk before
    dP  = lower(dO V'^T)                     dP0 = s G o dP                    adjoint of Q K^T
    dA  = lower(dV' (beta o W)^T)            E = -strict_lower(A^T dA A^T)     adjoint of G o L
    F   = beta_i G_ij E_ij                                                     adjoint of K K^T
    dQi = s e o (dO S0^T)    dKi = d o (V' dS^T)    dKu = -e o (dV S0^T)
    dQ  = dQi + dP0 K        dK  = dKi + dKu + dP0^T Q + (F + F^T) K
    dbeta_i = <Y_i, W_i> + sum_j G_ij (K K^T)_ij E_ij
    X = strict_lower(dP o P + E o G o L)
    dgamma = <Q, dQi> + <K, dKu> + rowsum(X) - colsum(X)
    dg_t = sum_{i>=t} dgamma_i + sum_{i<t} <K_i, dKi_i> + e^gC <dS, S0>        within the chunk

Two things keep digits in dg when decay is strong. The diagonal of dP o P would enter both sums of X
and cancel, as the largest term: it is dropped before summing. And gate t is part of d_i only for
i < t: that sum is formed as it stands, not as the sum over all i less the sum over i >= t, which
would take the last row's <K, dKi>, of order 1, away from itself to find a result of order e^g.

dQ and dK of a key head are sums over its group of value heads, taken before the products with K and
Q and before the only rounding.
"""

from typing import NamedTuple

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor
from torch.nn.functional import pad

from .chunks import Chunks, cut, sequence_spans
from .gdn_chunked import (
    Round,
    Tiles,
    attention_in_chunk,
    chain,
    compute_dtype,
    decay_tiles,
    end_states,
    head_groups,
    key_products,
    key_tiles,
    operand_rounding,
    row_tiles,
    start_states,
    value_tiles,
)


class Backward(NamedTuple):
    dq: Tensor  # [B, T, H, K]
    dk: Tensor  # [B, T, H, K]
    dv: Tensor  # [B, T, HV, V]
    dbeta: Tensor  # [B, T, HV]
    dg: Tensor  # [B, T, HV] with respect to the natural-log gate of each token
    dh0: Tensor | None  # [N, HV, K, V]; None without an initial state


class ReverseChain(NamedTuple):
    dh: Tensor  # [n h r k v] dS, the gradient of the state after each chunk
    dv_new: Tensor  # [n h r i v] dV'
    Y: Tensor  # [n h r i v]
    start: Tensor  # [N h r k v] gradient of the state before each sequence


def reverse_chain(
    chunks: Chunks, tiles: Tiles, do_scaled: Tensor, through_P: Tensor, end: Tensor, rounded: Round
) -> ReverseChain:
    """The recurrence for dS, last chunk first; do_scaled is s e o dO, through_P is P^T dO."""
    gradient = end[:0]
    dh, dv_new, Y = [end[:0]], [through_P[:0]], [through_P[:0]]
    steps = chunks.steps(rounded(do_scaled), through_P, *tiles)
    for do_i, through_P_i, q, k, beta, A, _, e, d, last in reversed(steps):
        gradient = torch.cat([gradient, end[len(gradient) : len(k)]])  # sequences that end here
        dh.append(gradient)
        from_state = einsum(k, rounded(gradient), "n h i k, n h r k v -> n h r i v")
        dv_new.append(d * from_state + through_P_i)
        Y.append(A.mT @ rounded(dv_new[-1]))
        overwritten = einsum(k, rounded(e * beta * Y[-1]), "n h i k, n h r i v -> n h r k v")
        read = einsum(q, do_i, "n h i k, n h r i v -> n h r k v")
        gradient = last * gradient - overwritten + read
    start = torch.cat([gradient, end[len(gradient) :]])
    return ReverseChain(torch.cat(dh[::-1]), torch.cat(dv_new[::-1]), torch.cat(Y[::-1]), start)


def chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand_dtype: torch.dtype | None = None,
) -> Backward:
    """Takes g_cum and A as `chunked` returned them; an absent dht is 0.

    `operand_dtype` rounds matrix operands as the kernels do. State gradients are combined in dg as
    their rounded copies, because those are what the kernels store between their passes.
    """
    B, T, H, K = q.shape
    dtype, rounded = compute_dtype(q), operand_rounding(operand_dtype)
    chunks = cut(sequence_spans(B, T, cu_seqlens), chunk_size, q.device)
    groups = head_groups(chunks, q, v)
    if len(groups) > 1:
        parts = [
            chunked_backward(
                q[:, :, keys],
                k[:, :, keys],
                v[:, :, values],
                g_cum[:, :, values],
                beta[:, :, values],
                A[:, :, values],
                do[:, :, values],
                None if dht is None else dht[:, values],
                scale,
                None if initial_state is None else initial_state[:, values],
                cu_seqlens,
                chunk_size,
                operand_dtype,
            )
            for keys, values in groups
        ]
        dh0 = [part.dh0 for part in parts if part.dh0 is not None]
        return Backward(
            dq=torch.cat([part.dq for part in parts], 2),
            dk=torch.cat([part.dk for part in parts], 2),
            dv=torch.cat([part.dv for part in parts], 2),
            dbeta=torch.cat([part.dbeta for part in parts], 2),
            dg=torch.cat([part.dg for part in parts], 2),
            dh0=torch.cat(dh0, 1) if dh0 else None,
        )
    scale = scale if scale is not None else K**-0.5

    # The forward again, up to the states. Past a sequence's end g is 0: gamma keeps its last value.
    v_c, do_c = value_tiles(chunks, v, H, dtype), value_tiles(chunks, do, H, dtype)
    G, e, d, last = decay_tiles(row_tiles(chunks.tiles_held(g_cum, dtype), H))
    tiles = Tiles(
        q=key_tiles(chunks, q, dtype),
        k=key_tiles(chunks, k, dtype),
        beta=row_tiles(chunks.tiles(beta, dtype), H)[..., None],
        A=rounded(value_tiles(chunks, A, H, dtype)),
        G=G,
        e=e,
        d=d,
        last=last,
    )
    run = chain(chunks, tiles, v_c, start_states(initial_state, v_c, chunks, K), rounded)
    P = attention_in_chunk(tiles, scale)
    end = start_states(dht, v_c, chunks, K)
    back = reverse_chain(chunks, tiles, scale * e * do_c, rounded(P).mT @ do_c, end, rounded)

    # Everything below is independent per chunk.
    q_c, k_c, beta_c, A_c = tiles.q, tiles.k, tiles.beta, tiles.A
    h, v_new = rounded(run.h), rounded(run.v_new)
    dh, dv_new, dv = rounded(back.dh), rounded(back.dv_new), rounded(beta_c * back.Y)
    dP = (do_c @ v_new.mT).tril()
    dA = rounded((dv_new @ rounded(beta_c * run.w).mT).tril())
    E = -(rounded(A_c.mT @ dA) @ A_c.mT).tril(-1)
    dQi = scale * e * einsum(do_c, h, "n h r i v, n h r k v -> n h r i k")
    dKi = d * einsum(v_new, dh, "n h r i v, n h r k v -> n h r i k")
    dKu = -e * einsum(dv, h, "n h r i v, n h r k v -> n h r i k")

    dP0 = rounded(group_sum(scale * G * dP))
    F = group_sum(beta_c * G * E)
    dq = group_sum(dQi) + dP0 @ k_c
    dk = group_sum(dKi + dKu) + dP0.mT @ q_c + rounded(F + F.mT) @ k_c

    E_decayed = E * G * key_products(k_c)
    dbeta = (back.Y * run.w).sum(-1) + E_decayed.sum(-1)
    X = (dP * P).tril(-1) + beta_c * E_decayed
    dgamma = row_dots(q_c, dQi) + row_dots(k_c, dKu) + X.sum(-1) - X.sum(-2)
    of_rows_before = pad(row_dots(k_c, dKi)[..., :-1].cumsum(-1), (1, 0))
    of_state = last[..., 0] * reduce(dh * h, "n h r k v -> n h r 1", "sum")
    dg = dgamma.flip(-1).cumsum(-1).flip(-1) + of_rows_before + of_state

    return Backward(
        dq=chunks.tokens(rearrange(dq, "n h i k -> n i h k"), B, T).to(q.dtype),
        dk=chunks.tokens(rearrange(dk, "n h i k -> n i h k"), B, T).to(k.dtype),
        dv=chunks.tokens(rearrange(dv, "n h r i v -> n i (h r) v"), B, T).to(v.dtype),
        dbeta=chunks.tokens(rearrange(dbeta, "n h r i -> n i (h r)"), B, T).to(beta.dtype),
        dg=chunks.tokens(rearrange(dg, "n h r i -> n i (h r)"), B, T),
        dh0=None if initial_state is None else end_states(back.start, chunks),
    )


def group_sum(per_value_head: Tensor) -> Tensor:
    return reduce(per_value_head, "n h r i x -> n h i x", "sum")


def row_dots(x: Tensor, per_value_head: Tensor) -> Tensor:
    return einsum(x, per_value_head, "n h i k, n h r i k -> n h r i")
