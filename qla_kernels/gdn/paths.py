"""Paths of a batch whose lengths the device alone knows (`bands`), and their times by the model.

All functions are pure functions of numbers. Times are in us.
"""

import bisect
from typing import NamedTuple

from qla_kernels.gdn import durations, plan, samples
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.heuristics import SHARING, ForwardChoice
from qla_kernels.gdn.plan import Plan

# What several paths add to a forward, in us, estimated: segment_plan, if segments do not need it
# anyway, and share_table, if it leaves items whole; per path that is not taken its launches, of
# which segments' run beside others, and share_table; per SM its CTAs. Then what it adds if
# segments are whole sequences.
TABLES_TIME, IDLE_WHOLE, IDLE_SEGMENTS, IDLE_TABLE, IDLE_CTA = 4.5, 2.5, 4.0, 1.0, 0.8
WHOLE_SEGMENTS = 8.0
Shape = tuple[int, int, int, int]  # value heads, K, V, and the GPU's number of SMs


class Path(NamedTuple):
    kernel: ForwardChoice
    warm_log_bound: float | None = None  # of segments; None if sequences stay whole
    shares: bool = False  # of whole sequences
    or_whole: bool = False  # of shares: taken also where they would lose, and items stay whole


def idle(path: Path, num_sequences: int, shape: Shape) -> float:
    """Returns what a path adds that is not taken."""
    num_value_heads, _, V, sm_count = shape
    ctas = num_sequences * num_value_heads * V // path.kernel.tile_v
    launches = IDLE_WHOLE if path.warm_log_bound is None else IDLE_SEGMENTS
    return launches + IDLE_TABLE * path.shares + IDLE_CTA * ctas / sm_count


def path_time(path: Path, sequences: Lengths, shape: Shape) -> tuple[float, int]:
    """Returns the least time of a path, and the segments it then has; 0 if sequences are whole."""
    (num_value_heads, _, V, sm_count), (kernel, bound, shares, or_whole) = shape, path
    whole = plan.whole_time(plan.forward_time(Plan(kernel, None), sequences, *shape))
    if shares:
        shared = _shared_time(sequences, shape)
        return (min(shared, whole + TABLES_TIME) if or_whole else shared), 0
    if bound is None:
        return whole, 0

    def cut(most: int) -> float:
        return plan.forward_time(
            Plan(kernel, plan.spacing(sequences, most), bound), sequences, *shape
        )

    found = segments(sequences, num_value_heads * V // kernel.tile_v, sm_count)
    return min([(whole + WHOLE_SEGMENTS, 0), *((cut(most), most) for most in found)])


def _shared_time(sequences: Lengths, shape: Shape) -> float:
    """Returns the time of equal shares, with the CTAs that have none."""
    num_value_heads, _, V, sm_count = shape
    items = sum(count for _, count in sequences) * num_value_heads * V // SHARING.tile_v
    none = IDLE_CTA * (items - sm_count) / sm_count
    return plan.whole_time(durations.shares(sequences, *shape)) + none


def most_cut(num_sequences: int, num_chunks: int, shape: Shape) -> int:
    """Returns the most chunks of a longest sequence with which shares take less than whole items.

    share_table compares it with the longest one.
    """

    def loses(longest: int) -> bool:
        sequences = samples.lengths(num_sequences, num_chunks, longest)
        whole = plan.forward_time(Plan(SHARING, None), sequences, *shape)
        return _shared_time(sequences, shape) > plan.whole_time(whole) + TABLES_TIME

    longest = range(-(-num_chunks // num_sequences), num_chunks + 1)
    return longest.start - 1 + bisect.bisect_left(longest, True, key=loses)


def segments(sequences: Lengths, ctas: int, sm_count: int) -> list[int]:
    """Returns numbers of segments, of `ctas` CTAs each, that fill the GPU and cut a sequence."""
    num_sequences = sum(count for _, count in sequences)
    room = sorted({int(waves * sm_count) // ctas for waves in plan.WAVES})
    return [most for most in room if most > num_sequences]
