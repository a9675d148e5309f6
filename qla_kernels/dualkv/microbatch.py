"""`plan_microbatches`: distributes groups over micro-batches, and micro-batches over ranks.

A micro-batch stores a group's prompt once, so groups are kept together: a group of n responses
that is cut into m pieces stores m prompts and keeps (n - m) / (n - 1) of the tokens saved.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from numbers import Integral, Real
from typing import NamedTuple, TypeVar

from qla_kernels.errors import need

OP = "plan_microbatches"

MOST_RANKS = 1 << 17  # more data-parallel ranks than any job has
TOKEN_COST = 24_000.0  # Qwen3-8B: 193e6 weights of a layer / (2 * 32 heads * 128)

Group = tuple[int, Sequence[int]]  # tokens of the prompt, and of each response
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class Piece(NamedTuple):
    """A group's prompt with some or all of its responses, by their index in the group."""

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
    """Returns for each rank a list of micro-batches, each a list of Pieces.

    A micro-batch has at most max_tokens packed tokens, each piece's prompt included. Every rank
    gets the same number of micro-batches, because collectives need that: the costliest
    micro-batches of several pieces are halved until the number is a multiple of `ranks`; where that
    does not suffice, ranks get empty ones at the end. Each rank's micro-batches are in descending
    order of cost, so that ranks run similar ones at the same time.

    Args:
        groups: (tokens of the prompt, tokens of each response).
        max_tokens: limit of packed tokens in a micro-batch. Only a group with more is cut.
        ranks: number of data-parallel ranks; each gets about the same cost.
        token_cost: cost of a token outside attention, in units of one visible (query, key) pair:
            weights of a layer / (2 H D). 0 counts attention alone.

    Raises:
        ValueError: an argument out of range, or a prompt and a response that together exceed
            max_tokens.
    """
    _check(groups, max_tokens, ranks, token_cost)
    pieces = [piece for g, group in enumerate(groups) for piece in _cut(g, group, max_tokens)]
    tokens = {piece: _tokens(groups, piece) for piece in pieces}
    costs = {p: token_cost * tokens[p] + _pairs(groups, p) for p in pieces}

    def cost(batch: MicroBatch) -> float:
        return sum(costs[piece] for piece in batch)

    batches = _halved(_first_fit(tokens, max_tokens), ranks, costs)
    most = -(-len(batches) // ranks)
    return [
        dealt + [[] for _ in range(most - len(dealt))]
        for dealt in _spread(batches, ranks, most, cost)
    ]


def _check(groups: Sequence[Group], max_tokens: float, ranks: int, token_cost: float) -> None:
    if not isinstance(ranks, Integral) or not 1 <= ranks <= MOST_RANKS:
        needs = f"at least 1 and at most {MOST_RANKS}"
        raise ValueError(need(OP, f"ranks={ranks}", needs, "pass the number of ranks"))
    if not isinstance(max_tokens, Real) or not max_tokens >= 0:
        fix = "pass the tokens that a micro-batch may have"
        raise ValueError(need(OP, f"max_tokens={max_tokens}", "a number", fix))
    if not isinstance(token_cost, Real) or not 0 <= token_cost < float("inf"):
        fix = "leave it out, or see the docstring"
        raise ValueError(need(OP, f"token_cost={token_cost}", "a number from 0 on", fix))
    for g, (prompt, responses) in enumerate(groups):
        if not all(isinstance(n, Integral) and n >= 0 for n in (prompt, *responses)):
            got = f"group {g} has lengths {prompt} and {list(responses)}"
            raise ValueError(need(OP, got, "whole numbers of tokens", "check the lengths"))


def _halved(
    batches: list[MicroBatch], ranks: int, costs: Mapping[Piece, float]
) -> list[MicroBatch]:
    """Splits the costliest micro-batch of several pieces in two until `ranks` divides their number.

    Returns the micro-batches; stops early once each has one piece.
    """
    found = dict(enumerate(batches))
    heap = [(-sum(costs[p] for p in batch), i) for i, batch in found.items() if len(batch) > 1]
    heapify(heap)
    last = len(found)
    while len(found) % ranks and heap:
        widest = found.pop(heappop(heap)[1])
        for half in _spread(widest, 2, len(widest), costs.__getitem__):
            found[last := last + 1] = half
            if len(half) > 1:
                heappush(heap, (-sum(costs[p] for p in half), last))
    return list(found.values())


def _cut(index: int, group: Group, max_tokens: int) -> list[Piece]:
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


def _first_fit(sizes: Mapping[Key, int], room: int) -> list[list[Key]]:
    """Packs items into bins of size `room`: largest first, each into the first bin with room.

    Returns the bins' items. A binary tree of maxima finds the first bin in log time.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    free = [room] * (2 * leaves)  # bin i's room is free[leaves + i]; free[n] = max of 2n, 2n + 1
    bins: list[list[Key]] = [[] for _ in sizes]
    for item in sorted(sizes, key=lambda item: -sizes[item]):
        node = 1
        while node < leaves:
            node = 2 * node if sizes[item] <= free[2 * node] else 2 * node + 1
        bins[node - leaves].append(item)
        free[node] -= sizes[item]
        while node := node // 2:
            free[node] = max(free[2 * node], free[2 * node + 1])
    return [found for found in bins if found]


def _spread(
    items: Sequence[Item], parts: int, most: int, cost: Callable[[Item], float]
) -> list[list[Item]]:
    """Deals items to `parts` lists and returns them.

    The costliest items go first, each to the list of least cost that has fewer than `most` items.
    """
    found: list[list[Item]] = [[] for _ in range(parts)]
    open_parts = [(0.0, i) for i in range(parts)]  # a heap: the lightest comes first
    for item in sorted(items, key=lambda item: -cost(item)):
        load, lightest = heappop(open_parts)
        found[lightest].append(item)
        if len(found[lightest]) < most:
            heappush(open_parts, (load + cost(item), lightest))
    return found


def _tokens(groups: Sequence[Group], piece: Piece) -> int:
    prompt, responses = groups[piece.group]
    return prompt + sum(responses[i] for i in piece.responses)


def _pairs(groups: Sequence[Group], piece: Piece) -> int:
    prompt, responses = groups[piece.group]
    lengths = [responses[i] for i in piece.responses]
    return prompt * (prompt + 1) // 2 + sum(prompt * r + r * (r + 1) // 2 for r in lengths)
