"""Compares the position_ids of a batch that stores shared prompts once with its layout."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.dualkv import SharedLayout
from qla_kernels.runtime.errors import need


def depths(layout: SharedLayout) -> Tensor:
    """Returns the position ids of the T tokens of a packed batch, int64 [T] on the CPU.

    The batch stores each shared prompt once. Positions count from 0 at the first token of a prompt,
    and those of each response continue from the end of its prompt.

    Args:
        layout: says which packed tokens form which sequence.
    """
    return _depths(layout)[0]


def check_positions(op: str, layout: SharedLayout, position_ids: Any) -> None:
    """Raises ValueError if position_ids do not fit a packed batch that stores each prompt once.

    A prompt may begin at any position, but each response must continue where its prompt ended.
    Waits for the GPU if position_ids are there.

    Args:
        op: name of the function with which the error message begins.
        layout: says which of the T packed tokens form which sequence.
        position_ids: a tensor of T positions. Anything else, such as None or positions with several
            axes, is not checked.
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
    """Returns the position of each token, and the first token of its group; both [T], on the CPU.

    A group is a prompt with its responses: a tree of nodes.
    """
    path: list[tuple[int, int]] = []  # of this node's ancestors: end of subtree, tokens before it
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
