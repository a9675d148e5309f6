"""The gated delta rule in chunks of C tokens: the algorithm the kernels follow.

Per chunk and value head, rows are tokens, S0 and S1 are the states that enter and leave:

    gamma_i = sum_{j<=i} g_j     gC = gamma_last     e = e^gamma     d = e^(gC - gamma)
    G_ij = e^(gamma_i - gamma_j) for i >= j, else 0
    L  = strict_lower(diag(beta) K K^T)
    A  = (I + G o L)^-1                 gate first, then solve
    W  = V - e o (K S0)
    V' = A (beta o W)                   the corrected values
    P  = s G o (Q K^T)
    O  = s e o (Q S0) + P V'
    S1 = e^gC S0 + K^T (d o V')

A equals G o (I + L)^-1 in exact arithmetic. Gating first keeps the range: with |k|^2 = 128 and
g = -2 the gate-free inverse overflows fp32, the gated one does not. Each exponent is a difference
of cumulated gates, at most 0 when g is, so nothing overflows and no maximum needs subtracting.

Only W, V' and S1 wait for the chunk before (`chain`); all else is batched over all chunks at once.
Axes: n chunk, h key head, r value head of that key head's group, i and j token rows, k, v. A key
head is not repeated for its group: its products with the group's r tiles are one matrix product.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from .chunks import Chunks, cut, sequence_spans

# The least natural log gate of a token: a decay of 2^-200, which is 0 in fp32. It makes g = -inf
# legal and keeps |gamma| small enough for differences of cumulated gates to keep their digits.
MIN_GATE = -200 * math.log(2)

# About the largest temporary. On a CPU, glibc returns allocations above 32 MiB to the system when
# freed, and a pack of 300 short sequences then takes two to three times as long, in page faults.
# On a GPU small temporaries mean many launches, which is what takes the time there.
TEMPORARY_BYTES = {"cpu": 16 * 2**20, "cuda": 2**30}

Round = Callable[[Tensor], Tensor]


class Forward(NamedTuple):
    g_cum: Tensor  # [B, T, HV] gamma, natural log
    A: Tensor  # [B, T, HV, C] row t is its chunk's row
    o: Tensor  # [B, T, HV, V]
    h: Tensor  # [B, NC / B, HV, K, V] state before each chunk
    final_state: Tensor  # [N, HV, K, V]


class Tiles(NamedTuple):
    """What a chunk's tokens contribute, before any state is known."""

    q: Tensor  # [n h i k]
    k: Tensor  # [n h i k]
    beta: Tensor  # [n h r i 1]
    A: Tensor  # [n h r i j] gated inverse, rounded as an operand
    G: Tensor  # [n h r i j]
    e: Tensor  # [n h r i 1]
    d: Tensor  # [n h r i 1]
    last: Tensor  # [n h r 1 1] e^gC


class Chain(NamedTuple):
    h: Tensor  # [n h r k v] state before each chunk
    w: Tensor  # [n h r i v]
    v_new: Tensor  # [n h r i v] V'
    final: Tensor  # [N h r k v] state after each sequence, in the order of the start states


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def operand_rounding(dtype: torch.dtype | None) -> Round:
    """What happens to an operand of a matrix product: nothing, or one rounding to a 16-bit type."""
    if dtype is None:
        return lambda x: x
    return lambda x: x.to(dtype).to(x.dtype)


def key_tiles(chunks: Chunks, x: Tensor, dtype: torch.dtype) -> Tensor:
    return rearrange(chunks.tiles(x, dtype), "n i h k -> n h i k").contiguous()


def value_tiles(chunks: Chunks, x: Tensor, num_key_heads: int, dtype: torch.dtype) -> Tensor:
    tile = chunks.tiles(x, dtype)
    return rearrange(tile, "n i (h r) v -> n h r i v", h=num_key_heads).contiguous()


def row_tiles(x: Tensor, num_key_heads: int) -> Tensor:
    return rearrange(x, "n i (h r) -> n h r i", h=num_key_heads)


def decay_tiles(gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """G, e, d and e^gC from the cumulated gates of each chunk."""
    difference = gamma[..., :, None] - gamma[..., None, :]
    above = torch.ones_like(difference, dtype=torch.bool).triu(1)
    G = difference.masked_fill(above, -math.inf).exp()
    total = gamma[..., -1:]
    return G, gamma.exp()[..., None], (total - gamma).exp()[..., None], total.exp()[..., None]


def key_products(k: Tensor) -> Tensor:
    """K K^T strictly below the diagonal, [n h 1 i j]."""
    return einsum(k, k, "n h i k, n h j k -> n h i j").tril(-1)[:, :, None]


def gated_inverse(k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
    """A = (I + G o L)^-1, L = strict_lower(diag(beta) K K^T)."""
    eye = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    system = eye + G * (beta * key_products(k))
    A: Tensor = torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )
    return A


def forward_tiles(
    chunks: Chunks, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, rounded: Round
) -> tuple[Tiles, Tensor]:
    """The tiles, and gamma [n h r i]."""
    dtype, H = compute_dtype(q), q.shape[2]
    q_c, k_c = key_tiles(chunks, q, dtype), key_tiles(chunks, k, dtype)
    beta_c = row_tiles(chunks.tiles(beta, dtype), H)[..., None]
    gamma = row_tiles(chunks.tiles(g, dtype), H).clamp(min=MIN_GATE).cumsum(-1)
    G, e, d, last = decay_tiles(gamma)
    return Tiles(q_c, k_c, beta_c, rounded(gated_inverse(k_c, beta_c, G)), G, e, d, last), gamma


def start_states(initial_state: Tensor | None, like: Tensor, chunks: Chunks, K: int) -> Tensor:
    """[N, HV, K, V] or None -> [N h r k v], longest sequence first; `like` is a value tile."""
    _, h, r, _, V = like.shape
    if initial_state is None:
        return like.new_zeros(len(chunks.longest_first), h, r, K, V)
    state = initial_state.to(like.dtype)[chunks.longest_first]
    return rearrange(state, "n (h r) k v -> n h r k v", h=h)


def end_states(state: Tensor, chunks: Chunks) -> Tensor:
    """[N h r k v], longest sequence first -> [N, HV, K, V] in the caller's order."""
    return rearrange(state, "n h r k v -> n (h r) k v")[torch.argsort(chunks.longest_first)]


def chain(chunks: Chunks, tiles: Tiles, v: Tensor, start: Tensor, rounded: Round) -> Chain:
    """The recurrence over chunks. d o V' is rounded from V' itself, never from its rounded copy."""
    state, ended = start, [start[:0]]
    h, w, v_new = [start[:0]], [v[:0]], [v[:0]]
    for v_i, _, k, beta, A, _, e, d, last in chunks.steps(v, *tiles):
        ended.append(state[len(k) :])
        state = state[: len(k)]
        h.append(state)
        w.append(v_i - e * einsum(k, rounded(state), "n h i k, n h r k v -> n h r i v"))
        v_new.append(A @ rounded(beta * w[-1]))
        update = einsum(k, rounded(d * v_new[-1]), "n h i k, n h r i v -> n h r k v")
        state = last * state + update
    final = torch.cat([state, *reversed(ended)])
    return Chain(torch.cat(h), torch.cat(w), torch.cat(v_new), final)


def attention_in_chunk(tiles: Tiles, scale: float) -> Tensor:
    """P = s G o (Q K^T)."""
    return scale * tiles.G * einsum(tiles.q, tiles.k, "n h i k, n h j k -> n h i j")[:, :, None]


def outputs(tiles: Tiles, run: Chain, scale: float, rounded: Round) -> Tensor:
    """O = s e o (Q S0) + P V'."""
    from_state = einsum(tiles.q, rounded(run.h), "n h i k, n h r k v -> n h r i v")
    in_chunk = rounded(attention_in_chunk(tiles, scale)) @ rounded(run.v_new)
    return rounded(scale * tiles.e * from_state + in_chunk)


def head_groups(chunks: Chunks, q: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Key heads, and their value heads, to work on at a time.

    Heads are independent; taking a few at a time bounds the memory that long inputs need.
    """
    H, K, HV, V = *q.shape[2:], *v.shape[2:]
    num_chunks, C = chunks.rows.shape
    elements = num_chunks * (HV // H) * max(K * V, C * K, C * V, C * C)  # of one key head
    room = TEMPORARY_BYTES[q.device.type]
    size = max(1, room // max(1, elements * compute_dtype(q).itemsize))
    starts = range(0, H, size)
    return [(slice(i, i + size), slice(i * (HV // H), (i + size) * (HV // H))) for i in starts]


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    operand_dtype: torch.dtype | None = None,
) -> Forward:
    """q, k [B,T,H,K]; v [B,T,HV,V]; g (natural log), beta [B,T,HV]; initial_state [N,HV,K,V].

    Computes in fp64 when q is fp64, else in fp32. `operand_dtype` rounds the operands of every
    matrix product to that type, as the kernels do: S, beta o W, A, P, V', d o V'; and the output.
    """
    B, T, H, K = q.shape
    rounded = operand_rounding(operand_dtype)
    chunks = cut(sequence_spans(B, T, cu_seqlens), chunk_size, q.device)
    groups = head_groups(chunks, q, v)
    if len(groups) > 1:
        parts = [
            chunked(
                q[:, :, keys],
                k[:, :, keys],
                v[:, :, values],
                g[:, :, values],
                beta[:, :, values],
                scale,
                None if initial_state is None else initial_state[:, values],
                cu_seqlens,
                chunk_size,
                operand_dtype,
            )
            for keys, values in groups
        ]
        return Forward(
            g_cum=torch.cat([part.g_cum for part in parts], 2),
            A=torch.cat([part.A for part in parts], 2),
            o=torch.cat([part.o for part in parts], 2),
            h=torch.cat([part.h for part in parts], 2),
            final_state=torch.cat([part.final_state for part in parts], 1),
        )

    tiles, gamma = forward_tiles(chunks, q, k, g, beta, rounded)
    v_c = value_tiles(chunks, v, H, compute_dtype(q))
    run = chain(chunks, tiles, v_c, start_states(initial_state, v_c, chunks, K), rounded)
    o = outputs(tiles, run, scale if scale is not None else K**-0.5, rounded)

    h = rearrange(chunks.in_sequence_order(run.h), "n h r k v -> n (h r) k v")
    num_chunks = len(h) // B if B else 0  # of one batch row
    return Forward(
        g_cum=chunks.tokens(rearrange(gamma, "n h r i -> n i (h r)"), B, T),
        A=chunks.tokens(rearrange(tiles.A, "n h r i j -> n i (h r) j"), B, T).to(q.dtype),
        o=chunks.tokens(rearrange(o, "n h r i v -> n i (h r) v"), B, T).to(q.dtype),
        h=h.reshape(B, num_chunks, *h.shape[1:]).to(q.dtype),
        final_state=end_states(run.final, chunks),
    )
