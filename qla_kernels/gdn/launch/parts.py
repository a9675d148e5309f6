"""Value heads of more than 128 columns as several heads, for the chains and chunk_grads.

Columns of V do not depend on one another if q, k, g and beta are given. So a value head of m parts
is m value heads that share their gates, betas, A and key head; gradients of the shared ones are
sums. chunk_grads needs all columns of a head at once, and adds up dq and dk over the value heads of
a key head anyway. Values and states are views in parts. Gates, betas and A are repeated: 136 bytes
of each part, beside the 2 KB that a part's tensors have per token.
"""

import torch
from torch import Tensor

from qla_kernels.gdn.shapes import part_columns


def num_parts(V: int) -> int:
    return V // part_columns(V)


def of_values(x: Tensor, parts: int) -> Tensor:
    """Returns x [B, T, HV, V] as [B, T, HV parts, V / parts].

    It is a view if value heads lie side by side, else a copy.
    """
    HV, V = x.shape[2:]
    if parts > 1 and HV > 1 and x.stride(2) != V:
        x = x.contiguous()
    return torch.unflatten(x, 3, (parts, V // parts)).flatten(2, 3)


def of_gates(x: Tensor, parts: int) -> Tensor:
    """Returns x [B, T, HV, ..] repeated for each part: [B, T, HV parts, ..], contiguous."""
    return x.repeat_interleave(parts, 2)


def of_states(x: Tensor, parts: int) -> Tensor:
    """Returns states [N, HV, K, V] as [N, HV parts, K, V / parts].

    It is a view of states [.., V, K] in memory, otherwise a copy.
    """
    return _split(x, parts).flatten(1, 2)


def like_states(x: Tensor, parts: int) -> Tensor:
    """Returns memory for the result of `of_states`: x itself if that is a view, else new."""
    N, HV, K, V = x.shape
    if HV == 1 or x.stride(1) == V * x.stride(3):
        return of_states(x, parts)
    return x.new_empty(N, HV * parts, V // parts, K).mT


def put_states(x: Tensor, done: Tensor, parts: int) -> None:
    """Writes `done`, of `like_states`, to x, if that is not the same memory."""
    if done.data_ptr() != x.data_ptr():
        _split(x, parts).copy_(torch.unflatten(done, 1, (-1, parts)))


def add_up(x: Tensor, into: Tensor) -> None:
    """Writes the sums over the parts of x [B, T, HV parts] to `into` [B, T, HV], in their order."""
    torch.sum(torch.unflatten(x, 2, (into.shape[2], -1)), -1, out=into)


def _split(x: Tensor, parts: int) -> Tensor:
    return torch.unflatten(x, 3, (parts, -1)).transpose(2, 3)
