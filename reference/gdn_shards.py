"""Sequences cut over ranks: what each rank tells the others, and what it makes of their word.

Tokens of a packed batch are dealt out in order, a run to each rank, so a rank may hold the end of a
sequence, whole sequences, and the beginning of another one. Over its part of a sequence

    S_leaves = M S_enters + b             dS_enters = M^T dS_leaves + b'

and b, M and b' are known before S and dS are. A link is such a pair, of the sequence that goes on
at the next rank, or, for gradients, of the one that came from the rank before. Where that is not
one and the same sequence, nothing can come through, and M is 0.

A link says everything: from those of all ranks each one folds the state that enters its first
sequence and the gradient of the state that leaves its last one, and runs as if it were alone.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .chunks import cut, sequence_spans
from .gdn_backward import chunked_backward
from .gdn_chunked import chain, compute_dtype, end_states, forward_tiles, value_tiles


def forward_link(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    through: bool = True,
) -> Tensor:
    """[b | M] of this rank's last sequence, [HV, K, V + K]; `through`: it is the first one too."""
    K, V = k.shape[-1], v.shape[-1]
    chunks = cut(sequence_spans(1, k.shape[1], cu_seqlens)[-1:], 64, k.device)
    tiles, _ = forward_tiles(chunks, k, k, g, beta, lambda x: x)
    values = value_tiles(chunks, v, k.shape[2], compute_dtype(k))
    values = torch.cat([values, values.new_zeros(*values.shape[:-1], K)], -1)
    eye = torch.eye(K, dtype=values.dtype, device=k.device) if through else values.new_zeros(K, K)
    start = torch.cat([values.new_zeros(K, V), eye], -1)
    start = start.expand(1, *values.shape[1:3], K, V + K)
    return end_states(chain(chunks, tiles, values, start, lambda x: x).final, chunks)[0]


def backward_link(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    through: bool = True,
) -> Tensor:
    """[b' | M^T] of this rank's first sequence, [HV, K, V + K]; `through`: it is the last one too.

    M^T is what the gradient of a final state becomes where there is no gradient of an output.
    """
    begin, end = sequence_spans(1, k.shape[1], cu_seqlens)[0].tolist()
    (HV, V), K = v.shape[2:], k.shape[-1]
    q, k, v, g_cum, beta, A, do = (x[:, begin:end] for x in (q, k, v, g_cum, beta, A, do))
    wide = compute_dtype(q)
    parts = []
    eye = torch.eye(K, dtype=wide, device=q.device) if through else q.new_zeros(K, K, dtype=wide)
    for values, gradients, end_gradient in (
        (v, do, v.new_zeros(1, HV, K, V, dtype=wide)),
        (v.new_zeros(*v.shape[:3], K), do.new_zeros(*do.shape[:3], K), eye.expand(1, HV, K, K)),
    ):
        nothing = torch.zeros_like(end_gradient)
        done = chunked_backward(
            q, k, values, g_cum, beta, A, gradients, end_gradient, scale, nothing
        )
        assert done.dh0 is not None
        parts.append(done.dh0[0])
    return torch.cat(parts, -1)


def entering(links: Tensor, ranks: Iterable[int]) -> Tensor:
    """The state, or gradient, that has come through these ranks, [HV, K, V].

    Args:
        links: [ranks, HV, K, V + K].
        ranks: in the order in which it meets them; the first one has the sequence's beginning, or,
            for gradients, its end.
    """
    V = links.shape[3] - links.shape[2]
    state = torch.zeros_like(links[0, ..., :V])
    for rank in ranks:
        state = links[rank, ..., V:] @ state + links[rank, ..., :V]
    return state
