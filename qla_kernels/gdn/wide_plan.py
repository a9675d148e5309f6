"""Decides whether a forward at K = 256 is cut into segments: `plan` for wide_fwd.

All functions are pure functions of numbers. Times are in us. The steps of wide_fwd are measured and
the others predicted (docs/notes/wide-heads.md, 8), so a cut has to gain more than in `plan`.
"""

import functools
import math

from qla_kernels.gdn import durations, plan
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.heuristics import LAUNCH, START, WIDE_STEP, ForwardChoice, wide_step
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.shapes import WIDE

WIDE_GAIN = 0.85  # a cut must take less than this share of the time of whole sequences
WIDE_CUT = 16.0  # segment_plan, and the launches of the kernels below
WIDE_LOOK, WIDE_LOOK_STEP = (
    6.0,
    0.7,
)  # wide_windows: gates; per chunk of a window, norms of its keys
WIDE_MAP_STEP = {128: 1.75, 64: 1.1}  # per chunk of a CTA of wide_map, by its columns
WIDE_FOLD, WIDE_FOLD_TILE = 6.0, 16  # a wave of CTAs of wide_scan, a cold segment; its columns


@functools.lru_cache(maxsize=4096)
def forward(
    sequences: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
) -> Plan:
    """Returns the plan of a forward that takes the least time by the model below.

    Sequences stay whole unless cutting takes less than WIDE_GAIN of their time. Arguments are as
    for `plan.forward`.
    """
    shape = num_value_heads, V, sm_count
    whole = plan.wide(sum(count for _, count in sequences), *shape)
    cut = [
        Plan(ForwardChoice(width, False), most, bound)
        for width in WIDE_STEP
        if V % width == 0
        for most in plan.spacings(sequences, num_value_heads * V // width, sm_count)
        for bound in dict.fromkeys((warm_log_bound, -math.inf))
    ]

    def duration(found: Plan) -> float:
        return forward_time(found, sequences, *shape)

    best = min(cut, key=duration, default=whole)
    return best if duration(best) < WIDE_GAIN * duration(whole) else whole


def forward_time(
    found: Plan, sequences: Lengths, num_value_heads: int, V: int, sm_count: int
) -> float:
    """Returns the time of a forward by the model, without solve_score, which every plan has."""
    width, before, pieces = found.kernel.tile_v, 0.0, sequences
    ctas = num_value_heads * V // width
    if found.segment_chunks is not None:
        pieces = plan.cut_lengths(sequences, found.segment_chunks)
        shape = num_value_heads, V, sm_count
        before = WIDE_CUT + maps(sequences, pieces, *shape, found.warm_log_bound)
        before += folds(sequences, pieces, *shape)
    at_once = min(sm_count, ctas * sum(count for _, count in pieces))
    return before + durations.chain(pieces, wide_step(width, at_once), ctas, sm_count)


def map_tile(V: int) -> int:
    """Returns how many columns of V, or of K, a CTA of wide_map computes: 128 if V allows it."""
    return 128 if V % 128 == 0 else 64


def maps(
    sequences: Lengths,
    pieces: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
) -> float:
    """Returns the time of wide_windows and wide_map, one CTA an SM.

    CTAs of cold heads come first and walk a segment each. CTAs of warm heads, for b alone, fill up
    the last wave.
    """
    tile, K = map_tile(V), WIDE
    step = WIDE_MAP_STEP[tile]
    length, mapped = durations.mapped_segments(sequences, pieces)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    share, window = durations.windows(warm_log_bound, length)
    for_b = num_value_heads * mapped * V / tile
    for_M = num_value_heads * (mapped - firsts) * K / tile
    cold, warm = share * (for_b + for_M), (1 - share) * for_b
    walk, look_back = START + step * length, START + step * window
    last = max(walk * math.ceil(cold / sm_count), (walk * cold + look_back * warm) / sm_count)
    looks = warm_log_bound > -math.inf
    return looks * (WIDE_LOOK + WIDE_LOOK_STEP * window) + LAUNCH + max(look_back, last)


def folds(
    sequences: Lengths, pieces: Lengths, num_value_heads: int, V: int, sm_count: int
) -> float:
    """Returns the time of wide_scan, in which some head of a sequence is cold."""
    ctas = sum(count for _, count in sequences) * num_value_heads * V // WIDE_FOLD_TILE
    return durations.folds(sequences, pieces, WIDE_FOLD * -(-ctas // sm_count))
