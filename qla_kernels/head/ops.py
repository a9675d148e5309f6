"""The operators as torch sees them: schemas, fake implementations and dispatch by device.

    head_fwd, head_bwd   log-probabilities of targets from hidden states, and the gradients

hidden is [N, D], weight [V, D], bias [V]; low [N, r] and up [V, r] add low up^T to the logits. The
dtype of hidden is that of the products; weight, low and up are rounded to it, block by block.
targets [L] int32 are ascending by row: those of row r are first[r] .. first[r + 1] - 1, with first
[N + 1] int32. Logits are divided by `temperature`, after a cap `softcap` (0: none).

CPU tensors go to cpu.py and CUDA tensors to launch.py; each has a function named like the operator,
and is imported when an operator first gets such a tensor. No result shares memory with an argument.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.op import define_direct

SCHEMAS = {
    "head_fwd": """(
        Tensor hidden, Tensor weight, Tensor? bias, Tensor? low, Tensor? up, Tensor targets,
        Tensor first, float temperature, float softcap
    ) -> (Tensor logprobs, Tensor lse2, Tensor entropy)""",
    "head_bwd": """(
        Tensor dlogprobs, Tensor dentropy, Tensor hidden, Tensor weight, Tensor? bias, Tensor? low,
        Tensor? up, Tensor targets, Tensor first, Tensor lse2, Tensor entropy, float temperature,
        float softcap, bool[] wanted
    ) -> (Tensor? dhidden, Tensor? dweight, Tensor? dbias, Tensor? dlow, Tensor? dup)""",
}


class HeadForward(NamedTuple):
    """Results of head_fwd; fp32, or fp64 if hidden is."""

    logprobs: Tensor  # [L]
    lse2: Tensor  # [N] base 2
    entropy: Tensor  # [N]


class HeadBackward(NamedTuple):
    """Results of head_bwd; each has the shape and dtype of its input, or is None."""

    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dlow: Tensor | None
    dup: Tensor | None


class Wanted(NamedTuple):
    """Which gradients head_bwd computes, of inputs that are there."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool
    up: bool


def _fake_head_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    *_: Any,
) -> HeadForward:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    sizes = targets.shape, hidden.shape[:1], hidden.shape[:1]
    return HeadForward(*(hidden.new_empty(size, dtype=wide) for size in sizes))


def _fake_head_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    *others: Any,
) -> HeadBackward:
    inputs = zip((hidden, weight, bias, low, up), others[-1], strict=True)
    return HeadBackward(*(x.new_empty(x.shape) if x is not None and w else None for x, w in inputs))


HOMES = "qla_kernels.head.launch", "qla_kernels.head.cpu"  # for CUDA and CPU tensors

# As this package calls them
head_fwd = define_direct("head_fwd", SCHEMAS["head_fwd"], _fake_head_fwd, *HOMES)
head_bwd = define_direct("head_bwd", SCHEMAS["head_bwd"], _fake_head_bwd, *HOMES)
