"""What every function of the package means, in fp64 and in the obvious way.

Nothing here imports the package or `reference/`. Sums over tokens are loops or dense masks, so all
of it is slow, short, and differentiable by autograd. Shapes: T tokens, H query or key heads, HV
value heads, K and V or D head sizes, N sequences.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = BLOCK = 64  # tokens: of the gated delta rule's chunks, of a sparse mask's blocks


def unit_rows(x: Tensor) -> Tensor:
    """Divided by the L2 norm over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gate(x: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias); x [.., HV]."""
    z = x if dt_bias is None else x + dt_bias
    softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    return -A_log.exp() * softplus


class Rule(NamedTuple):
    o: Tensor  # [B, T, HV, V]; 0 for tokens of no sequence
    final: Tensor  # [N, HV, K, V]
    chunks: Tensor  # [B, chunks, HV, K, V] the state before each 64 tokens of each sequence


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    h0: Tensor | None,
    bounds: Sequence[int] | None,
    left: Tensor | None = None,
) -> Rule:
    """Token by token: S <- e^g S;  S <- S + k (beta (v - k^T S))^T;  o = scale S^T q.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV]; beta [B, T, HV] or [B, T, HV, V]. With bounds
    B is 1, and sequence n has the tokens bounds[n] to bounds[n + 1]; else each row is a sequence.
    `left` [B, chunks, HV, K, V] is 0, or what a chunk leaves by mistake of the state it was given,
    as a part of it: one that adds up what its tokens take away does so to rounding.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    beta = beta if beta.dim() == 4 else beta[..., None]
    zero = q.new_zeros(B, HV, K, V)
    o, final, chunks = [], [], []
    for n, (start, end) in enumerate(pairwise([0, T] if bounds is None else bounds)):
        S = zero
        if h0 is not None:
            S = h0 if bounds is None else h0[n : n + 1]
        for t in range(start, end):
            if (t - start) % CHUNK == 0:
                decay = 0
                chunks.append(S)
            decay = decay + g[:, t]
            S = g[:, t].exp()[..., None, None] * S
            read = (k[:, t, :, :, None] * S).sum(-2)
            S = S + k[:, t, :, :, None] * (beta[:, t] * (v[:, t] - read))[..., None, :]
            o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
            if left is not None and (t + 1 == end or (t + 1 - start) % CHUNK == 0):
                S = S + left[:, len(chunks) - 1] * decay.exp()[..., None, None] * chunks[-1]
        final.append(S)
    o += [v.new_zeros(B, HV, V)] * (T - len(o))
    return Rule(
        torch.stack(o, 1) if o else v.new_zeros(B, T, HV, V),
        torch.cat(final) if final else zero[:0],
        torch.stack(chunks, 1) if chunks else q.new_zeros(B, 0, HV, K, V),
    )


def paths(sizes: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens before each node's first in its sequences, in order."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    before: list[list[int]] = []
    for parent in parents:
        own = [] if parent < 0 else list(range(starts[parent], starts[parent + 1]))
        before.append([] if parent < 0 else before[parent] + own)
    return before


def tree_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], parents: Sequence[int]
) -> Tensor:
    """z_t = b + sum_j w_j x of the j-th token before t on its path; x [T, C], weight [C, W]."""
    z, start = [x[:0]], 0
    for size, before in zip(sizes, paths(sizes, parents), strict=True):
        for t in range(start, start + size):
            path = [*before, *range(start, t + 1)][-weight.shape[1] :]
            row = (weight[:, -len(path) :] * x[path].T).sum(1)
            z.append((row if bias is None else row + bias)[None])
        start += size
    return torch.cat(z)


def unit_heads(y: Tensor, heads: tuple[int, int] | None) -> Tensor:
    """y [T, C] whose first channels are divided by the norms of their heads."""
    count, size = heads or (0, 1)
    parts = [
        y[:, a : a + size] / (y[:, a : a + size] ** 2).sum(1, keepdim=True).add(1e-6).sqrt()
        for a in range(0, count * size, size)
    ]
    return torch.cat([*parts, y[:, count * size :]], 1)


def gated_delta_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    sizes: Sequence[int],
    parents: Sequence[int],
    left: Tensor | None = None,
) -> Rule:
    """`gated_delta_rule` node by node, each from its parent's end; final states are the leaves'.

    An empty node hands on its parent's state, and is no leaf. `left` is of all nodes' chunks.
    """
    done: list[Rule] = []
    start = chunk = 0
    for size, parent in zip(sizes, parents, strict=True):
        rows, chunks = slice(start, start + size), -(-size // CHUNK)
        own = None if left is None else left[:, chunk : chunk + chunks]
        h0 = None if parent < 0 else done[parent].final
        parts = (x[:, rows] for x in (q, k, v, g, beta))
        done.append(gated_delta_rule(*parts, scale, h0, [0, size], own))
        start, chunk = start + size, chunk + chunks
    inner, alive = set(), [size > 0 for size in sizes]
    for node, parent in enumerate(parents):
        while alive[node] and parent >= 0:
            inner.add(parent)
            parent = parents[parent]
    leaves = [one.final for n, one in enumerate(done) if alive[n] and n not in inner]
    nothing = gated_delta_rule(*(x[:, :0] for x in (q, k, v, g, beta)), scale, None, [0])
    return Rule(
        torch.cat([nothing.o, *(one.o for one in done)], 1),
        torch.cat([nothing.final, *leaves]),
        torch.cat([nothing.chunks, *(one.chunks for one in done)], 1),
    )


def chunk_bounds(tokens: int, bounds: Sequence[int] | None) -> list[tuple[int, int]]:
    """Where each chunk of each sequence begins and ends."""
    sequences = pairwise([0, tokens] if bounds is None else bounds)
    return [(t, min(t + CHUNK, end)) for a, end in sequences for t in range(a, end, CHUNK)]


def cumulated(g: Tensor, bounds: Sequence[int] | None) -> Tensor:
    """Gates summed within each chunk; 0 for tokens of no sequence."""
    total = torch.zeros_like(g)
    for start, end in chunk_bounds(g.shape[1], bounds):
        total[:, start:end] = g[:, start:end].cumsum(1)
    return total


def chunk_inverse(k: Tensor, g_cum: Tensor, beta: Tensor, bounds: Sequence[int] | None) -> Tensor:
    """Rows of (I + tril(beta decay k k^T, -1))^-1 of each chunk, [B, T, HV, 64]."""
    B, T, HV = beta.shape
    k = k.repeat_interleave(HV // k.shape[2], 2)
    A = k.new_zeros(B, T, HV, CHUNK)
    for start, end in chunk_bounds(T, bounds):
        keys, total, weight = (x[:, start:end].transpose(1, 2) for x in (k, g_cum, beta))
        decay = (total[..., :, None] - total[..., None, :]).tril().exp()
        system = (weight[..., None] * decay * (keys @ keys.mT)).tril(-1)
        inverse = torch.linalg.inv(torch.eye(end - start, dtype=k.dtype) + system)
        A[:, start:end, :, : end - start] = inverse.transpose(1, 2)
    return A


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, off: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over what a mask [H or 1, Tq, T] shows: q [Tq, H, D], k and v [T, Hk, D].

    Returns o [Tq, H, D] and the log-sum-exp [H, Tq]; of a row that sees nothing 0 and -inf. `off`
    [H, Tq, T] is 0, or by how much scores are off, in parts of the sum of their terms' sizes.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    S = scale * torch.einsum("qhd,khd->hqk", q, k)
    if off is not None:
        S = S + off * scale * torch.einsum("qhd,khd->hqk", q.detach().abs(), k.detach().abs())
    S = S.masked_fill(~mask, -math.inf)
    blind = ~mask.any(-1)
    lse = S.masked_fill(blind[..., None], 0).logsumexp(-1).masked_fill(blind, -math.inf)
    P = torch.where(mask, (S - lse.masked_fill(blind, 0)[..., None]).exp(), 0)
    return torch.einsum("hqk,khd->qhd", P, v), lse


def forest_mask(lengths: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Who sees whom among nodes laid end to end: a token sees what is before it, in its own node
    and in those above it.
    """
    node_of = [n for n, length in enumerate(lengths) for _ in range(length)]
    above: list[set[int]] = []
    for n, parent in enumerate(parents):
        above.append({n} | (above[parent] if parent >= 0 else set()))
    rows = [
        [b <= a and m in above[n] for b, m in enumerate(node_of)] for a, n in enumerate(node_of)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(node_of), len(node_of))


def lines_mask(columns: Sequence[int], diagonals: Sequence[int], T: int, seqlen: int) -> Tensor:
    """Token i sees j <= i if their blocks are at a distance in `diagonals`, or j is in `columns`;
    tokens from seqlen on see nothing.
    """
    i, j = torch.arange(T)[:, None], torch.arange(T)
    near = torch.zeros(T, T, dtype=torch.bool)
    for d in diagonals:
        near |= i // BLOCK - j // BLOCK == d
    for c in columns:
        near |= j == c
    return near & (j <= i) & (i < seqlen)


def logprobs(
    logits: Tensor, rows: Sequence[int], targets: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target in its row of logits, and the entropy of that row."""
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -torch.where(log_p == -math.inf, 0.0, log_p.exp() * log_p).sum(-1)
    index = torch.tensor(list(rows), dtype=torch.long)
    return log_p[index, torch.tensor(list(targets), dtype=torch.long)], entropy[index]
