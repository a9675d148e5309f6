"""Compares the position_ids of a packed call with its layout."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.dualkv import SharedLayout
from qla_kernels.runtime.errors import need


def depths(layout: SharedLayout) -> Tensor:
    """Returns the index that each packed token has within its sequences, [T] on the CPU."""
    return _depths(layout)[0]


def check_positions(op: str, layout: SharedLayout, position_ids: Any) -> None:
    """Raises ValueError unless position_ids fit the layout.

    A prompt may begin at any position, but each response must continue where its prompt ended.
    Waits for the device. Only position_ids of one row of T numbers are checked: layers of some
    models get no position_ids, or position_ids of several axes.
    """
    if not isinstance(position_ids, Tensor) or position_ids.numel() != layout.num_tokens:
        return
    depth, root = _depths(layout)
    offset = position_ids.detach().flatten().cpu() - depth
    wrong = (offset != offset[root]).nonzero()
    if len(wrong):
        token = int(wrong[0])
        got = f"token {token} has position {int(position_ids.flatten()[token])}"
        needs = f"{int(offset[root[token]] + depth[token])}, as the layout says"
        raise ValueError(need(op, got, needs, "pass the model **batch.model_inputs()"))


def _depths(layout: SharedLayout) -> tuple[Tensor, Tensor]:
    """Returns [T] depths, and for each token the first token of its tree; both on the CPU."""
    path: list[tuple[int, int]] = []  # of the nodes around this one: end of subtree, tokens before
    starts: list[int] = []
    roots: list[int] = []
    for first, end, tout in layout.nodes.tolist():
        while path and path[-1][0] <= first:
            path.pop()
        roots.append(roots[-1] if path else first)
        starts.append(path[-1][1] if path else 0)
        path.append((tout, starts[-1] + end - first))
    first, end, _ = layout.nodes.long().unbind(1)
    table = torch.tensor([starts, roots], device="cpu").long() - torch.stack([first, first * 0])
    start, root = table.repeat_interleave(end - first, dim=1)
    return start + torch.arange(layout.num_tokens, device="cpu"), root
