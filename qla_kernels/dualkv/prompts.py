"""`pack_shared_prompts`: packs prompts and their responses into a batch."""

from collections.abc import Sequence

from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.plan import run
from qla_kernels.dualkv.tokens import Tokens, end_to_end, token_ids
from qla_kernels.errors import need

OP = "pack_shared_prompts"


def pack_shared_prompts(
    prompts: Sequence[Tokens],
    responses: Sequence[Sequence[Tokens]],
    *,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
) -> SharedBatch:
    """Returns a packed batch: each prompt once, followed by its responses.

    All tokens of responses are targets. Sequences are numbered through all groups in the order
    given. `batch.pack` takes tensors over all tokens, group after group, the prompt first.

    Args:
        prompts: token ids of each group's prompt, at least one token: [P] tensors or lists.
        responses: for each group the token ids of its responses; any number of responses of any
            length, both of which may be 0.
        position_ids: [.., T] in packed order, for models whose positions do not count from 0. If
            None, each response's positions continue at its prompt's length.
        pad_to: appends padding tokens up to this total. They have id 0 and see only each other.

    Raises:
        ValueError: an empty prompt, token ids of another form, or more than pad_to tokens.
    """
    if len(prompts) != len(responses):
        got = f"{len(prompts)} prompts and {len(responses)} lists of responses"
        raise ValueError(need(OP, got, "a list for each prompt", "pass [] where there is none"))
    nodes: list[Node] = []
    members: list[Member] = []
    parts: list[Tensor] = []
    total = 0
    for group, (prompt, answers) in enumerate(zip(prompts, responses, strict=True)):
        ids = token_ids(OP, f"the prompt of group {group}", prompt)
        above, length = len(nodes), len(ids)
        if length == 0:
            got, needs = f"the prompt of group {group} is empty", "at least one token"
            fix = "begin it with a BOS token, which then predicts each response's first"
            raise ValueError(need(OP, got, needs, fix))
        nodes.append(Node(total, length, -1))
        parts.append(ids)
        total += length
        for i, answer in enumerate(answers):
            ids = token_ids(OP, f"response {i} of group {group}", answer)
            targets = run(length, length + len(ids))
            members.append(Member([above, len(nodes)], targets, length, len(members), group))
            nodes.append(Node(total, len(ids), above))
            parts.append(ids)
            total += len(ids)
    return assemble(OP, end_to_end(OP, parts), nodes, members, position_ids, pad_to)
