"""`assemble`: the last step of every packer, from nodes and sequences to a `SharedBatch`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.batch import SharedBatch, taken
from qla_kernels.dualkv.plan import layout_of_nodes, moved, run, tensor_of
from qla_kernels.dualkv.tokens import check_positions, check_targets


class Node(NamedTuple):
    """A run of consecutive tokens that the same sequences contain."""

    first: int  # among the caller's tokens, laid end to end
    length: int
    parent: int  # -1 for a root


class Member(NamedTuple):
    """One of the caller's sequences: the nodes that it consists of, and its targets."""

    nodes: list[int]  # from the root on
    targets: Tensor  # [n] indices in the sequence of the tokens that are targets
    origin: int  # index of the token that has column 0 in a padded tensor
    number: int  # the caller's number of the sequence
    group: int  # number of its group, counted in packed order


def assemble(
    op: str,
    source: Tensor,
    nodes: Sequence[Node],
    members: Sequence[Member],
    position_ids: Tensor | None,
    pad_to: int | None,
    read: Tensor | None = None,
) -> SharedBatch:
    """Returns the SharedBatch of a forest of nodes, on the device of `source`.

    Indices are computed on the host from lengths and then copied. Raises ValueError if position_ids
    or pad_to do not fit, or if the token id of a target is negative.

    Args:
        op: the function that the error names.
        source: the caller's token ids.
        nodes: the nodes in packed order, depth first.
        members: the sequences.
        position_ids: [.., *source.shape], or None for positions that count from 0.
        pad_to: number of packed tokens after padding; None for no padding.
        read: a copy of `source` on the CPU, if the packer has one. Targets are checked if it is
            passed, or if source is on the CPU.
    """
    lengths = [node.length for node in nodes]
    layout = layout_of_nodes(op, lengths, [node.parent for node in nodes], pad_to, None)
    ends = [0, *accumulate(lengths)]
    padding = layout.num_tokens - ends[-1]
    take = _cat(run(node.first, node.first + node.length) for node in nodes)
    take = torch.cat([take, take.new_full((padding,), -1)])
    paths = [_cat(run(ends[n], ends[n + 1]) for n in member.nodes) for member in members]
    on_path = list(zip(paths, members, strict=True))
    sources = _cat(path[member.targets - 1] for path, member in on_path)
    is_source = sources.new_zeros(layout.num_tokens, dtype=torch.bool).index_fill(0, sources, True)
    target_rows = _cat(path[member.targets] for path, member in on_path)
    counts = tensor_of(len(member.targets) for member in members)
    order = tensor_of(member.number for member in members)

    there = source.device
    if (read := source if read is None else read).is_cpu:
        check_targets(op, read.flatten()[take[target_rows]])
    input_ids = taken(source.flatten(), moved(take, there))
    if position_ids is None:
        positions = moved(_positions(nodes, padding), there)
    else:
        check_positions(op, position_ids, source)
        by_token = position_ids.flatten(position_ids.dim() - source.dim()).movedim(-1, 0)
        positions = taken(by_token, moved(take, there)).movedim(0, -1)
    return SharedBatch(
        layout=layout.to(there),
        input_ids=input_ids,
        position_ids=positions,
        take=moved(take, there),
        multiplicity=moved(_multiplicity(nodes, members, padding), there),
        src_rows=moved(is_source.nonzero()[:, 0], there),
        src_inv=moved(is_source.cumsum(0)[sources] - 1, there),
        targets=input_ids[moved(target_rows, there)],
        target_cu=moved(tensor_of([0, *accumulate(counts.tolist())]), there),
        order=moved(order, there),
        group_of=moved(tensor_of(member.group for member in members), there),
        row=moved(order.repeat_interleave(counts), there),
        column=moved(_cat(member.targets - member.origin for member in members), there),
        paths=tuple(paths),
        source_shape=tuple(source.shape),
        width=max((len(path) - member.origin for path, member in on_path), default=0),
    )


def _positions(nodes: Sequence[Node], padding: int) -> Tensor:
    """Returns each token's position in the sequences that contain it; padding counts from 0."""
    starts: list[int] = []
    for node in nodes:
        above = 0 if node.parent < 0 else starts[node.parent] + nodes[node.parent].length
        starts.append(above)
    runs = (run(x, x + node.length) for x, node in zip(starts, nodes, strict=True))
    return torch.cat([_cat(runs), run(0, padding)])


def _multiplicity(nodes: Sequence[Node], members: Sequence[Member], padding: int) -> Tensor:
    """Returns for each packed token the number of sequences that contain it, int32."""
    times = [0] * len(nodes)
    for i in chain.from_iterable(member.nodes for member in members):
        times[i] += 1
    lengths = tensor_of([*(node.length for node in nodes), padding])
    return tensor_of([*times, 0]).int().repeat_interleave(lengths)


def _cat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor_of([]), *parts])
