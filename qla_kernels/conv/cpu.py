"""The operators on CPU tensors: calls the reference with the operators' arguments and results."""

import torch
from torch import Tensor

from qla_kernels.conv.ops import ConvBackward
from qla_kernels.cpu import reference


@torch.no_grad()
def conv_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, tables: list[Tensor], silu: bool
) -> Tensor:
    """Returns y [B, T, C], contiguous, in x's dtype."""
    with torch.autocast("cpu", enabled=False):
        y: Tensor = reference().conv.forward(
            x.flatten(0, 1), weight, bias, silu, *_nodes(x, tables)
        )
    return y.view(x.shape)


@torch.no_grad()
def conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tables: list[Tensor], silu: bool
) -> ConvBackward:
    """Returns dx, dweight and dbias, contiguous; the same bits each time."""
    with torch.autocast("cpu", enabled=False):
        done = reference().conv.backward(
            dy.flatten(0, 1), x.flatten(0, 1), weight, bias, silu, *_nodes(x, tables)
        )
    return ConvBackward(done.dx.view(x.shape), done.dweight.contiguous(), done.dbias)


def _nodes(x: Tensor, tables: list[Tensor]) -> list[Tensor]:
    """Returns the bounds of nodes and, for a tree, their halo."""
    B, T, _ = x.shape
    return tables[:2] or [torch.arange(B + 1) * T]
