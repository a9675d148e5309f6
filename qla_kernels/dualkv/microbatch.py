"""Which groups go into which micro-batch, and which micro-batch to which rank.

A micro-batch holds a group's prompt once, so groups are kept together: one that is cut into m
pieces of n responses pays for m prompts and keeps (n - m) / (n - 1) of the tokens it saved.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from qla_kernels.errors import need

OP = "plan_microbatches"

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
    """Micro-batches of each rank, of at most max_tokens packed tokens, each prompt charged once.

    Every rank gets as many as the others, because collectives want that: micro-batches are halved
    between groups until their number divides, and where that is not enough the last are empty. A
    rank's own come costliest first, so that those which run at a time are alike.

    Args:
        groups: (tokens of the prompt, tokens of each response).
        max_tokens: of a micro-batch. A group is cut only if it has more.
        ranks: data-parallel ranks, to which about the same work is given.
        token_cost: what a token costs outside attention, in visible (query, key) pairs: weights of
            a layer / (2 H D). 0 counts attention alone.
    """
    if ranks < 1:
        raise ValueError(need(OP, f"ranks={ranks}", "at least 1", "pass the number of ranks"))
    pieces = [piece for g, group in enumerate(groups) for piece in _cut(g, group, max_tokens)]
    tokens = {piece: _tokens(groups, piece) for piece in pieces}
    costs = {p: token_cost * tokens[p] + _pairs(groups, p) for p in pieces}

    def cost(batch: MicroBatch) -> float:
        return sum(costs[piece] for piece in batch)

    batches = _first_fit(tokens, max_tokens)
    while len(batches) % ranks and any(len(batch) > 1 for batch in batches):
        widest = max((batch for batch in batches if len(batch) > 1), key=cost)
        batches.remove(widest)
        batches += _spread(widest, 2, len(widest), costs.__getitem__)
    batches += [[] for _ in range(-len(batches) % ranks)]
    return _spread(batches, ranks, len(batches) // ranks, cost)


def _cut(index: int, group: Group, max_tokens: int) -> list[Piece]:
    """The group whole, or in pieces that fit."""
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
    """Largest first, each into the first bin that has room for it."""
    bins: list[list[Key]] = []
    free: list[int] = []
    for item in sorted(sizes, key=lambda item: -sizes[item]):
        fits = next((i for i, left in enumerate(free) if sizes[item] <= left), len(bins))
        if fits == len(bins):
            bins.append([])
            free.append(room)
        bins[fits].append(item)
        free[fits] -= sizes[item]
    return bins


def _spread(
    items: Sequence[Item], parts: int, most: int, cost: Callable[[Item], float]
) -> list[list[Item]]:
    """Costliest first, each to the lightest part that has fewer than `most` items."""
    found: list[list[Item]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(items, key=lambda item: -cost(item)):
        lightest = min((i for i in range(parts) if len(found[i]) < most), key=loads.__getitem__)
        found[lightest].append(item)
        loads[lightest] += cost(item)
    return found


def _tokens(groups: Sequence[Group], piece: Piece) -> int:
    prompt, responses = groups[piece.group]
    return prompt + sum(responses[i] for i in piece.responses)


def _pairs(groups: Sequence[Group], piece: Piece) -> int:
    prompt, responses = groups[piece.group]
    lengths = [responses[i] for i in piece.responses]
    return prompt * (prompt + 1) // 2 + sum(prompt * r + r * (r + 1) // 2 for r in lengths)
