"""The operators on CPU tensors: calls the reference with the operators' arguments and results."""

import torch
from torch import Tensor

from qla_kernels.norm.ops import NormBackward
from qla_kernels.runtime.cpu import reference


@torch.no_grad()
def gated_norm_fwd(
    x: Tensor, gate: Tensor, weight: Tensor, tables: list[Tensor], eps: float, silu: bool
) -> Tensor:
    """Returns y, contiguous, in x's dtype."""
    live = _live(x, tables)
    y = torch.zeros(x.shape, dtype=x.dtype)
    with torch.autocast("cpu", enabled=False):
        y[live] = reference().norm.gated_rms_norm(x[live], gate[live], weight, eps, not silu)
    return y


@torch.no_grad()
def gated_norm_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    tables: list[Tensor],
    eps: float,
    silu: bool,
) -> NormBackward:
    """Returns dx, dgate and dweight, contiguous; the same bits each time."""
    live = _live(x, tables)
    dx, dgate = torch.zeros(x.shape, dtype=x.dtype), torch.zeros(x.shape, dtype=gate.dtype)
    with torch.autocast("cpu", enabled=False):
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
