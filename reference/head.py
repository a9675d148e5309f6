"""Log-probabilities of targets, and entropies, from hidden states and the head's weight.

    z = hidden weight^T + low up^T + bias          [N, V]
    x = c tanh(z / c) / temperature                c is the softcap; without one x = z / temperature
    lse = log sum_j e^x_j        p = e^(x - lse)

    log-probability of target t of row r = x[r, t] - lse[r]
    entropy of row r = -sum_j p_j log p_j

With g_t, the gradient of a target's log-probability, and h, that of its row's entropy:

    dx_j = sum_t g_t ([j = t] - p_j)  -  h p_j (log p_j + entropy)
    dz_j = dx_j (1 - tanh(z_j / c)^2) / temperature
    dhidden = dz weight    dweight = dz^T hidden    dlow = dz up    dup = dz^T low    dbias = sum dz

Everywhere: hidden [N, D]; weight [V, D]; low [N, r] and up [V, r], a low-rank addition, or None;
bias [V] or None; targets [L], those of row r being first[r] .. first[r + 1] - 1, so that a row may
have any number of them. weight, low and up are rounded to hidden's dtype, as under autocast. fp64
inputs compute in fp64, all others in fp32.

Rows are computed in parts of at most `ELEMENTS` logits, so that memory does not grow with N V.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

ELEMENTS = 1 << 24  # logits at a time


class Head(NamedTuple):
    """What makes logits of hidden states."""

    weight: Tensor
    bias: Tensor | None = None
    low: Tensor | None = None
    up: Tensor | None = None


class HeadForward(NamedTuple):
    """Results of `forward`, fp32 or fp64."""

    logprobs: Tensor  # [L]
    lse: Tensor  # [N]
    entropy: Tensor  # [N]


class HeadGradients(NamedTuple):
    """Results of `backward`, each in the dtype of its input."""

    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor | None
    dlow: Tensor | None
    dup: Tensor | None


def logits(hidden: Tensor, head: Head) -> Tensor:
    """z, [N, V]."""
    z = einsum(_wide(hidden), _rounded(head.weight, hidden), "n d, v d -> n v")
    if head.low is not None and head.up is not None:
        z = z + einsum(_rounded(head.low, hidden), _rounded(head.up, hidden), "n r, v r -> n v")
    return z if head.bias is None else z + head.bias.to(z)


def scaled(z: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """x, [N, V]."""
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def definition(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    first: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [L] and entropies [N] from all logits; differentiable by autograd."""
    log_p = scaled(logits(hidden, head), temperature, softcap).log_softmax(-1)
    return log_p[rows_of(first), targets.long()], torch.special.entr(log_p.exp()).sum(-1)


def forward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    first: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> HeadForward:
    """The results of `definition`, a part of the rows at a time, and lse."""
    wide = _wide(hidden[:0])
    logprobs = wide.new_empty(len(targets))
    lse, entropy = (wide.new_empty(len(hidden)) for _ in range(2))
    for part in _parts(len(hidden), len(head.weight)):
        x = scaled(logits(hidden[part], _rows(head, part)), temperature, softcap)
        lse[part] = x.logsumexp(-1)
        entropy[part] = torch.special.entr((x - lse[part, None]).exp()).sum(-1)
        mine = slice(int(first[part.start]), int(first[part.stop]))
        row = rows_of(first[part.start : part.stop + 1])
        logprobs[mine] = x[row, targets[mine].long()] - lse[part][row]
    return HeadForward(logprobs, lse, entropy)


def backward(
    dlogprobs: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    first: Tensor,
    lse: Tensor,
    entropy: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> HeadGradients:
    """The gradients, a part of the rows at a time; `dentropy` is [N]."""
    wide, (weight, bias, low, up) = _wide(hidden), head
    dhidden, dweight = torch.zeros_like(wide), wide.new_zeros(weight.shape)
    dbias, dlow, dup = (None if x is None else wide.new_zeros(x.shape) for x in (bias, low, up))
    for part in _parts(len(hidden), len(weight)):
        mine = slice(int(first[part.start]), int(first[part.stop]))
        row = rows_of(first[part.start : part.stop + 1])
        z = logits(hidden[part], _rows(head, part))
        x = scaled(z, temperature, softcap)
        p = (x - lse[part, None]).exp()
        g = torch.zeros_like(lse[part]).index_put((row,), dlogprobs[mine].to(x), accumulate=True)
        of_entropy = torch.special.entr(p) - p * entropy[part, None]
        dx = dentropy[part, None].to(x) * of_entropy - g[:, None] * p
        dx.index_put_((row, targets[mine].long()), dlogprobs[mine].to(x), accumulate=True)
        bend = 1.0 if softcap is None else 1 - torch.tanh(z / softcap).square()
        dz = dx * bend / temperature
        dhidden[part] = einsum(dz, _rounded(weight, hidden), "n v, v d -> n d")
        dweight += einsum(dz, wide[part], "n v, n d -> v d")
        if dbias is not None:
            dbias += dz.sum(0)
        if low is not None and up is not None and dlow is not None and dup is not None:
            dlow[part] = einsum(dz, _rounded(up, hidden), "n v, v r -> n r")
            dup += einsum(dz, _rounded(low[part], hidden), "n v, n r -> v r")
    return HeadGradients(
        dhidden.to(hidden.dtype),
        dweight.to(weight.dtype),
        *(
            None if dx is None or x is None else dx.to(x.dtype)
            for dx, x in ((dbias, bias), (dlow, low), (dup, up))
        ),
    )


def rows_of(first: Tensor) -> Tensor:
    """The row of each target, [L], counted from the first row of `first`."""
    return torch.repeat_interleave(first.long().diff())


def _rows(head: Head, part: slice) -> Head:
    return head if head.low is None else head._replace(low=head.low[part])


def _parts(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(1, ELEMENTS // max(1, vocabulary))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounded(x: Tensor, hidden: Tensor) -> Tensor:
    return _wide(x.to(hidden.dtype))
