"""Links of a rank's stretches on a GPU, and the rows of states that enter and leave stretches.

A link is the affine map that a stretch's part of a sequence applies to a state or gradient that
passes through. At an open end `launch/segments.py` has an empty segment, so the state that enters a
stretch has the row behind its first segment, and the gradient of the state that leaves it has the
row before its last segment.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import link_fold as link_fold_kernel
from qla_kernels.gdn.kernels import link_rows as link_rows_kernel
from qla_kernels.gdn.kernels import link_start as link_start_kernel
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.launch.segments import Maps, OpenEnds, Segments
from qla_kernels.gdn.sharded.gathered import Passed
from qla_kernels.gdn.sharded.layouts import Stretch
from qla_kernels.runtime import jit
from qla_kernels.runtime.device_tables import kept, numbers

Lines = Sequence[Sequence[Passed]]


def open_ends(stretches: Sequence[Stretch]) -> OpenEnds:
    """Returns the open ends of a rank's stretches, for `segments.cut`."""
    bits = 0
    for i, x in enumerate(stretches):
        bits |= (x.before > 0) << 2 * i | (x.after > 0) << 2 * i + 1
    return OpenEnds(stretches[0].end, bits)


def made(
    left: Tensor,
    found: Maps,
    cut: Segments,
    stretches: Sequence[Stretch],
    K: int,
    carried: Sequence[int],
    reverse: bool,
) -> Tensor:
    """Returns the links of a rank's stretches as they are sent, [HV, stretches, V + K + 1, K] fp32.

    A link is of the last sequence of its stretch. It is 0 if the sequence does not leave. Else it
    is transposed: V rows of the state that leaves when 0 enters, then K rows of the map from the
    state that enters to the one that leaves, which are 0 unless the sequence comes from another
    stretch. In reverse, likewise of gradients on their way back, of first sequences. The last row
    holds what the link carries.

    Args:
        left: `left` of the maps or, in reverse, the result of `segments.left_gradients`.
        K: of the call; the maps may have room for more.
        carried: of `gathered.signatures`.
    """
    HV, V, room = left.shape[1:]
    first, states = cut.first_segment, left
    leaving = [_beyond(x, at_end=not reverse) for x in stretches]
    if max(leaving) >= 0:
        states = left.new_empty(cut.capacity, HV, V + room, room)
        pieces = room // link_start_kernel.START_PIECE, link_start_kernel.START_PIECE
        through = sum(x.through << i for i, x in enumerate(stretches))
        jit.compile(link_start_kernel, link_start_kernel.VARIANTS[0])(
            torch.unflatten(left, -1, pieces),
            first,
            torch.unflatten(states, -1, pieces),
            *_two(leaving),
            through,
            int(reverse),
        )
        for begin, end in _runs([n for n in leaving if n >= 0]):
            segments.fold(states, None, found, first[begin : end + 2], reverse)
    links = left.new_empty(HV, len(stretches), V + K + 1, K)
    jit.compile(link_rows_kernel, link_rows_kernel.VARIANTS[0])(
        first, states, links, *_two(leaving), *map(float, _two(carried)), int(reverse)
    )
    return links


def enter(
    links: Tensor,
    lines: Lines,
    states: Tensor,
    cut: Segments,
    stretches: Sequence[Stretch],
    reverse: bool,
    results: bool = False,
) -> Tensor | None:
    """Folds the links of all ranks into the states that enter a rank's stretches, in `states`.

    In reverse, into the gradients of the states that leave them. A link that does not carry what
    its line expects makes the state NaN.

    Args:
        links: [ranks, HV, stretches, V + K + 1, K], as `gathered.gather` returns them.
        lines: of the stretches.
        states: [capacity, HV, V, room]; the rows of these states are written.
        results: whether to return the states, too.

    Returns:
        [stretches, HV, V, K], 0 where no sequence enters; or None.
    """
    _, HV, _, _, K = links.shape
    shape = len(stretches) * results, HV, states.shape[2], K
    found = links.new_empty(shape)
    if results or any(lines):
        given = links.new_empty(0, *shape[1:])
        _fold(links, lines, given, found, states, cut, stretches, reverse)
    return found if results else None


def enter_again(
    entered: Tensor | None, states: Tensor, cut: Segments, stretches: Sequence[Stretch]
) -> None:
    """Writes the states [stretches, HV, V, K] that enter stretches, if any, to their rows."""
    if entered is not None:
        (_, HV, V, K), nothing = entered.shape, entered.new_empty(0, *entered.shape[1:])
        links = entered.new_empty(0, HV, 1, V + K + 1, K)
        _fold(links, [()] * len(stretches), entered, nothing, states, cut, stretches, reverse=False)


def _fold(
    links: Tensor,
    lines: Lines,
    given: Tensor,
    found: Tensor,
    states: Tensor,
    cut: Segments,
    stretches: Sequence[Stretch],
    reverse: bool,
) -> None:
    rows = [(len(line), *(number for link in line for number in link)) for line in lines]
    width = max(map(len, rows))
    table = _table(states.device, tuple(row + (0,) * (width - len(row)) for row in rows))
    entering = [_beyond(x, at_end=reverse) for x in stretches]
    jit.compile(link_fold_kernel, link_fold_kernel.VARIANTS[0])(
        links, table, given, cut.first_segment, found, states, *_two(entering), int(reverse)
    )


@kept(256)
def _table(on: torch.device, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    return numbers(rows, on)


def _beyond(x: Stretch, at_end: bool) -> int:
    """Returns the sequence that goes on beyond a stretch's end or start, or -1 if none does."""
    if at_end:
        return x.end - 1 if x.after > 0 else -1
    return x.first if x.before > 0 else -1


def _two(values: Sequence[int]) -> tuple[int, int]:
    """Returns a value for each of the two stretches that a rank may have."""
    return values[0], values[1] if len(values) > 1 else -1


def _runs(sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and last of sequences that one launch folds: neighbours, or one."""
    if len(sequences) == 2 and sequences[0] + 1 == sequences[1]:
        return [(sequences[0], sequences[1])]
    return [(n, n) for n in sequences]
