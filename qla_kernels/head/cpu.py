"""The operators on CPU tensors: calls the reference with the operators' arguments and results."""

import math

import torch
from torch import Tensor

from qla_kernels.head.ops import HeadBackward, HeadForward, Wanted
from qla_kernels.runtime.cpu import reference


@torch.no_grad()
def head_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    first: Tensor,
    temperature: float,
    softcap: float,
) -> HeadForward:
    """Returns log-probabilities, the base-2 lse and entropies, from the reference."""
    ours = reference().head
    with torch.autocast("cpu", enabled=False):
        done = ours.forward(
            hidden, ours.Head(weight, bias, low, up), targets, first, temperature, softcap or None
        )
    return HeadForward(done.logprobs, done.lse / math.log(2), done.entropy)


@torch.no_grad()
def head_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    first: Tensor,
    lse2: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float,
    wanted: list[bool],
) -> HeadBackward:
    """Returns the gradients from the reference, None for those that are not wanted."""
    ours = reference().head
    of_rows = torch.zeros_like(entropy).index_add(0, ours.rows_of(first), dentropy.to(entropy))
    with torch.autocast("cpu", enabled=False):
        done = ours.backward(
            dlogprobs, of_rows, hidden, ours.Head(weight, bias, low, up), targets, first,
            lse2 * math.log(2), entropy, temperature, softcap or None,
        )  # fmt: skip
    pairs = zip(done, Wanted(*wanted), strict=True)
    return HeadBackward(*(x if wanted else None for x, wanted in pairs))
