"""Attention of packed sequences that share their beginnings, each shared token stored once.

Sequences that begin alike form trees: a prompt and its responses, or the branches of an agent. A
*node* is a longest run of tokens that belong to the same sequences. A batch is packed depth first:
a node's tokens lie together, a parent comes before its children, and a subtree is contiguous.
tout[k] is one past the last token of the subtree of k's node, and is all that a mask needs:

    V(q, k) = k <= q < tout[k]

because [k, tout[k]) is the rest of k's node and everything that descends from it. So the queries of
a node see the tokens of its ancestors and, causally, their own node; the keys of a node are seen by
one contiguous run of queries. The second form below works node by node, as the kernels do.

Everywhere: q, o, do [Tq,H,D]; k, v [T,Hk,D]; lse, dlse [H,Tq], natural log; query head h reads key
head h // (H / Hk). Row i of q is token i + q_shift, and Tq = T - q_shift: of the tokens before that
only keys take part. nodes [n,3] are integers on any device: of each node that is not empty, in
order, its first token, one past its last, and its tout. fp64 inputs compute in fp64, all others in
fp32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor

BLOCK = 512  # tokens of a node that are taken at a time


class Forward(NamedTuple):
    """Results of `by_nodes`."""

    o: Tensor  # [Tq, H, D] in q's dtype
    lse: Tensor  # [H, Tq] log of the sum of exponentials over the visible keys


class Backward(NamedTuple):
    """Gradients of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(tout: Tensor) -> Tensor:
    """V(q, k) = k <= q < tout[k], [T, T]."""
    token = torch.arange(tout.shape[0], device=tout.device)
    return (token <= token[:, None]) & (token[:, None] < tout)


def attention(
    q: Tensor, k: Tensor, v: Tensor, tout: Tensor, scale: float | None = None, q_shift: int = 0
) -> Forward:
    """S = scale q k^T where V, else -inf;  lse = log sum_k e^S;  o = sum_k e^(S - lse) v.

    Differentiable by autograd, lse included.
    """
    S = _scores(_grouped(q, k), _wide(k), visible(tout)[q_shift:], _scale(scale, q))
    lse = S.logsumexp(-1)
    P = (S - lse[..., None]).exp()
    o = einsum(P, _wide(v), "j g q k, k j d -> q j g d")
    o = rearrange(o, "q j g d -> q (j g) d").to(q.dtype)
    return Forward(o, rearrange(lse, "j g q -> (j g) q"))


def by_nodes(
    q: Tensor, k: Tensor, v: Tensor, nodes: Tensor, scale: float | None = None, q_shift: int = 0
) -> Forward:
    """What `attention` computes; only visible pairs of nodes are looked at."""
    query, key, value = _grouped(q, k), _wide(k), _wide(v)
    o, lse = [query.new_empty(0, *query.shape[1:3], v.shape[-1])], [query[..., 0][:0]]
    for rows, keys in _query_blocks(nodes, q_shift):
        rows, keys = rows.to(q.device), keys.to(q.device)
        S = _scores(query[rows - q_shift], key[keys], keys <= rows[:, None], _scale(scale, q))
        lse.append(rearrange(S.logsumexp(-1), "j g q -> q j g"))
        o.append(einsum(S.softmax(-1), value[keys], "j g q k, k j d -> q j g d"))
    return Forward(
        rearrange(torch.cat(o), "q j g d -> q (j g) d").to(q.dtype),
        rearrange(torch.cat(lse), "q j g -> (j g) q").contiguous(),
    )


def by_nodes_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    nodes: Tensor,
    scale: float | None = None,
    q_shift: int = 0,
) -> Backward:
    """The gradients of a loss with gradients do and dlse (0 if None), written out by hand.

        P = e^(S - lse)      delta = sum_d do o - dlse      dP = do v^T      dS = P (dP - delta)
        dq = scale dS k      dk = scale dS^T q              dv = P^T do

    Two passes, without a sum over blocks: queries meet all their keys, then keys all their queries.
    dk and dv of a key head are sums over its group of query heads.
    """
    scale = _scale(scale, q)
    query, key, value, upstream = _grouped(q, k), _wide(k), _wide(v), _grouped(do, k)
    lse = rearrange(lse.to(query.dtype), "(j g) q -> q j g", j=k.shape[1])
    delta = reduce(upstream * _grouped(o, k), "q j g d -> q j g", "sum")
    if dlse is not None:
        delta = delta - rearrange(dlse.to(delta.dtype), "(j g) q -> q j g", j=k.shape[1])

    def P_and_dS(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        i = rows - q_shift
        S = _scores(query[i], key[keys], keys <= rows[:, None], scale)
        P = (S - rearrange(lse[i], "q j g -> j g q 1")).exp()
        dP = einsum(upstream[i], value[keys], "q j g d, k j d -> j g q k")
        return P, P * (dP - rearrange(delta[i], "q j g -> j g q 1"))

    dq, dk, dv = [query[:0]], [key[:0]], [value[:0]]
    for rows, keys in _query_blocks(nodes, q_shift):
        rows, keys = rows.to(q.device), keys.to(q.device)
        _, dS = P_and_dS(rows, keys)
        dq.append(scale * einsum(dS, key[keys], "j g q k, k j d -> q j g d"))
    for rows, keys in _key_blocks(nodes, q_shift):
        rows, keys = rows.to(q.device), keys.to(q.device)
        P, dS = P_and_dS(rows, keys)
        dk.append(scale * einsum(dS, query[rows - q_shift], "j g q k, q j g d -> k j d"))
        dv.append(einsum(P, upstream[rows - q_shift], "j g q k, q j g d -> k j d"))
    return Backward(
        rearrange(torch.cat(dq), "q j g d -> q (j g) d").to(q.dtype),
        torch.cat(dk).to(k.dtype),
        torch.cat(dv).to(v.dtype),
    )


def _query_blocks(nodes: Tensor, q_shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(queries, keys), in the order of queries: ancestors densely, then the own node so far."""
    path: list[list[int]] = []
    for node in nodes.tolist():
        first, end, _ = node
        path = [above for above in path if above[2] > first]  # the others' subtrees have ended
        before = [_run(*above[:2]) for above in path]
        path.append(node)
        for start in range(max(first, q_shift), end, BLOCK):
            stop = min(start + BLOCK, end)
            yield _run(start, stop), torch.cat([*before, _run(first, stop)])


def _key_blocks(nodes: Tensor, q_shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(queries, keys), in the order of keys: the run of queries from the first key to tout."""
    for first, end, tout in nodes.tolist():
        for start in range(first, end, BLOCK):
            rows = _run(min(max(start, q_shift), tout), tout)
            yield rows, _run(start, min(start + BLOCK, end))


def _run(first: int, end: int) -> Tensor:
    """Indices on the CPU, whatever torch's default device is."""
    return torch.arange(first, end, device="cpu")


def _scores(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[j, g, q, k]: key heads, query heads of each, queries, keys."""
    S = scale * einsum(query, key, "q j g d, k j d -> j g q k")
    return S.masked_fill(~seen, -torch.inf)


def _scale(scale: float | None, q: Tensor) -> float:
    return scale if scale is not None else float(q.shape[-1] ** -0.5)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    return rearrange(_wide(x), "t (j g) d -> t j g d", j=k.shape[1])
