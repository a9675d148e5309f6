"""`pack_padded`: packs the padded [B, W] tensors of RL trainers into a batch.

Prompts are left-padded to one width; responses follow and are padded on the right.
"""

from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.plan import run
from qla_kernels.dualkv.tokens import check_positions, is_whole
from qla_kernels.errors import need
from qla_kernels.sm90 import expect_tensors

OP = "pack_padded"


class PaddedGroup(NamedTuple):
    """Rows with the same prompt. (prompt, responses) is a group as `plan_microbatches` takes it."""

    rows: list[int]
    prompt: int  # tokens
    responses: list[int]  # tokens of each row's response


def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_width: int,
    *,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    verify: bool = True,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
) -> SharedBatch:
    """Returns a packed batch of padded rows (veRL's or TRL's layout), each distinct prompt once.

    All tokens of responses are targets. Sequences are numbered by row. Tensors on a GPU are read
    back, so the host waits once per batch, not per layer.

    Args:
        input_ids: [B, W] rows; the prompt ends at prompt_width, and the response begins there.
        attention_mask: [B, W] nonzero where there is a token: no gap inside a prompt or a response.
        prompt_width: number of columns that hold prompts.
        group_ids: B labels, such as veRL's uid; rows with equal labels share one prompt. If None,
            rows with equal prompt tokens form a group. The rows of a group need not be adjacent.
        verify: compare the prompts of each group's rows, and their position_ids; ValueError if
            they differ.
        position_ids: [.., B, W], used unchanged, for models whose positions do not count from 0.
            If None, each response's positions continue at its prompt's length.
        pad_to: appends padding tokens up to this total. They have id 0 and see only each other.

    Raises:
        ValueError: shapes that do not fit, a row without a prompt, padding inside a prompt or a
            response, or prompts that differ within a group.
    """
    _check_shapes(input_ids, attention_mask, prompt_width, group_ids)
    if position_ids is not None:
        check_positions(OP, position_ids, input_ids)
    ids, width = input_ids.cpu(), input_ids.shape[1]
    groups = padded_groups(ids, attention_mask, prompt_width, group_ids=group_ids, verify=verify)
    if verify and position_ids is not None:
        _compare_positions(groups, position_ids.cpu(), prompt_width)
    nodes: list[Node] = []
    members: list[Member] = []
    for number, group in enumerate(groups):
        above = len(nodes)
        first = group.rows[0] * width + prompt_width - group.prompt
        nodes.append(Node(first, group.prompt, -1))
        for row, response in zip(group.rows, group.responses, strict=True):
            targets = run(group.prompt, group.prompt + response)
            members.append(Member([above, len(nodes)], targets, group.prompt, row, number))
            nodes.append(Node(row * width + prompt_width, response, above))
    return assemble(OP, input_ids, nodes, members, position_ids, pad_to, ids)


def padded_groups(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_width: int,
    *,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    verify: bool = True,
) -> list[PaddedGroup]:
    """Returns the groups that `pack_padded` would form, ordered by their first rows.

    Pass them to `plan_microbatches`. Arguments and errors are those of `pack_padded`.
    """
    _check_shapes(input_ids, attention_mask, prompt_width, group_ids)
    ids, mask = input_ids.cpu(), attention_mask.cpu() != 0
    prompts = mask[:, :prompt_width].sum(1).tolist()
    responses = mask[:, prompt_width:].sum(1).tolist()
    _check_mask(mask, prompt_width, prompts)
    contents = [ids[row, prompt_width - n : prompt_width] for row, n in enumerate(prompts)]
    labels: Sequence[Hashable]
    if group_ids is None:
        labels = [tokens.numpy().tobytes() for tokens in contents]  # hashed, then compared
    else:
        labels = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    rows_of: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows_of.setdefault(label, []).append(row)
    groups = [
        PaddedGroup(rows, prompts[rows[0]], [responses[row] for row in rows])
        for rows in rows_of.values()
    ]
    for number, group in enumerate(groups):
        for row in group.rows[1:]:
            _check_prompts(number, group.rows[0], row, contents, verify)
    return groups


def _check_prompts(number: int, a: int, b: int, contents: Sequence[Tensor], verify: bool) -> None:
    one, other = contents[a], contents[b]
    got = ""
    if len(one) != len(other):
        got = f"have prompts of {len(one)} and {len(other)} tokens"
    elif verify and not torch.equal(one, other):
        got = f"differ at prompt token {int((one != other).nonzero()[0])}"
    if got:
        needs, fix = "one prompt in a group", "give them different group_ids"
        raise ValueError(need(OP, f"group {number}: rows {a} and {b} {got}", needs, fix))


def _compare_positions(groups: Sequence[PaddedGroup], position_ids: Tensor, width: int) -> None:
    for number, group in enumerate(groups):
        prompts = position_ids[..., width - group.prompt : width]
        for row in group.rows[1:]:
            if not torch.equal(prompts[..., group.rows[0], :], prompts[..., row, :]):
                got = f"group {number}: rows {group.rows[0]} and {row} have other position_ids"
                needs, fix = "the same over their prompt", "give them different group_ids"
                raise ValueError(need(OP, got, needs, fix))


def _check_mask(mask: Tensor, prompt_width: int, prompts: Sequence[int]) -> None:
    for row, length in enumerate(prompts):
        if length == 0:
            got, needs = f"row {row} has no prompt", "at least one token left of prompt_width"
            fix = "drop rows of padding, and check prompt_width"
            raise ValueError(need(OP, got, needs, fix))
    steps = mask.int().diff(dim=1)
    rises = steps[:, : prompt_width - 1] < 0  # a prompt goes on after padding
    falls = steps[:, prompt_width:] > 0  # a response does
    for where, what in ((rises, "prompt"), (falls, "response")):
        if where.any():
            row = int(where.nonzero()[0, 0])
            got = f"row {row} has padding inside its {what}"
            needs = "prompts padded on the left and responses on the right"
            raise ValueError(need(OP, got, needs, "check attention_mask and prompt_width"))


def _check_shapes(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_width: int,
    group_ids: Sequence[Hashable] | Tensor | None,
) -> None:
    expect_tensors(OP, input_ids=input_ids, attention_mask=attention_mask)
    if input_ids.dim() != 2 or not is_whole(input_ids):
        got = f"input_ids of shape {tuple(input_ids.shape)} and {input_ids.dtype}"
        raise ValueError(need(OP, got, "[B, W] integers", "pass token ids, a row a sequence"))
    if attention_mask.shape != input_ids.shape:
        got = f"attention_mask of shape {tuple(attention_mask.shape)}"
        needs = f"{tuple(input_ids.shape)}, as input_ids"
        raise ValueError(need(OP, got, needs, "pass the mask of prompts and responses"))
    B, W = input_ids.shape
    if not isinstance(prompt_width, Integral) or not 0 < prompt_width <= W:
        got, needs = f"prompt_width={prompt_width}", f"1 to W={W}"
        raise ValueError(need(OP, got, needs, "pass the columns that prompts were padded to"))
    if group_ids is not None and len(group_ids) != B:
        got = f"{len(group_ids)} group_ids"
        raise ValueError(need(OP, got, f"{B}, one for each row", "pass None to compare prompts"))
