"""The packed batch by plain loops: what every packer has to return for its nodes and sequences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.fuzz.definitions import forest_mask


class Node(NamedTuple):
    """Tokens of the caller, counted through all that were passed, that lie together."""

    source: list[int]
    parent: int  # among the nodes before it, or -1


class Member(NamedTuple):
    """One of the caller's sequences, in packed order."""

    path: list[int]  # nodes
    targets: list[int]  # which of its tokens are predicted
    first_column: int  # the token whose column is 0
    number: int  # the caller's
    group: int


def check_batch(
    batch: Any,
    source: Tensor,
    positions: Tensor | None,
    nodes: Sequence[Node],
    members: Sequence[Member],
    pad_to: int | None,
) -> None:
    """Every field of a batch; source [n] are the caller's tokens, positions [.., n] theirs."""
    lengths, parents = [len(n.source) for n in nodes], [n.parent for n in nodes]
    T = sum(lengths) if pad_to is None else pad_to
    padding = T - sum(lengths)
    take = [i for node in nodes for i in node.source] + [-1] * padding
    first = [sum(lengths[:n]) for n in range(len(nodes))]
    depth: list[int] = []  # of a node's first token in its sequences
    for node in nodes:
        above = 0 if node.parent < 0 else depth[node.parent] + lengths[node.parent]
        depth.append(above)
    paths = [[t for n in m.path for t in range(first[n], first[n] + lengths[n])] for m in members]

    same("take", batch.take, take)
    same("input_ids", batch.input_ids, [int(source[i]) if i >= 0 else 0 for i in take])
    if positions is None:
        places = [depth[n] + i for n in range(len(nodes)) for i in range(lengths[n])]
        same("position_ids", batch.position_ids, places + list(range(padding)))
    else:
        zero = positions.new_zeros(*positions.shape[:-1], 1)  # of padding
        want = torch.cat([positions, zero], -1)[..., take]
        assert torch.equal(batch.position_ids, want), "position_ids"
    times = [sum(n in m.path for m in members) for n in range(len(nodes))]
    counts = [times[n] for n in range(len(nodes)) for _ in range(lengths[n])]
    same("multiplicity", batch.multiplicity, counts + [0] * padding)
    assert len(batch.paths) == batch.num_sequences == len(members)
    for path, want in zip(batch.paths, paths, strict=True):
        same("paths", path, want)
    check_targets(batch, take, source, paths, members)
    if padding:
        lengths, parents = [*lengths, padding], [*parents, -1]
    check_layout(batch.layout, lengths, parents)
    whole, visible = sum(map(len, paths)), int(forest_mask(lengths, parents).sum())
    assert batch.num_tokens == T
    assert batch.rho == (whole / T if T else 1.0), "rho"
    pairs = sum(len(p) * (len(p) + 1) // 2 for p in paths)
    assert batch.pair_ratio == (pairs / visible if visible else 1.0), "pair_ratio"
    check_moves(batch, source, take, paths, members)


def check_targets(
    batch: Any, take: list[int], source: Tensor, paths: list[list[int]], members: Sequence[Member]
) -> None:
    before = [p[t - 1] for p, m in zip(paths, members, strict=True) for t in m.targets]
    tokens = [p[t] for p, m in zip(paths, members, strict=True) for t in m.targets]
    rows = sorted(set(before))
    ends = [0]
    for m in members:
        ends.append(ends[-1] + len(m.targets))
    same("src_rows", batch.src_rows, rows)
    same("src_inv", batch.src_inv, [rows.index(t) for t in before])
    same("targets", batch.targets, [int(source[take[t]]) for t in tokens])
    same("target_cu", batch.target_cu, ends)
    same("order", batch.order, [m.number for m in members])
    same("group_of", batch.group_of, [m.group for m in members])
    same("row", batch.row, [m.number for m in members for _ in m.targets])
    same("column", batch.column, [t - m.first_column for m in members for t in m.targets])
    longest = [len(p) - m.first_column for p, m in zip(paths, members, strict=True)]
    assert batch.width == max(longest, default=0), "width"


def check_layout(layout: Any, lengths: Sequence[int], parents: Sequence[int]) -> None:
    """Query q sees key k if k <= q < tout[k]."""
    mask = forest_mask(lengths, parents)
    T = len(mask)
    q = torch.arange(T)[:, None]
    got = (torch.arange(T) <= q) & (q < layout.tout.cpu()[None, :])
    assert layout.num_tokens == T
    assert torch.equal(got, mask), "tout"
    assert layout.pairs == int(mask.sum()), "pairs"


def check_moves(
    batch: Any,
    source: Tensor,
    take: list[int],
    paths: list[list[int]],
    members: Sequence[Member],
) -> None:
    """pack, to_padded, from_padded and to_replicated, on numbers that are all different."""
    x = torch.arange(1.0, 1 + 2 * source.numel()).reshape(*batch.source_shape, 2)
    flat = x.reshape(-1, 2)
    packed = batch.pack(x)
    want = [flat[i].tolist() if i >= 0 else [0.0, 0.0] for i in take]
    assert packed.tolist() == want, "pack"
    S, L = len(members), sum(len(m.targets) for m in members)
    values, width = torch.arange(1.0, 1 + L), batch.width + 2
    table, at = [[-1.0] * width for _ in range(S)], 0
    for m in members:
        for t in m.targets:
            table[m.number][t - m.first_column] = float(values[at])
            at += 1
    padded = batch.to_padded(values, width, -1.0)
    assert padded.tolist() == table, "to_padded"
    assert torch.equal(batch.from_padded(padded), values), "from_padded"
    each = batch.to_replicated(torch.arange(len(take)))
    by_number = {m.number: path for path, m in zip(paths, members, strict=True)}
    assert [y.tolist() for y in each] == [by_number[n] for n in sorted(by_number)], "to_replicated"


def same(name: str, got: Tensor, want: list[int]) -> None:
    assert got.tolist() == want, f"{name}: got {got.tolist()}, want {want}"
