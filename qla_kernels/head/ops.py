"""The operators: their signatures, and what runs CPU tensors, which is the reference.

    head_fwd, head_bwd   log-probabilities of targets from hidden states, and the gradients

The logits are hidden weight^T + low up^T + bias, with hidden [N, D], weight [V, D], bias [V], and
LoRA's factors low [N, r] and up [V, r]. Products are computed in the dtype of hidden; weight, low
and up are rounded to it, block by block. Logits are capped at `softcap`, unless that is 0, and then
divided by `temperature`.

targets [L] int32 are token ids, sorted by the row of hidden that predicts them: row r predicts the
targets first[r] to first[r + 1] - 1, with first [N + 1] int32.

CUDA tensors go to launch.py. No result shares memory with an argument.
"""

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import op

LAUNCHES = "qla_kernels.head.launch"


class HeadForward(NamedTuple):
    """Results of head_fwd; fp32, or fp64 if hidden is."""

    logprobs: Annotated[Tensor, "[L] wide hidden"]
    lse2: Annotated[Tensor, "[N] wide hidden"]  # base 2
    entropy: Annotated[Tensor, "[N] wide hidden"]


class HeadBackward(NamedTuple):
    """Results of head_bwd: each has the shape and dtype of its input, or is None if not wanted."""

    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dlow: Tensor | None
    dup: Tensor | None


class Wanted(NamedTuple):
    """Which gradients head_bwd computes; an input that is None has none."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool
    up: bool


def _fake_head_bwd(dlogprobs: Tensor, dentropy: Tensor, *others: Any) -> HeadBackward:
    inputs = zip(others[:5], others[-1], strict=True)
    return HeadBackward(*(x.new_empty(x.shape) if x is not None and w else None for x, w in inputs))


@op(LAUNCHES)
def head_fwd(
    hidden: Annotated[Tensor, "[N, D]"],
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Annotated[Tensor, "[L]"],
    first: Tensor,
    temperature: float,
    softcap: float,
) -> HeadForward:
    """Returns log-probabilities, the base-2 lse and entropies, from the reference."""
    ours = reference().head
    done = ours.forward(
        hidden, ours.Head(weight, bias, low, up), targets, first, temperature, softcap or None
    )
    return HeadForward(done.logprobs, done.lse / math.log(2), done.entropy)


@op(LAUNCHES, _fake_head_bwd)
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
    done = ours.backward(
        dlogprobs, of_rows, hidden, ours.Head(weight, bias, low, up), targets, first,
        lse2 * math.log(2), entropy, temperature, softcap or None,
    )  # fmt: skip
    pairs = zip(done, Wanted(*wanted), strict=True)
    return HeadBackward(*(x if wanted else None for x, wanted in pairs))
