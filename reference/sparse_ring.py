"""Vertical-slash sparse attention, on one device and over a ring of ranks: the definition.

Reading order: `mask` and `attention` below are what the operation means, `attention_backward` its
gradients by hand, `positions` who holds which token. `sparse_ring_index` is how the lines of a mask
are chosen, `sparse_ring_emulated` the same attention as a ring of ranks computes it.

Everywhere: q, o [B,T,H,D]; k, v [B,T,Hk,D], query head h reads key head h // (H / Hk); LSE [B,H,T],
natural log. Blocks are 64 tokens. fp64 inputs compute in fp64, all others in fp32.
"""

from typing import NamedTuple

import torch
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor

BLOCK = 64


class Index(NamedTuple):
    """The lines of a mask, for each batch row and query head."""

    columns: Tensor  # bool [B, H, T]: this key is seen by every later token
    diagonals: Tensor  # bool [B, H, T / 64]: blocks at this distance see each other


class Gradients(NamedTuple):
    """Gradients of q, k and v."""

    dq: Tensor  # [B, T, H, D]
    dk: Tensor  # [B, T, Hk, D]
    dv: Tensor  # [B, T, Hk, D]


def slashes(index: Index, query: Tensor, key: Tensor) -> Tensor:
    """(j <= i) and (i // 64 - j // 64 in D), [B, H, queries, keys] for tokens i and j."""
    i, j = query[:, None], key[None, :]
    distance = i // BLOCK - j // BLOCK
    return (j <= i) & index.diagonals[..., distance.clamp(min=0)]


def verticals(index: Index, query: Tensor, key: Tensor) -> Tensor:
    """(j <= i) and (j in V), for every head where no slash covers the pair already."""
    seen = (key[None, :] <= query[:, None]) & index.columns[..., None, key]
    return seen & ~slashes(index, query, key)


def mask(index: Index, seqlen: int | None = None) -> Tensor:
    """M = (j <= i) and (i // 64 - j // 64 in D or j in V); rows from seqlen on see nothing."""
    T = index.columns.shape[-1]
    token = torch.arange(T, device=index.columns.device)
    seen = slashes(index, token, token) | verticals(index, token, token)
    return seen & (token < (T if seqlen is None else seqlen))[:, None]


def scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """S = scale q k^T, [B, H, queries, keys]; scale is D^-1/2 if None."""
    wide, scale = _compute_dtype(q), scale if scale is not None else q.shape[-1] ** -0.5
    return scale * einsum(q.to(wide), _per_head(k, q), "b i h d, b j h d -> b h i j")


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """S = scale q k^T;  LSE = log sum_M e^S;  O = sum_M e^{S - LSE} v.

    visible is [B, H, queries, keys]. A row that sees nothing has O = 0 and LSE = -inf. Autograd
    differentiates both results.
    """
    S = scores(q, k, scale).masked_fill(~visible, -torch.inf)
    seen = visible.any(-1)
    peak = S.detach().amax(-1).where(seen, 0) if k.shape[1] else S.sum(-1)
    weights = (S - peak[..., None]).exp()
    total = weights.sum(-1).where(seen, 1)
    o = einsum(weights / total[..., None], _per_head(v, q), "b h i j, b j h d -> b i h d")
    return o.to(q.dtype), (peak + total.log()).where(seen, -torch.inf)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    scale: float | None = None,
) -> Gradients:
    """P = e^{S - LSE} on M;  dS = P (dO v^T - delta);

    dQ = scale dS k,  dK = scale dS^T q,  dV = P^T dO.

    `lse` and `delta` may be those of more keys than these: gradients then are these keys' part.
    """
    wide, scale = _compute_dtype(q), scale if scale is not None else q.shape[-1] ** -0.5
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing: P = 0
    P = (scores(q, k, scale) - lse[..., None]).exp().masked_fill(~visible, 0)
    dP = einsum(do.to(wide), _per_head(v, q), "b i h d, b j h d -> b h i j")
    dS = scale * P * (dP - delta[..., None])
    dq = einsum(dS, _per_head(k, q), "b h i j, b j h d -> b i h d")
    dk = einsum(dS, q.to(wide), "b h i j, b i h d -> b j h d")
    dv = einsum(P, do.to(wide), "b h i j, b i h d -> b j h d")
    return Gradients(dq, _group_sum(dk, k), _group_sum(dv, v))


def delta(o: Tensor, do: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dO O) - dLSE, [B, H, T]."""
    wide = _compute_dtype(o)
    rows = einsum(o.to(wide), do.to(wide), "b t h d, b t h d -> b h t")
    return rows if dlse is None else rows - dlse


def positions(layout: str, world: int, T: int) -> Tensor:
    """The token in row x of rank r's shard, int64 [world, T / world].

    contiguous   rank r has the r-th of `world` parts
    zigzag       of 2 world parts, rank r has the r-th and the r-th from the end
    striped-S    stripes of S tokens are dealt to the ranks in turn; striped-1 deals tokens
    """
    token = torch.arange(T)
    if layout == "contiguous":
        return rearrange(token, "(r x) -> r x", r=world)
    if layout == "zigzag":
        parts = rearrange(token, "(c x) -> c x", c=2 * world)
        return torch.cat([parts[:world], parts.flip(0)[:world]], 1)
    stripe = int(layout.removeprefix("striped-"))
    return rearrange(token, "(n r x) -> r (n x)", r=world, x=stripe)


def shards(x: Tensor, held: Tensor, dim: int = 1) -> list[Tensor]:
    """x as the ranks hold it."""
    return [x.index_select(dim, rows) for rows in held.to(x.device)]


def unshard(parts: list[Tensor], held: Tensor, dim: int = 1) -> Tensor:
    """The inverse of `shards`."""
    return torch.cat(parts, dim).index_select(dim, held.flatten().argsort().to(parts[0].device))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each query head."""
    return repeat(x.to(_compute_dtype(x)), "b j h d -> b j (h g) d", g=q.shape[2] // x.shape[2])


def _group_sum(per_head: Tensor, x: Tensor) -> Tensor:
    return reduce(per_head, "b j (h g) d -> b j h d", "sum", h=x.shape[2])
