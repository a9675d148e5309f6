"""`pack_prefix_tree`: packs sequences with shared prefixes of any kind into a batch.

Examples are the turns of a dialogue and the branches of a search.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from qla_kernels.dualkv.assemble import Member, Node, assemble
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.plan import run
from qla_kernels.dualkv.tokens import (
    Tokens,
    as_list,
    as_tensor,
    end_to_end,
    on_host,
    token_ids,
)
from qla_kernels.runtime.arguments import described, integer
from qla_kernels.runtime.errors import need

OP = "pack_prefix_tree"
FEWEST = "pass the number of tokens that a shared run has to save"


def pack_prefix_tree(
    sequences: Sequence[Tokens],
    *,
    loss_mask: Sequence[Tensor | Sequence[bool]] | None = None,
    position_ids: Tensor | None = None,
    pad_to: int | None = None,
    fewest_saved: int = 1,
) -> SharedBatch:
    """Packs sequences into a batch that stores each shared prefix once.

    Sequences are numbered by their order in `sequences`, and the batch keeps these numbers.
    Sequences with the same first token form a group (`SharedBatch.group_of`). `SharedBatch.pack` of
    the returned batch takes tensors with one entry for each token of `sequences`, one sequence
    after another. Tokens are compared on the host; tensors on a GPU are copied there.

    Args:
        sequences: token ids, [n] tensors or lists, n at least 1. A sequence may be a prefix of
            another, or equal to another.
        loss_mask: a flag for each token of each sequence, True for targets, whose log-probability
            will be computed. The first token cannot be a target, because no token predicts it. If
            None, all other tokens are targets. A shared token is a target for every sequence whose
            mask marks the token.
        position_ids: [.., number of tokens of all sequences], one sequence after another, for
            models whose positions do not count from 0. A shared token takes the position that the
            first of its sequences has.
        pad_to: the number of packed tokens after padding. Padding tokens have id 0 and see only
            each other.
        fewest_saved: a run of tokens is stored once if this saves at least so many tokens, and
            otherwise for each of its sequences: a short run may cost kernels more than it saves.
            Runs before the first targets of loss_mask are always stored once.

    Returns:
        A `SharedBatch`.

    Raises:
        ValueError: a sequence is empty, token ids or masks have a wrong form, a first token is a
            target, or there are more than pad_to tokens.
    """
    fewest = integer(OP, "fewest_saved", fewest_saved, FEWEST)
    needs, fix = "a list of token ids for each sequence", "pass [[id, ..], ..] or tensors [n]"
    sequences = as_list(OP, "sequences", sequences, needs, fix)
    parts = [token_ids(OP, f"sequence {i}", x, fewest=1) for i, x in enumerate(sequences)]
    source = end_to_end(OP, parts)
    source_on_host = on_host(OP, "sequences", source)
    starts = [0, *accumulate(map(len, parts))]
    texts = [source_on_host[a:b] for a, b in pairwise(starts)]
    masks = _masks(texts, loss_mask)
    prompts = [0] * len(texts)
    if loss_mask is not None:
        prompts = [len(mask) - int(mask.cumsum(0).bool().sum()) for mask in masks]
    nodes, paths = tree_of(texts, starts, fewest, prompts)
    roots: dict[int, int] = {}
    members = [
        Member(path, mask.nonzero()[:, 0], 0, number, roots.setdefault(path[0], len(roots)))
        for number, (path, mask) in enumerate(zip(paths, masks, strict=True))
    ]
    return assemble(OP, source, nodes, members, position_ids, pad_to, source_on_host)


def tree_of(
    texts: Sequence[Tensor],
    starts: Sequence[int],
    fewest_saved: int,
    prompts: Sequence[int],
) -> tuple[list[Node], list[list[int]]]:
    """Builds a prefix tree of token sequences; returns its nodes, and each sequence's path.

    A node is a run of tokens that is stored once. Nodes are in depth-first order, siblings in the
    order in which they first appear. A path lists the indices of a sequence's nodes.

    Args:
        texts: the sequences: token ids, [n] on the CPU.
        starts: index of each sequence's first token among all tokens that the caller passed.
        fewest_saved: a run outside prompts is shared only if this saves at least so many tokens.
        prompts: number of tokens of each sequence's prompt; prompts are shared however
            little that saves.
    """
    nodes: list[Node] = []
    paths: list[list[int]] = [[] for _ in texts]
    waiting = [(branch, 0, -1) for branch in reversed(_branches(range(len(texts)), texts, 0))]
    while waiting:
        together, depth, parent = waiting.pop()
        leader = together[0]
        end = min(_common_prefix(texts[leader], texts[i], depth) for i in together)
        is_short = len(together) > 1 and (len(together) - 1) * (end - depth) < fewest_saved
        prompt = min(end, *(prompts[i] for i in together))
        if is_short and depth < prompt:
            is_short, end = False, prompt
        children = _branches([i for i in together if len(texts[i]) > end], texts, end)
        if is_short:
            alone = [[i] for i in together if len(texts[i]) == end]
            waiting += [(branch, depth, parent) for branch in reversed(alone + children)]
            continue
        for i in together:
            paths[i].append(len(nodes))
        waiting += [(branch, end, len(nodes)) for branch in reversed(children)]
        nodes.append(Node(starts[leader] + depth, end - depth, parent))
    return nodes, paths


def _branches(which: Sequence[int], texts: Sequence[Tensor], depth: int) -> list[list[int]]:
    """Groups the texts `which` by their token at position `depth`; returns the groups."""
    by_token: dict[int, list[int]] = {}
    for i in which:
        by_token.setdefault(int(texts[i][depth]), []).append(i)
    return list(by_token.values())


def _common_prefix(a: Tensor, b: Tensor, depth: int) -> int:
    """Returns the length of the common prefix of a and b, which agree up to `depth`."""
    end = min(len(a), len(b))
    differ = (a[depth:end] != b[depth:end]).nonzero()
    return depth + int(differ[0]) if len(differ) else end


def _masks(
    texts: Sequence[Tensor], loss_mask: Sequence[Tensor | Sequence[bool]] | None
) -> list[Tensor]:
    """Returns a bool CPU tensor for each text, true for targets.

    Raises ValueError if loss_mask has a wrong form, or if a first token is a target.
    """
    if loss_mask is None:
        return [run(0, len(text)) > 0 for text in texts]
    needs, fix = "a flag for each token of each sequence", "pass [[flag, ..], ..] or tensors [n]"
    flags_of_sequences = as_list(OP, "loss_mask", loss_mask, needs, fix)
    masks = [_mask(i, x) for i, x in enumerate(flags_of_sequences)]
    shapes, expected_shapes = [tuple(x.shape) for x in masks], [(len(text),) for text in texts]
    if shapes != expected_shapes:
        got, needs = f"loss_mask has the shapes {shapes}", f"{expected_shapes}, as the sequences"
        raise ValueError(need(OP, got, needs, "pass a flag for each token of each sequence"))
    for i, mask in enumerate(masks):
        if mask[0]:
            got = f"the first token of sequence {i} is a target"
            fix = f"set loss_mask[{i}][0] to 0, or begin the sequence with a BOS token"
            raise ValueError(need(OP, got, "a token before each target, to predict it", fix))
    return masks


def _mask(i: int, flags: Tensor | Sequence[bool]) -> Tensor:
    """Returns the mask of sequence i as a bool CPU tensor; ValueError if it is no list of flags."""
    name = f"loss_mask[{i}]"
    try:
        return on_host(OP, name, as_tensor(flags)) != 0
    except (TypeError, RuntimeError):  # torch cannot make a tensor of it
        fix = "pass a list of bools or a tensor [n]"
        raise ValueError(need(OP, described(name, flags), "a flag for each token", fix)) from None
