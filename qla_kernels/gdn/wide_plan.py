"""Decides whether a forward at K = 256 is cut into segments: `plan` for wide_fwd.

All functions are pure functions of numbers. Times are in us, measured on an H100: the model is
within 8 % of the times of six shapes, whole and cut, where it is told the share of cold heads
(docs/lessons.md).
Whether heads are cold depends on gates, which a plan does not know. A single cold head costs nearly
what all of them do, so `expected` is the mean of two calls, one without and one with cold heads.
"""

import functools
import math

from qla_kernels.gdn import durations, plan
from qla_kernels.gdn.durations import COLD_SHARE, Lengths
from qla_kernels.gdn.heuristics import LAUNCH, START, WIDE_STEP, ForwardChoice, wide_step
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.shapes import WIDE

WIDE_GAIN = 0.9  # a cut must be expected to take less than this share of whole sequences' time,
WIDE_LOSS = 1.1  # and not more than this share if all heads are cold
WIDE_CUT = 10.0  # segment_plan, and the launches of the kernels below
WIDE_LOOK = 6.0  # wide_windows: gates
WIDE_LOOK_STEP = 0.7  # per chunk of a window, norms of its keys: counted, not measured alone
WIDE_FORGOTTEN = 1.1  # log decay a chunk of the head that has the longest window of the warm ones
WIDE_MAP_STEP = {128: 1.9, 64: 1.2}  # per chunk of a CTA of wide_map; that of 64 columns is derived
# A segment in wide_scan: at least so much, or for each CTA of a cold head, which read L2 together
WIDE_FOLD, WIDE_FOLD_CTA = 7.8, 0.11
WIDE_FOLD_TILE = 16  # columns of V of a CTA of wide_scan


@functools.lru_cache(maxsize=4096)
def forward(
    sequences: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
) -> Plan:
    """Returns the plan of a forward that is expected to take the least time by the model below.

    Sequences stay whole unless cutting takes less than WIDE_GAIN of their time, and at most
    WIDE_LOSS of it where no head forgets. Arguments are as for `plan.forward`.
    """
    shape = num_value_heads, V, sm_count
    whole = plan.wide(sum(count for _, count in sequences), *shape)
    least = forward_time(whole, sequences, *shape)
    cut = [
        Plan(ForwardChoice(width, False), most, bound)
        for width in WIDE_STEP
        if V % width == 0
        for most in plan.spacings(sequences, num_value_heads * V // width, sm_count)
        for bound in dict.fromkeys((warm_log_bound, -math.inf))
    ]
    gains = [
        found
        for found in cut
        if expected(found, sequences, *shape) < WIDE_GAIN * least
        and forward_time(found, sequences, *shape, 1.0) <= WIDE_LOSS * least
    ]
    return min(gains, key=lambda found: expected(found, sequences, *shape), default=whole)


def expected(found: Plan, sequences: Lengths, num_value_heads: int, V: int, sm_count: int) -> float:
    """Returns the mean time of a call whose heads are all warm, and of one of COLD_SHARE cold."""
    shape = num_value_heads, V, sm_count
    return sum(forward_time(found, sequences, *shape, share) for share in (0, COLD_SHARE)) / 2


def forward_time(
    found: Plan,
    sequences: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    cold_share: float = COLD_SHARE,
) -> float:
    """Returns the time of a forward by the model, without gate, solve_score and chunk_table, which
    every plan has.

    Args:
        cold_share: the share of heads that is cold, if the plan looks for windows.
    """
    width, before, pieces = found.kernel.tile_v, 0.0, sequences
    ctas = num_value_heads * V // width
    if found.segment_chunks is not None:
        pieces = plan.cut_lengths(sequences, found.segment_chunks)
        shape = num_value_heads, V, sm_count
        before = WIDE_CUT + maps(sequences, pieces, *shape, found.warm_log_bound, cold_share)
        before += folds(sequences, pieces, *shape, found.warm_log_bound, cold_share)
    at_once = min(sm_count, ctas * sum(count for _, count in pieces))
    return before + durations.chain(pieces, wide_step(width, V, at_once), ctas, sm_count)


def map_tile(V: int) -> int:
    """Returns how many columns of V, or of K, a CTA of wide_map computes: 128 if V allows it."""
    return 128 if V % 128 == 0 else 64


def windows(warm_log_bound: float, cold_share: float, length: int) -> tuple[float, int]:
    """Returns the share of heads that is cold in segments of `length` chunks, and the number of
    chunks that the slowest warm head walks.
    """
    window = length  # of -inf, too
    if warm_log_bound > -math.inf:
        window = math.ceil(-warm_log_bound / WIDE_FORGOTTEN)
    return (cold_share, window) if window < length else (1.0, length)


def maps(
    sequences: Lengths,
    pieces: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
    cold_share: float,
) -> float:
    """Returns the time of wide_windows and wide_map, one CTA an SM.

    CTAs of cold heads come first and walk a segment each. CTAs of warm heads, for b alone, fill up
    the last wave.
    """
    tile, K = map_tile(V), WIDE
    step = WIDE_MAP_STEP[tile]
    length, mapped = durations.mapped_segments(sequences, pieces)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    share, window = windows(warm_log_bound, cold_share, length)
    for_b = num_value_heads * mapped * V / tile
    for_M = num_value_heads * (mapped - firsts) * K / tile
    cold, warm = share * (for_b + for_M), (1 - share) * for_b
    walk, look_back = START + step * length, START + step * window
    last = max(walk * math.ceil(cold / sm_count), (walk * cold + look_back * warm) / sm_count)
    look = 0.0
    if warm_log_bound > -math.inf:
        look = WIDE_LOOK + WIDE_LOOK_STEP * window * (share < 1)
    return look + LAUNCH + max(look_back, last)


def folds(
    sequences: Lengths,
    pieces: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
    cold_share: float,
) -> float:
    """Returns the time of wide_scan, which folds the segments of cold heads."""
    length, _ = durations.mapped_segments(sequences, pieces)
    share, _ = windows(warm_log_bound, cold_share, length)
    heads = sum(count for _, count in sequences) * num_value_heads
    step = max(WIDE_FOLD, WIDE_FOLD_CTA * share * heads * V / WIDE_FOLD_TILE)
    return durations.folds(sequences, pieces, step) if share else 0.0
