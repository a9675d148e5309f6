"""Links of a rank's stretches on a GPU, and the rows of states that enter and leave stretches.

A link is the affine map that a stretch's part of a sequence applies to a state or gradient that
passes through. At an open end `launch/segments.py` has an empty segment, so the state that enters a
stretch has the row behind its first segment, and the gradient of the state that leaves it has the
row before its last segment.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.segments import Maps, OpenEnds, Segments
from qla_kernels.gdn.sharded.layouts import Stretch


def open_ends(stretches: Sequence[Stretch]) -> OpenEnds:
    """Returns the open ends of a rank's stretches, for `segments.cut`."""
    bits = 0
    for i, x in enumerate(stretches):
        bits |= (x.before > 0) << 2 * i | (x.after > 0) << 2 * i + 1
    return OpenEnds(stretches[0].end, bits)


def of_states(found: Maps, cut: Segments, stretches: Sequence[Stretch], K: int) -> list[Tensor]:
    """Returns the link of each stretch, of its last sequence: from the state that enters here.

    A link is 0 if the sequence does not leave. Else [HV, V + K, K] fp32, transposed: V rows of the
    state that leaves when 0 enters, then K rows of the map from the state that enters to the one
    that leaves, which are 0 unless the sequence comes from another stretch. K is the call's: the
    maps may have room for more.
    """
    return _links(found.left, found, cut, stretches, K, reverse=False)


def of_gradients(
    left: Tensor, found: Maps, cut: Segments, stretches: Sequence[Stretch], K: int
) -> list[Tensor]:
    """Returns the links of gradients on their way back: as `of_states`, of first sequences.

    left: the result of `segments.left_gradients`; not changed.
    """
    return _links(left, found, cut, stretches, K, reverse=True)


def write_entering(
    states: Tensor, entering: Tensor | None, cut: Segments, stretches: Sequence[Stretch]
) -> None:
    """Writes the states [stretches, HV, V, K] that enter stretches, if any, to their rows."""
    its, of = _some(entering, stretches, [x.before > 0 for x in stretches])
    if its is not None:
        states.index_copy_(0, _start_rows(cut, of), _in_room(its, states))


def write_leaving(
    left: Tensor, leaving: Tensor | None, cut: Segments, stretches: Sequence[Stretch]
) -> None:
    """Writes the gradients [stretches, HV, V, K] of states that leave stretches to their rows."""
    its, of = _some(leaving, stretches, [x.after > 0 for x in stretches])
    if its is not None:
        left.index_copy_(0, _end_rows(cut, of), _in_room(its, left))


def _some(
    x: Tensor | None, stretches: Sequence[Stretch], wanted: Sequence[bool]
) -> tuple[Tensor | None, list[Stretch]]:
    """Returns the rows of x, one a stretch, that are wanted, or None; and their stretches."""
    of = list(itertools.compress(stretches, wanted))
    if x is None or not of:
        return None, of
    return x if all(wanted) else x[wanted.index(True)][None], of


def _start_rows(cut: Segments, stretches: Sequence[Stretch]) -> Tensor:
    """Returns the row behind the first segment of each stretch: what enters it."""
    rows = _of_sequences(cut.first_segment, [x.first for x in stretches]).long() + 1
    return rows.clamp_(max=cut.capacity - 1)  # with wrong bounds the table may be full


def _end_rows(cut: Segments, stretches: Sequence[Stretch]) -> Tensor:
    """Returns the row before the last segment of each stretch: what leaves it."""
    return _of_sequences(cut.first_segment, [x.end for x in stretches]).long() - 2


def _of_sequences(table: Tensor, numbers: Sequence[int]) -> Tensor:
    """Returns the rows of one or two sequences, in ascending order, as a view."""
    first, last = numbers[0], numbers[-1]
    return table[first : last + 1 : max(1, last - first)]


def _in_room(state: Tensor, states: Tensor) -> Tensor:
    """Returns a state with columns of zeros up to the K of `states`."""
    if state.shape[-1] == states.shape[-1]:
        return state
    return torch.nn.functional.pad(state, (0, states.shape[-1] - state.shape[-1]))


def _links(
    left: Tensor,
    found: Maps,
    cut: Segments,
    stretches: Sequence[Stretch],
    K: int,
    reverse: bool,
) -> list[Tensor]:
    HV, V, room = left.shape[1:]
    leaves = [x.before > 0 if reverse else x.after > 0 for x in stretches]
    leaving = list(itertools.compress(stretches, leaves))
    if not leaving:
        return [left.new_zeros(HV, V + K, K) for _ in stretches]
    states = left.new_zeros(cut.capacity, HV, V + room, room)
    states[:, :, :V] = left
    if through := [x for x in leaving if x.through]:
        identity = torch.cat([left.new_zeros(V, room), torch.eye(room, device=left.device)])
        rows = (_end_rows if reverse else _start_rows)(cut, through)
        states.index_copy_(0, rows, identity.expand(len(through), HV, V + room, room))
    first = cut.first_segment
    folded = [x.first if reverse else x.end - 1 for x in leaving]
    if len(folded) == 2 and folded[0] + 1 == folded[1]:  # one launch folds neighbours
        runs = [(folded[0], folded[1])]
    else:
        runs = [(n, n) for n in folded]
    for begin, end in runs:
        segments.fold(states, None, found, first[begin : end + 2], reverse)
    result = []
    for x, leaves_it in zip(stretches, leaves, strict=True):
        row = first[x.first : x.first + 1] if reverse else first[x.end : x.end + 1] - 1
        if leaves_it:
            link = states.index_select(0, row)[0]
            result.append(link if room == K else link[:, : V + K, :K].contiguous())
        else:
            result.append(left.new_zeros(HV, V + K, K))
    return result
