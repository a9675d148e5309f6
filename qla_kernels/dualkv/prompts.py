"""`pack_shared_prompts`: packs prompts and their responses into a batch."""

from collections.abc import Sequence

from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.plan import run
from qla_kernels.dualkv.tokens import Tokens, as_list, end_to_end, token_ids
from qla_kernels.runtime.errors import need

OP = "pack_shared_prompts"


def pack_shared_prompts(
    prompts: Sequence[Tokens],
    responses: Sequence[Sequence[Tokens]],
    *,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
) -> SharedBatch:
    """Packs prompts and their responses into a batch: each prompt once, then its responses.

    All tokens of responses are targets: their log-probability will be computed. For targets in
    prompts use `pack_prefix_tree`. A sequence is a prompt with one response; sequences are numbered
    in the order of the arguments. `SharedBatch.pack` of the returned batch takes tensors with one
    entry per token, prompt after prompt, and after each prompt its responses.

    Args:
        prompts: token ids of each group's prompt, [P] tensors or lists, P at least 1.
        responses: for each group, a list of the token ids of its responses. Both the list and a
            response may be empty.
        position_ids: [.., T] in packed order, for models whose positions do not count from 0. If
            None, the positions of a response continue from its prompt.
        pad_to: the number of packed tokens after padding. Padding tokens have id 0 and see only
            each other.

    Returns:
        A `SharedBatch`.

    Raises:
        ValueError: a prompt is empty, token ids have a wrong form, or there are more than pad_to
            tokens.
    """
    needs, fix = "a list of token ids for each group", "pass a list or a tensor [P] for each prompt"
    prompts = as_list(OP, "prompts", prompts, needs, fix)
    needs, fix = "a list of responses for each prompt", "pass [] for a prompt without responses"
    responses = as_list(OP, "responses", responses, needs, fix)
    if len(prompts) != len(responses):
        got = f"there are {len(prompts)} prompts and {len(responses)} lists of responses"
        raise ValueError(need(OP, got, needs, fix))
    nodes: list[Node] = []
    members: list[Member] = []
    parts: list[Tensor] = []
    total = 0
    for group, (prompt, answers) in enumerate(zip(prompts, responses, strict=True)):
        ids = token_ids(OP, f"the prompt of group {group}", prompt)
        above, length = len(nodes), len(ids)
        if length == 0:
            got, needs = f"the prompt of group {group} is empty", "at least one token"
            fix = "begin it with a BOS token, which predicts the first token of each response"
            raise ValueError(need(OP, got, needs, fix))
        nodes.append(Node(total, length, -1))
        parts.append(ids)
        total += length
        name = f"the responses of group {group}"
        for i, answer in enumerate(as_list(OP, name, answers, needs, fix)):
            ids = token_ids(OP, f"response {i} of group {group}", answer)
            targets = run(length, length + len(ids))
            members.append(Member([above, len(nodes)], targets, length, len(members), group))
            nodes.append(Node(total, len(ids), above))
            parts.append(ids)
            total += len(ids)
    return assemble(OP, end_to_end(OP, parts), nodes, members, position_ids, pad_to)
