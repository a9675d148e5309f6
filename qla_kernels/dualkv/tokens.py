"""Checks of the token ids and positions that callers pass to the packers.

Lists become CPU tensors, whatever torch's default device is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qla_kernels.errors import need
from qla_kernels.sm90 import expect_tensors

Tokens = Tensor | Sequence[int]


def token_ids(op: str, name: str, tokens: Tokens, fewest: int = 0) -> Tensor:
    """Returns `tokens` as a tensor [n] of integers: a tensor unchanged, a list as a CPU tensor.

    Raises ValueError if they are not integers in one dimension, or fewer than `fewest`.
    """
    got = f"{name} is {type(tokens).__name__}"
    try:
        ids = as_tensor(tokens)
        got = f"{name} has shape {tuple(ids.shape)} and {ids.dtype}"
        if ids.dim() == 1 and not len(ids) and not isinstance(tokens, Tensor):
            ids = ids.long()  # of an empty list
        fits = ids.dim() == 1 and is_whole(ids) and len(ids) >= fewest
    except (TypeError, ValueError, RuntimeError):  # torch cannot make a tensor of it
        fits = False
    if not fits:
        needs = f"[n] integers{', n at least 1' * fewest}"
        raise ValueError(need(op, got, needs, "pass its token ids"))
    return ids


def as_tensor(x: Tensor | Sequence[int] | Sequence[bool]) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def is_whole(x: Tensor) -> bool:
    """Returns whether x has an integer dtype; bool does not count as one."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def end_to_end(op: str, parts: list[Tensor]) -> Tensor:
    """Returns all tokens concatenated in one tensor; ValueError if the parts' devices differ."""
    places = sorted({str(x.device) for x in parts})
    if len(places) > 1:
        fix = "move them to one; a list counts as the CPU's"
        raise ValueError(need(op, f"tokens on {' and '.join(places)}", "one device", fix))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device="cpu")


def check_positions(op: str, position_ids: Tensor, source: Tensor) -> None:
    """Raises ValueError unless position_ids is [.., *source.shape] on the device of `source`."""
    expect_tensors(op, position_ids=position_ids)
    dims = source.dim()
    if position_ids.dim() < dims or position_ids.shape[position_ids.dim() - dims :] != source.shape:
        got = f"position_ids of shape {tuple(position_ids.shape)}"
        needs = f"[..., {', '.join(map(str, source.shape))}]"
        raise ValueError(need(op, got, needs, "give one for each token that is packed"))
    if position_ids.device != source.device:
        got, needs = f"position_ids on {position_ids.device}", f"{source.device}, as the tokens"
        raise ValueError(need(op, got, needs, "move them"))


def check_targets(op: str, targets: Tensor) -> None:
    """Raises ValueError if targets lie on the CPU and one is negative.

    A negative target would read the logit of another token. Targets on a GPU are not read.
    """
    if targets.is_cpu and len(targets) and int(lowest := targets.min()) < 0:
        needs = "token ids from 0 on"
        fix = "pass the ids themselves, not labels; loss_mask of pack_prefix_tree leaves some out"
        raise ValueError(need(op, f"a target of {int(lowest)}", needs, fix))
