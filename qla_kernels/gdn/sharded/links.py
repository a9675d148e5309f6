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
    for i, x in enumerate(stretches):
        if entering is not None and x.before:
            _write_start(states, entering[i], cut, x)


def write_leaving(
    left: Tensor, leaving: Tensor | None, cut: Segments, stretches: Sequence[Stretch]
) -> None:
    """Writes the gradients [stretches, HV, V, K] of states that leave stretches to their rows."""
    for i, x in enumerate(stretches):
        if leaving is not None and x.after:
            _write_end(left, leaving[i], cut, x)


def _write_start(states: Tensor, state: Tensor, cut: Segments, x: Stretch) -> None:
    state = _in_room(state, states)
    if x.first == 0:
        states[1] = state
        return
    row = cut.first_segment[x.first : x.first + 1].long() + 1
    row.clamp_(max=cut.capacity - 1)  # with wrong bounds the table may be full
    states.index_copy_(0, row, state[None])


def _write_end(states: Tensor, state: Tensor, cut: Segments, x: Stretch) -> None:
    row = cut.first_segment[x.end : x.end + 1].long() - 2
    states.index_copy_(0, row, _in_room(state, states)[None])


def _in_room(state: Tensor, states: Tensor) -> Tensor:
    """Returns a state with columns of zeros up to the K of `states`."""
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
    identity = torch.cat([left.new_zeros(V, room), torch.eye(room, device=left.device)])
    for x in leaving:
        if x.through:
            write = _write_end if reverse else _write_start
            write(states, identity.expand(HV, V + room, room), cut, x)
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
            result.append(states.index_select(0, row)[0, :, : V + K, :K].contiguous())
        else:
            result.append(left.new_zeros(HV, V + K, K))
    return result
