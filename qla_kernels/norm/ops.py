"""The operators: their signatures, and what runs CPU tensors, which is the reference.

x, gate and dy are [N, V], [T, HV, V] or [B, T, HV, V]. `tables` is empty, or has cu_seqlens alone.
CUDA tensors go to launch.py. No result shares memory with an argument; gated_norm_into writes to y,
which may be x.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import Overwritten, op

LAUNCHES = "qla_kernels.norm.launch"


class NormBackward(NamedTuple):
    """Results of gated_norm_bwd, all contiguous."""

    dx: Annotated[Tensor, "like x"]
    dgate: Annotated[Tensor, "like gate"]
    dweight: Annotated[Tensor, "like weight"]


@op(LAUNCHES)
def gated_norm_fwd(
    x: Tensor, gate: Tensor, weight: Tensor, tables: list[Tensor], eps: float, silu: bool
) -> Annotated[Tensor, "like x"]:
    """Returns y, contiguous."""
    live = _live(x, tables)
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[live] = reference().norm.gated_rms_norm(x[live], gate[live], weight, eps, not silu)
    return y


@op(LAUNCHES)
def gated_norm_into(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool, y: Overwritten
) -> None:
    """Writes y, contiguous, which may be x."""
    y.copy_(reference().norm.gated_rms_norm(x, gate, weight, eps, not silu))


@op(LAUNCHES)
def gated_norm_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    tables: list[Tensor],
    eps: float,
    silu: bool,
) -> NormBackward:
    """Returns the gradients; the same bits each time."""
    live = _live(x, tables)
    dx, dgate = torch.zeros(x.shape, dtype=x.dtype), torch.zeros(x.shape, dtype=gate.dtype)
    dx[live], dgate[live], dweight = reference().norm.gated_rms_norm_backward(
        dy[live], x[live], gate[live], weight, eps, not silu
    )
    return NormBackward(dx, dgate, dweight)


def _live(x: Tensor, tables: list[Tensor]) -> tuple[slice, ...]:
    """Returns the index of the tokens that belong to a sequence."""
    if not tables:
        return (slice(None),)
    end = slice(max(0, min(int(tables[0][-1]), x.shape[-3 if x.dim() > 2 else 0])))
    return (slice(None), end) if x.dim() == 4 else (end,)
