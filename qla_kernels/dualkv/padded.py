"""`pack_padded`: packs the padded [B, W] tensors of RL trainers into a batch.

Prompts are left-padded to one width; responses follow and are padded on the right.
"""

import functools
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.plan import run
from qla_kernels.dualkv.prefix_tree import FEWEST, tree_of
from qla_kernels.dualkv.tokens import as_list, check_positions, is_whole, on_host
from qla_kernels.runtime.arguments import described, flag, integer
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import expect_tensors

OP = "pack_padded"

log = logging.getLogger("qla_kernels")


class PaddedGroup(NamedTuple):
    """A record: the rows of a padded batch that have the same prompt.

    The pair (prompt, responses) is one of the `groups` that `plan_microbatches` takes.

    Attributes:
        rows: numbers of the rows.
        prompt: number of tokens of the prompt, without padding.
        responses: number of tokens of each row's response, without padding.
    """

    rows: list[int]
    prompt: int
    responses: list[int]


def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_width: int,
    *,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    verify: bool = True,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
    fewest_saved: int | None = None,
) -> SharedBatch:
    """Packs padded rows, as in veRL and TRL, into a batch that stores each distinct prompt once.

    All tokens of responses are targets: their log-probability will be computed. Sequences have the
    numbers of their rows. Tensors on a GPU are copied to the host, which waits for the GPU once per
    batch.

    Args:
        input_ids: [B, W] rows; prompts end before column prompt_width, and responses begin at it.
        attention_mask: [B, W], 0 for padding, without gaps inside a prompt or a response.
        prompt_width: number of columns of prompts.
        group_ids: B labels, such as veRL's uid; rows with equal labels share one prompt. If None,
            rows with equal prompt tokens form a group, and a warning is logged once if all prompts
            differ. The rows of a group need not be adjacent.
        verify: raise ValueError if the rows of a group differ in prompt tokens or position_ids.
        position_ids: [.., B, W], used unchanged, for models whose positions do not count from 0.
            If None, the positions of a response continue from its prompt.
        pad_to: the number of packed tokens after padding. Padding tokens have id 0 and see only
            each other.
        fewest_saved: None: rows share prompts alone. A number: rows also share beginnings of
            responses and of different prompts, as branches and turns of an agent have them, where
            this saves at least so many tokens (see `pack_prefix_tree`).

    Returns:
        A `SharedBatch`.

    Raises:
        ValueError: shapes do not fit, a row has no prompt, a prompt or response has padding inside,
            or prompts differ within a group.
    """
    prompt_width = _check_shapes(input_ids, attention_mask, prompt_width)
    if position_ids is not None:
        check_positions(OP, position_ids, input_ids)
    ids, width = on_host(OP, "input_ids", input_ids), input_ids.shape[1]
    groups = padded_groups(ids, attention_mask, prompt_width, group_ids=group_ids, verify=verify)
    if group_ids is None and 1 < len(groups) == len(ids):
        _warn(len(ids), prompt_width)
    if verify and position_ids is not None:
        _compare_positions(groups, position_ids.cpu(), prompt_width)
    nodes: list[Node] = []
    members: list[Member] = []
    if fewest_saved is not None:
        fewest = integer(OP, "fewest_saved", fewest_saved, FEWEST)
        nodes, members = _tree(groups, ids, prompt_width, fewest)
        return assemble(OP, input_ids, nodes, members, position_ids, pad_to, ids)
    for number, group in enumerate(groups):
        above = len(nodes)
        first = group.rows[0] * width + prompt_width - group.prompt
        nodes.append(Node(first, group.prompt, -1))
        for row, response in zip(group.rows, group.responses, strict=True):
            targets = run(group.prompt, group.prompt + response)
            members.append(Member([above, len(nodes)], targets, group.prompt, row, number))
            nodes.append(Node(row * width + prompt_width, response, above))
    return assemble(OP, input_ids, nodes, members, position_ids, pad_to, ids)


def _tree(
    groups: Sequence[PaddedGroup], ids: Tensor, prompt_width: int, fewest_saved: int
) -> tuple[list[Node], list[Member]]:
    """Returns the prefix tree of all rows, and the rows as its members, in the order of groups."""
    rows = [
        (row, number, group.prompt, response)
        for number, group in enumerate(groups)
        for row, response in zip(group.rows, group.responses, strict=True)
    ]
    texts = [ids[row, prompt_width - p : prompt_width + r] for row, _, p, r in rows]
    starts = [row * ids.shape[1] + prompt_width - p for row, _, p, _ in rows]
    nodes, paths = tree_of(texts, starts, fewest_saved, [p for _, _, p, _ in rows])
    members = [
        Member(path, run(p, p + r), p, row, number)
        for path, (row, number, p, r) in zip(paths, rows, strict=True)
    ]
    return nodes, members


def padded_groups(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_width: int,
    *,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    verify: bool = True,
) -> list[PaddedGroup]:
    """Finds the rows of a padded batch that have the same prompt; returns a list of groups.

    Groups are ordered by their first row. Pass [(group.prompt, group.responses), ..] to
    `plan_microbatches`. Tensors on a GPU are copied to the host.

    Args:
        input_ids: [B, W] rows; prompts end before column prompt_width, and responses begin at it.
        attention_mask: [B, W], 0 for padding, without gaps inside a prompt or a response.
        prompt_width: number of columns of prompts.
        group_ids: B labels; rows with equal labels share one prompt. None: rows with equal prompt
            tokens do.
        verify: raise ValueError if the rows of a group differ in prompt tokens.

    Raises:
        ValueError: shapes do not fit, a row has no prompt, a prompt or response has padding inside,
            or prompts differ within a group.
    """
    prompt_width = _check_shapes(input_ids, attention_mask, prompt_width)
    verify = flag(OP, "verify", verify)
    ids = on_host(OP, "input_ids", input_ids)
    mask = on_host(OP, "attention_mask", attention_mask) != 0
    prompts = mask[:, :prompt_width].sum(1).tolist()
    responses = mask[:, prompt_width:].sum(1).tolist()
    _check_mask(mask, prompt_width, prompts)
    prompt_ids = [ids[row, prompt_width - n : prompt_width] for row, n in enumerate(prompts)]
    labels: list[Hashable]
    if group_ids is None:
        labels = [tokens.numpy().tobytes() for tokens in prompt_ids]  # hashed, then compared
    else:
        labels = _labels(group_ids, len(ids))
    rows_by_label: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows_by_label.setdefault(label, []).append(row)
    groups = [
        PaddedGroup(rows, prompts[rows[0]], [responses[row] for row in rows])
        for rows in rows_by_label.values()
    ]
    for number, group in enumerate(groups):
        for row in group.rows[1:]:
            _check_prompts(number, group.rows[0], row, prompt_ids, verify)
    return groups


@functools.cache  # once, and not for every batch
def _warn(rows: int, prompt_width: int) -> None:
    """Warns that no two rows share a prompt, for example because prompt_width is too large."""
    got = f"no two of {rows} rows have the same tokens left of prompt_width={prompt_width}"
    fix = "check prompt_width; pass group_ids if this is meant"
    log.warning("%s", need(OP, got, "rows that share a prompt, or nothing is saved", fix))


def _labels(group_ids: Any, num_rows: int) -> list[Hashable]:
    """Returns the label of each row; ValueError unless group_ids has one label for each row."""
    needs, fix = (
        f"{num_rows}, one for each row",
        "pass a list of labels, or None to compare prompts",
    )
    if isinstance(group_ids, Mapping) or (isinstance(group_ids, Tensor) and group_ids.dim() != 1):
        raise ValueError(need(OP, described("group_ids", group_ids), f"labels, {needs}", fix))
    if isinstance(group_ids, Tensor):
        group_ids = on_host(OP, "group_ids", group_ids).tolist()
    labels = as_list(OP, "group_ids", group_ids, f"labels, {needs}", fix)
    if len(labels) != num_rows:
        raise ValueError(need(OP, f"there are {len(labels)} group_ids", needs, fix))
    for row, label in enumerate(labels):
        try:
            hash(label)
        except TypeError:
            got = described(f"group_ids[{row}]", label)
            raise ValueError(need(OP, got, "a label that can be hashed", fix)) from None
    return labels


def _check_prompts(number: int, a: int, b: int, prompt_ids: Sequence[Tensor], verify: bool) -> None:
    """Raises ValueError if rows a and b of a group have prompts of other lengths or, with `verify`,
    of other tokens.
    """
    one, other = prompt_ids[a], prompt_ids[b]
    got = ""
    if len(one) != len(other):
        got = f"have prompts of {len(one)} and {len(other)} tokens"
    elif verify and not torch.equal(one, other):
        got = f"differ at prompt token {int((one != other).nonzero()[0])}"
    if got:
        needs, fix = "one prompt in a group", "give them different group_ids"
        raise ValueError(need(OP, f"group {number}: rows {a} and {b} {got}", needs, fix))


def _compare_positions(groups: Sequence[PaddedGroup], position_ids: Tensor, width: int) -> None:
    """Raises ValueError if rows of a group have different position_ids over their prompt."""
    for number, group in enumerate(groups):
        prompts = position_ids[..., width - group.prompt : width]
        for row in group.rows[1:]:
            if not torch.equal(prompts[..., group.rows[0], :], prompts[..., row, :]):
                got = f"group {number}: rows {group.rows[0]} and {row} have other position_ids"
                needs, fix = "equal positions of their prompt", "give them different group_ids"
                raise ValueError(need(OP, got, needs, fix))


def _check_mask(mask: Tensor, prompt_width: int, prompts: Sequence[int]) -> None:
    """Raises ValueError if a row has no prompt, or padding inside its prompt or response.

    mask is bool [B, W]; `prompts` are the tokens of each row's prompt.
    """
    for row, length in enumerate(prompts):
        if length == 0:
            got, needs = f"row {row} has no prompt", "at least one token left of prompt_width"
            fix = "remove rows that are all padding, and check prompt_width"
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


def _check_shapes(input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> int:
    """Returns prompt_width as an int.

    Raises ValueError unless input_ids and attention_mask are [B, W] and prompt_width is 1 to W.
    """
    expect_tensors(OP, input_ids=input_ids, attention_mask=attention_mask)
    if input_ids.dim() != 2 or not is_whole(input_ids):
        got = described("input_ids", input_ids)
        raise ValueError(need(OP, got, "[B, W] integers", "pass a row of token ids a sequence"))
    if attention_mask.shape != input_ids.shape:
        got = f"attention_mask has shape {tuple(attention_mask.shape)}"
        needs = f"{tuple(input_ids.shape)}, as input_ids"
        raise ValueError(need(OP, got, needs, "pass the mask of prompts and responses"))
    fix = "pass the number of columns that prompts were padded to"
    width = integer(OP, "prompt_width", prompt_width, fix)
    if not 0 < width <= input_ids.shape[1]:
        needs = f"1 to W={input_ids.shape[1]}"
        raise ValueError(need(OP, f"prompt_width={width}", needs, fix))
    return width
