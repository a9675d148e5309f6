"""The operators as torch sees them: schemas, fake implementations and dispatch by device.

x, gate and dy are [N, V], [T, HV, V] or [B, T, HV, V]. `tables` is empty, or has cu_seqlens alone.
CPU tensors go to cpu.py and CUDA tensors to launch.py; each has a function named like the operator,
and is imported when an operator first gets such a tensor. No result shares memory with an argument.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.operators import define_direct
from qla_kernels.runtime.programs import Programs

SCHEMAS = {
    "gated_norm_fwd": """(
        Tensor x, Tensor gate, Tensor weight, Tensor[] tables, float eps, bool silu
    ) -> Tensor""",
    "gated_norm_bwd": """(
        Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor[] tables, float eps, bool silu
    ) -> (Tensor dx, Tensor dgate, Tensor dweight)""",
}


class NormForward(NamedTuple):
    """The result of gated_norm_fwd."""

    y: Tensor  # as x

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class NormBackward(NamedTuple):
    """Results of gated_norm_bwd; each has the shape and dtype of its input, and is contiguous."""

    dx: Tensor
    dgate: Tensor
    dweight: Tensor

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


def _fake_forward(
    x: Tensor, gate: Tensor, weight: Tensor, tables: list[Tensor], eps: float, silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    tables: list[Tensor],
    eps: float,
    silu: bool,
) -> NormBackward:
    made = (each.new_empty(each.shape) for each in (x, gate, weight))
    return NormBackward(*made)


HOMES = "qla_kernels.norm.launch", "qla_kernels.norm.cpu"  # for CUDA and CPU tensors

# As this package calls them
gated_norm_fwd = define_direct("gated_norm_fwd", SCHEMAS["gated_norm_fwd"], _fake_forward, *HOMES)
gated_norm_bwd = define_direct("gated_norm_bwd", SCHEMAS["gated_norm_bwd"], _fake_backward, *HOMES)

_FORWARDS, _BACKWARDS = Programs("gated_norm_fwd"), Programs("gated_norm_bwd")


def forward(*arguments: Any) -> Tensor:
    """Runs gated_norm_fwd, replayed if possible."""
    run = _FORWARDS.run
    return run(lambda given: NormForward(gated_norm_fwd(*given)), (arguments,), NormForward).y


def backward(*arguments: Any) -> NormBackward:
    """Runs gated_norm_bwd, replayed if possible."""
    run = _BACKWARDS.run
    return run(lambda given: NormBackward(*gated_norm_bwd(*given)), (arguments,), NormBackward)


def wants_gradients(*tensors: Tensor) -> bool:
    """Returns whether grad mode is on and one of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
