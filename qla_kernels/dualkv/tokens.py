"""Checks of the token ids, positions and lengths that callers pass to packers and planners.

Lists become CPU tensors, whatever torch's default device is.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.arguments import described
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import expect_tensors

Tokens = Tensor | Sequence[int]
Group = tuple[int, Sequence[int]]  # tokens of the prompt, and of each response


def as_list(op: str, name: str, values: Iterable[Any], needs: str, fix: str) -> list[Any]:
    """Returns the items of `values` as a list; raises ValueError if `values` is not iterable."""
    try:
        return list(values)
    except TypeError:
        raise ValueError(need(op, described(name, values), needs, fix)) from None


def group_lengths(op: str, groups: Iterable[Group]) -> list[tuple[int, list[int]]]:
    """Returns each group as (length of the prompt, [length of each response]), as ints.

    Raises ValueError if a group has another form, or if a length is not an integer of at least 0.
    """
    needs, fix = "pairs of lengths", "pass (tokens of the prompt, [tokens of each response])"
    pairs = []
    for number, group in enumerate(as_list(op, "groups", groups, needs, fix)):
        try:
            prompt, responses = group
            responses = list(responses)
        except (TypeError, ValueError):
            got = described(f"group {number}", group)
            raise ValueError(need(op, got, needs, fix)) from None
        try:
            first, *rest = map(operator.index, (prompt, *responses))
        except TypeError:
            first, rest = -1, []
        if min(first, *rest, 0) < 0:
            got = f"group {number} has lengths {prompt} and {responses}"
            needs = "whole numbers of tokens, 0 or more"
            raise ValueError(need(op, got, needs, "pass the number of tokens of each"))
        pairs.append((first, rest))
    return pairs


def on_host(op: str, name: str, x: Tensor) -> Tensor:
    """Returns a copy of x on the CPU, or x itself if x is on the CPU; waits for a GPU.

    Raises ValueError for a tensor on the device meta, which has no values. `name` is the name of
    the argument in the error.
    """
    if x.is_meta:
        fix = f"pass {name} on cpu or cuda"
        raise ValueError(need(op, f"{name} is on meta", "a tensor with values", fix))
    return x.cpu()


def token_ids(op: str, name: str, tokens: Tokens, fewest: int = 0) -> Tensor:
    """Returns `tokens` as an integer tensor [n]: a tensor unchanged, a list as a CPU tensor.

    Raises ValueError if `tokens` are not integers in one dimension, or fewer than `fewest`.
    """
    got = described(name, tokens)
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
        raise ValueError(need(op, got, needs, "pass a list or a tensor of token ids"))
    return ids


def as_tensor(x: Tensor | Sequence[int] | Sequence[bool]) -> Tensor:
    """Returns a tensor unchanged, and any other sequence as a CPU tensor.

    Raises the errors of torch.as_tensor.
    """
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def is_whole(x: Tensor) -> bool:
    """Returns whether the dtype of x is an integer dtype; bool is not an integer dtype."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def end_to_end(op: str, parts: list[Tensor]) -> Tensor:
    """Concatenates the parts into one tensor; raises ValueError unless all are on one device."""
    places = sorted({str(x.device) for x in parts})
    if len(places) > 1:
        fix = "move them to one device; a list is taken as a CPU tensor"
        raise ValueError(need(op, f"tokens are on {' and '.join(places)}", "one device", fix))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device="cpu")


def check_positions(op: str, position_ids: Tensor, source: Tensor) -> None:
    """Raises ValueError unless position_ids is [.., *source.shape] on the device of `source`."""
    expect_tensors(op, position_ids=position_ids)
    dims = source.dim()
    if position_ids.dim() < dims or position_ids.shape[position_ids.dim() - dims :] != source.shape:
        got = f"position_ids has shape {tuple(position_ids.shape)}"
        needs = f"[..., {', '.join(map(str, source.shape))}]"
        raise ValueError(need(op, got, needs, "pass one position for each token that is packed"))
    if position_ids.device != source.device:
        got, needs = f"position_ids is on {position_ids.device}", f"{source.device}, as the tokens"
        raise ValueError(need(op, got, needs, f"pass position_ids.to({str(source.device)!r})"))


def check_targets(op: str, targets: Tensor) -> None:
    """Raises ValueError if targets are on the CPU and one of the targets is negative.

    A negative target would read the logit of another token. Targets on a GPU are not checked.
    """
    if targets.is_cpu and len(targets) and int(lowest := targets.min()) < 0:
        needs = "targets that are token ids, 0 or more"
        fix = "pass token ids, not labels; to leave tokens out, use loss_mask of pack_prefix_tree"
        raise ValueError(need(op, f"a target is {int(lowest)}", needs, fix))
