"""`plan_microbatches`: distributes groups over micro-batches, and micro-batches over ranks.

Each piece of a group stores the prompt again, so groups are split as little as possible: n
responses in m pieces save (n - m) / (n - 1) of what they save in one piece.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

from qla_kernels.dualkv.tokens import Group, group_lengths
from qla_kernels.runtime.arguments import integer, number
from qla_kernels.runtime.errors import need

OP = "plan_microbatches"

MOST_RANKS = 1 << 17  # more data-parallel ranks than any job has
TOKEN_COST = 24_000.0  # Qwen3-8B: 193e6 weights of a layer / (2 * 32 heads * 128)

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class Piece(NamedTuple):
    """A record: a prompt with some or all of its responses, as a part of a micro-batch.

    Attributes:
        group: index of the prompt in the argument `groups` of `plan_microbatches`.
        responses: which of this prompt's responses the part has, as indices.
    """

    group: int
    responses: tuple[int, ...]


MicroBatch = list[Piece]


def plan_microbatches(
    groups: Sequence[Group],
    max_tokens: int,
    *,
    ranks: int = 1,
    token_cost: float = TOKEN_COST,
) -> list[list[MicroBatch]]:
    """Distributes groups over micro-batches and ranks; returns each rank's list of micro-batches.

    A group is a prompt with its responses; a Piece is the prompt with some of them. A micro-batch
    is a list of Pieces with at most max_tokens tokens, each prompt counted once per Piece. Every
    rank gets the same number of micro-batches, because collectives need equal numbers. To reach a
    multiple of `ranks`, the costliest micro-batches with several Pieces are halved; if this does
    not suffice, some ranks get empty micro-batches at the end. Each rank runs its costliest
    micro-batch first, so that ranks run micro-batches of similar cost at the same time.

    Args:
        groups: pairs (number of tokens of the prompt, [number of tokens of each response]).
        max_tokens: the most tokens of a micro-batch. Only groups that are larger are split.
        ranks: number of data-parallel ranks; each gets about the same cost.
        token_cost: cost of a token outside attention, where one (query, key) pair of attention
            costs 1: the number of weights of a layer / (2 * query heads * head size). 0 counts
            attention alone.

    Raises:
        ValueError: an argument has a wrong type or is out of range, or a prompt and a response
            together exceed max_tokens.
    """
    ranks, limit, token_cost = _settings(ranks, max_tokens, token_cost)
    groups = group_lengths(OP, groups)
    pieces = [piece for g, group in enumerate(groups) for piece in _cut(g, group, limit)]
    tokens = {piece: _tokens(groups, piece) for piece in pieces}
    costs = {p: token_cost * tokens[p] + _pairs(groups, p) for p in pieces}

    def cost(batch: MicroBatch) -> float:
        return sum(costs[piece] for piece in batch)

    batches = _halved(_first_fit(tokens, limit), ranks, costs)
    most = -(-len(batches) // ranks)
    return [
        dealt + [[] for _ in range(most - len(dealt))]
        for dealt in _spread(batches, ranks, most, cost)
    ]


def _settings(ranks: int, max_tokens: float, token_cost: float) -> tuple[int, float, float]:
    """Returns the arguments as numbers; ValueError if one is no number or out of range.

    max_tokens may be infinite.
    """
    fix = "pass the number of data-parallel ranks"
    ranks = integer(OP, "ranks", ranks, fix)
    if not 1 <= ranks <= MOST_RANKS:
        needs = f"at least 1 and at most {MOST_RANKS}"
        raise ValueError(need(OP, f"ranks={ranks}", needs, fix))
    fix = "pass the number of tokens that a micro-batch may have"
    limit = number(OP, "max_tokens", max_tokens, fix)
    if not limit >= 0:
        raise ValueError(need(OP, f"max_tokens={max_tokens}", "0 or more", fix))
    fix = "leave it out, or pass weights of a layer / (2 H D)"
    token_cost = number(OP, "token_cost", token_cost, fix)
    if not 0 <= token_cost < float("inf"):
        raise ValueError(need(OP, f"token_cost={token_cost}", "0 or more, and finite", fix))
    return ranks, max_tokens if isinstance(max_tokens, int) else limit, token_cost


def _halved(
    batches: list[MicroBatch], ranks: int, costs: Mapping[Piece, float]
) -> list[MicroBatch]:
    """Splits the costliest micro-batch of several pieces in two until `ranks` divides their number.

    Returns the micro-batches; stops early once each has one piece.
    """
    numbered = dict(enumerate(batches))
    heap = [(-sum(costs[p] for p in batch), i) for i, batch in numbered.items() if len(batch) > 1]
    heapify(heap)
    last = len(numbered)
    while len(numbered) % ranks and heap:
        costliest = numbered.pop(heappop(heap)[1])
        for half in _spread(costliest, 2, len(costliest), costs.__getitem__):
            numbered[last := last + 1] = half
            if len(half) > 1:
                heappush(heap, (-sum(costs[p] for p in half), last))
    return list(numbered.values())


def _cut(index: int, group: Group, max_tokens: float) -> list[Piece]:
    """Returns the group as one piece, or as pieces of at most max_tokens.

    Raises ValueError if the prompt and the longest response exceed max_tokens.
    """
    prompt, responses = group
    if prompt + sum(responses) <= max_tokens:
        return [Piece(index, tuple(range(len(responses))))]
    longest = max(responses, default=0)
    if prompt + longest > max_tokens:
        got = f"group {index} has a prompt of {prompt} and a response of {longest} tokens"
        fix = f"raise max_tokens to {prompt + longest}, or shorten them"
        raise ValueError(need(OP, got, f"no more than max_tokens={max_tokens} together", fix))
    parts = _first_fit(dict(enumerate(responses)), max_tokens - prompt)
    return [Piece(index, tuple(sorted(part))) for part in parts]


def _first_fit(sizes: Mapping[Key, int], size: float) -> list[list[Key]]:
    """Packs items into bins of `size`: largest first, each into the first bin that has space.

    Returns the bins' items. A binary tree of maxima finds the first bin in log time.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    free = [size] * (2 * leaves)  # bin i has free[leaves + i] left; free[n] = max of 2n, 2n + 1
    bins: list[list[Key]] = [[] for _ in sizes]
    for item in sorted(sizes, key=lambda item: -sizes[item]):
        node = 1
        while node < leaves:
            node = 2 * node if sizes[item] <= free[2 * node] else 2 * node + 1
        bins[node - leaves].append(item)
        free[node] -= sizes[item]
        while node := node // 2:
            free[node] = max(free[2 * node], free[2 * node + 1])
    return [items for items in bins if items]


def _spread(
    items: Sequence[Item], parts: int, most: int, cost: Callable[[Item], float]
) -> list[list[Item]]:
    """Deals items to `parts` lists and returns them.

    The costliest items go first, each to the list of least cost that has fewer than `most` items.
    """
    lists: list[list[Item]] = [[] for _ in range(parts)]
    open_parts = [(0.0, i) for i in range(parts)]  # a heap: the lightest comes first
    for item in sorted(items, key=lambda item: -cost(item)):
        load, lightest = heappop(open_parts)
        lists[lightest].append(item)
        if len(lists[lightest]) < most:
            heappush(open_parts, (load + cost(item), lightest))
    return lists


def _tokens(groups: Sequence[Group], piece: Piece) -> int:
    """Returns the packed tokens of a piece: its prompt and its responses."""
    prompt, responses = groups[piece.group]
    return prompt + sum(responses[i] for i in piece.responses)


def _pairs(groups: Sequence[Group], piece: Piece) -> int:
    """Returns the visible (query, key) pairs of a piece, per head."""
    prompt, responses = groups[piece.group]
    lengths = [responses[i] for i in piece.responses]
    return prompt * (prompt + 1) // 2 + sum(prompt * r + r * (r + 1) // 2 for r in lengths)
