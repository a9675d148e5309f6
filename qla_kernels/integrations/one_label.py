"""`one_label`: packs padded rows so that every packed token predicts at most one target.

The last token of a prompt predicts the first token of every response. Heads that compute
log-probabilities without logits take one label per token, so here each response begins with a copy
of that token. A group of N responses takes N - 1 tokens more than in `pack_padded`; results and
gradients are the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv import PaddedGroup, SharedLayout, padded_groups

IGNORED = -100  # the label of a token that predicts nothing


class LabelledRows(NamedTuple):
    """B padded rows with W' columns of responses, in T packed tokens with one label each."""

    layout: SharedLayout
    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    labels: Tensor  # [T] the token that follows, IGNORED where it is no target
    multiplicity: Tensor  # [T] int32, number of rows that contain the token
    column: Tensor  # [B, W'] the packed token that predicts each token of the responses
    is_target: Tensor  # [B, W'] False for padding
    unpacked: int  # tokens of all rows, without padding

    @property
    def num_tokens(self) -> int:
        """The number of packed tokens, T."""
        return self.layout.num_tokens

    def to_padded(self, x: Tensor) -> Tensor:
        """Copies x [T], a number per packed token, to the padded responses [B, W'].

        Padding gets 0.
        """
        return torch.where(self.is_target, x[self.column], 0)


def by_prompt(groups: Sequence[PaddedGroup], size: int) -> list[list[int]]:
    """Splits the rows of the groups into lists of at most `size` row numbers.

    Rows with the same prompt are next to each other.
    """
    rows = [row for group in groups for row in group.rows]
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def one_label(input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> LabelledRows:
    """Packs padded rows [B, W] so that each packed token predicts at most one target.

    Prompts are padded on the left to prompt_width, responses on the right. Rows with equal prompts
    share the tokens of the prompt. Waits for the device, and raises ValueError as `pack_padded`
    does.
    """
    groups = padded_groups(input_ids, attention_mask, prompt_width)
    rows, width = input_ids.shape
    lengths, parents, firsts, depths, times = _nodes(groups, prompt_width, width)
    sizes, starts = torch.tensor(lengths), torch.tensor([0, *lengths]).cumsum(0)[:-1]
    inside = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    take = inside + torch.tensor(firsts).repeat_interleave(sizes)
    branches = torch.empty(rows, dtype=torch.long)  # where each row's copy of its last prompt token
    order = torch.tensor([row for group in groups for row in group.rows])
    branches[order] = starts[torch.tensor(parents) >= 0]
    targets = torch.empty(rows, dtype=torch.long)
    targets[order] = torch.tensor([n for group in groups for n in group.responses])

    column = torch.arange(width - prompt_width)
    is_target = column < targets[:, None]
    predicts = branches[:, None] + column
    there = input_ids.device
    mask, predicts = is_target.to(there), torch.where(is_target, predicts, 0).to(there)
    labels = input_ids.new_full((len(take),), IGNORED)
    labels[predicts[mask]] = input_ids[:, prompt_width:][mask]
    return LabelledRows(
        layout=SharedLayout.from_forest(lengths, parents, device=there),
        input_ids=input_ids.flatten()[take.to(there)],
        position_ids=(inside + torch.tensor(depths).repeat_interleave(sizes)).to(there),
        labels=labels,
        multiplicity=torch.tensor(times).int().repeat_interleave(sizes).to(there),
        column=predicts,
        is_target=mask,
        unpacked=sum(len(g.rows) * g.prompt + sum(g.responses) for g in groups),
    )


def _nodes(groups: Sequence[PaddedGroup], prompt_width: int, width: int) -> tuple[list[int], ...]:
    """Returns of each node: tokens, parent, first token among those of all rows, depth, rows."""
    lengths, parents, firsts, depths, times = nodes = [], [], [], [], []  # type: ignore[var-annotated]
    for group in groups:
        above, before = len(lengths), group.prompt - 1
        lengths += [before, *(1 + n for n in group.responses)]
        parents += [-1, *[above] * len(group.rows)]
        firsts.append(group.rows[0] * width + prompt_width - group.prompt)
        firsts += [row * width + prompt_width - 1 for row in group.rows]
        depths += [0, *[before] * len(group.rows)]
        times += [len(group.rows), *[1] * len(group.rows)]
    return nodes
