"""Equal shares for packs whose whole items, in their order, would leave SMs idle at the end.

All functions are pure functions of numbers. Times are in us, measured on an H200
(docs/lessons.md).
"""

import bisect
import functools
from collections import Counter
from collections.abc import Sequence

from qla_kernels.gdn import durations, plan
from qla_kernels.gdn.heuristics import LAUNCH, SHARING, START, STEP
from qla_kernels.gdn.plan import Plan

# Shares must take less than this share of the time of whole items: beside those the model's time of
# shares was 6 % too short.
DEALT_GAIN = 0.92


@functools.lru_cache(maxsize=4096)
def in_order(
    found: Plan, chunks: tuple[int, ...], num_value_heads: int, K: int, V: int, sm_count: int
) -> Plan:
    """Returns the plan found for sequences of any order, or equal shares where that order is bad.

    Whole items go to SMs in their order. A long one that comes late runs alone at the end.
    """
    ctas = num_value_heads * V // found.kernel.tile_v
    whole = found.segment_chunks is None and not found.shares
    if not (whole and sm_count < ctas * len(chunks) <= durations.FEW_ITEMS * sm_count):
        return found
    sequences = tuple(sorted(Counter(chunks).items()))
    shape = num_value_heads, K, V, sm_count
    before = 0.0 if found.solves else durations.solve(sequences, num_value_heads, sm_count)
    items = before + dealt(chunks, STEP[found.kernel], ctas, sm_count)
    shared = plan.whole_time(durations.shares(sequences, *shape))
    gained = shared < DEALT_GAIN * plan.whole_time(items)
    return Plan(SHARING, None, shares=True) if gained else found


def dealt(
    chunks: Sequence[int], step: float, ctas: int, sm_count: int, start: float = START
) -> float:
    """Returns the time of a chain's kernel whose CTAs go, in their order, to the first free SM.

    `durations.chain` has no order: its short pieces fill all gaps, the best that dealing can do.
    """
    free = [(0.0, sm_count)]  # (when, how many SMs), sorted
    for length in chunks:
        wanted = ctas
        while wanted:
            now, idle = free.pop(0)
            if idle > wanted:
                free.insert(0, (now, idle - wanted))
            took = min(idle, wanted)
            bisect.insort(free, (now + start + step * length, took))
            wanted -= took
    return LAUNCH + free[-1][0]
