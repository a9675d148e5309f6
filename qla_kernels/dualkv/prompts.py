"""From prompts and their responses to a packed batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, Tokens, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.errors import need

OP = "pack_shared_prompts"


def pack_shared_prompts(
    prompts: Sequence[Tokens],
    responses: Sequence[Sequence[Tokens]],
    *,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
) -> SharedBatch:
    """Each prompt once, followed by its responses; all tokens of responses are targets.

    Args:
        prompts: token ids of each group's prompt, at least one: [P] tensors or lists.
        responses: of each group, the token ids of its responses; any number of any length, 0 too.
        position_ids: [.., T] in packed order, for models that do not count from 0; restarted in
            each response at the prompt's length if None.
        pad_to: add tokens up to this many. They have id 0 and see only each other.

    Sequences are numbered through all groups in the order given. `batch.pack` takes tensors over
    all tokens, group after group, the prompt first.
    """
    if len(prompts) != len(responses):
        got = f"{len(prompts)} prompts and {len(responses)} lists of responses"
        raise ValueError(need(OP, got, "a list for each prompt", "pass [] where there is none"))
    nodes: list[Node] = []
    members: list[Member] = []
    parts: list[Tensor] = []
    for group, (prompt, answers) in enumerate(zip(prompts, responses, strict=True)):
        above, length = len(nodes), len(prompt)
        if length == 0:
            got, needs = f"the prompt of group {group} is empty", "at least one token"
            fix = "begin it with a BOS token, which then predicts each response's first"
            raise ValueError(need(OP, got, needs, fix))
        for tokens in (prompt, *answers):
            first = nodes[-1].first + nodes[-1].length if nodes else 0
            nodes.append(Node(first, len(tokens), -1 if len(nodes) == above else above))
            parts.append(_ids(tokens))
        for i, answer in enumerate(answers, above + 1):
            targets = torch.arange(length, length + len(answer))
            members.append(Member([above, i], targets, length, len(members), group))
    source = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
    return assemble(OP, source, nodes, members, position_ids, pad_to)


def _ids(tokens: Tokens) -> Tensor:
    ids = torch.as_tensor(tokens, dtype=None if len(tokens) else torch.long)
    if ids.dim() != 1 or ids.is_floating_point():
        got = f"tokens of shape {tuple(ids.shape)} and {ids.dtype}"
        raise ValueError(need(OP, got, "one dimension of integers", "pass token ids"))
    return ids
