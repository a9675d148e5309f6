"""The operators on CPU tensors: calls the reference with the operators' arguments and results."""

import torch
from torch import Tensor

from qla_kernels.conv.ops import ConvBackward
from qla_kernels.conv.validate import UPDATE_OP, check_slots
from qla_kernels.runtime.cpu import reference


@torch.no_grad()
def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: list[Tensor],
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> Tensor:
    """Returns y [B, T, C], contiguous, in x's dtype."""
    with torch.autocast("cpu", enabled=False):
        y: Tensor = reference().conv.forward(
            x.flatten(0, 1),
            weight,
            bias,
            silu,
            *_nodes(x, tables),
            heads=(norm_heads, norm_size),
        )
    return y.view(x.shape)


@torch.no_grad()
def conv_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: list[Tensor],
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
    dy2: Tensor | None = None,
    dy3: Tensor | None = None,
) -> ConvBackward:
    """Returns dx, dweight and dbias, contiguous; the same bits each time."""
    dy = torch.cat([part for part in (dy, dy2, dy3) if part is not None], 2)
    with torch.autocast("cpu", enabled=False):
        done = reference().conv.backward(
            dy.flatten(0, 1),
            x.flatten(0, 1),
            weight,
            bias,
            silu,
            *_nodes(x, tables),
            heads=(norm_heads, norm_size),
        )
    return ConvBackward(done.dx.view(x.shape), done.dweight.contiguous(), done.dbias)


@torch.no_grad()
def conv_update(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    null_slot: int,
    silu: bool,
    y: Tensor,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> None:
    """Writes y [N, C], and the rows of the pool [slots, C, W - 1 or more] that are used."""
    slots = torch.arange(len(x)) if indices is None else indices.long()
    if indices is not None:
        check_slots(UPDATE_OP, indices, rows.shape[0], null_slot)
    live = slots > null_slot
    last = rows[..., : weight.shape[1] - 1]
    with torch.autocast("cpu", enabled=False):
        found, after = reference().conv.update(
            x[live], last[slots[live]], weight, bias, silu, (norm_heads, norm_size)
        )
    y.copy_(torch.zeros_like(y).index_put((live,), found))  # y may be x
    last[slots[live]] = after


def _nodes(x: Tensor, tables: list[Tensor]) -> list[Tensor]:
    """Returns the bounds of nodes and, for a tree, their halo."""
    B, T, _ = x.shape
    return tables[:2] or [torch.arange(B + 1) * T]
