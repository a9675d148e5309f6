"""K = 256: what the plan of segments chooses, beside measured times."""

import math
from typing import NamedTuple

import pytest

from qla_kernels.gdn import plan
from qla_kernels.gdn.lengths import Lengths
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import ForwardChoice, Shape

SMS = 132
NEAR = 0.08  # of the measured time
# Chunks of a segment: at most so many, by the number of segments
SEGMENTS = (2, 3, 4, 5, 8, 11)


class Row(NamedTuple):
    """A sequence, in us, on an H100, as scripts/gdn_head_sizes.py prints them."""

    tokens: int
    heads: int
    V: int
    cold: float | None  # share of heads that is cold, by the times; None: some, for some segments
    others: int  # gate, solve_score and chunk_table, which the model leaves out
    whole: int
    # By columns of a CTA and bound, for each of SEGMENTS
    cut: dict[tuple[int, float], tuple[int, ...]]
    chosen: int  # with 2 heads 16 segments are cut, which are not among SEGMENTS


ROWS = (
    Row(
        *(8192, 6, 512, 1 / 6, 37, 250),
        {
            (128, WARM_LOG_BOUND): (369, 281, 248, 233, 269, 287),
            (128, -math.inf): (360, 286, 262, 259, 374, 430),
            (64, WARM_LOG_BOUND): (311, 312, 269, 249, 263, 296),
            (64, -math.inf): (302, 319, 287, 279, 364, 438),
        },
        233,
    ),
    Row(
        *(16384, 6, 512, 0.0, 59, 481),
        {
            (128, WARM_LOG_BOUND): (443, 345, 290, 271, 326, 307),
            (128, -math.inf): (666, 501, 429, 401, 544, 583),
            (64, WARM_LOG_BOUND): (325, 408, 337, 304, 315, 330),
            (64, -math.inf): (551, 563, 477, 435, 529, 608),
        },
        271,
    ),
    Row(
        *(32768, 6, 512, 0.0, 108, 940),
        {
            (128, WARM_LOG_BOUND): (831, 621, 523, 470, 556, 493),
            (128, -math.inf): (1275, 921, 758, 680, 876, 887),
            (64, WARM_LOG_BOUND): (600, 749, 617, 535, 533, 542),
            (64, -math.inf): (1045, 1048, 853, 745, 852, 936),
        },
        493,
    ),
    Row(
        *(65536, 6, 512, 0.0, 206, 1921),
        {
            (128, WARM_LOG_BOUND): (1582, 1143, 928, 824, 983, 843),
            (128, -math.inf): (2557, 1807, 1441, 1255, 1567, 1526),
            (64, WARM_LOG_BOUND): (1103, 1405, 1123, 952, 940, 947),
            (64, -math.inf): (2089, 2069, 1631, 1383, 1528, 1632),
        },
        843,
    ),
    Row(
        *(32768, 2, 512, 1 / 2, 48, 881),
        {
            (128, WARM_LOG_BOUND): (1217, 846, 665, 562, 420, 377),
            (128, -math.inf): (1209, 840, 658, 556, 413, 372),
            (64, WARM_LOG_BOUND): (974, 682, 542, 464, 365, 408),
            (64, -math.inf): (967, 678, 537, 458, 360, 408),
        },
        364,
    ),
    Row(
        *(32768, 16, 256, None, 262, 1094),
        {
            (128, WARM_LOG_BOUND): (1102, 916, 916, 1066, 935, 926),
            (128, -math.inf): (1435, 1097, 1272, 1371, 1384, 1416),
            (64, WARM_LOG_BOUND): (923, 1053, 944, 1013, 959, 997),
            (64, -math.inf): (1255, 1239, 1303, 1314, 1412, 1486),
        },
        916,
    ),
)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.tokens}-{row.heads}")


def given(row: Row) -> tuple[Lengths, Shape]:
    return ((row.tokens // 64, 1),), (row.heads, 256, row.V, SMS)


def ways(row: Row) -> list[tuple[Plan, int]]:
    """Returns the plans of a row and their measured times."""
    found = [(plan.wide(1, row.heads, row.V, SMS), row.whole)]
    for (width, bound), times in row.cut.items():
        for segments, time in zip(SEGMENTS, times, strict=True):
            most = -(-row.tokens // 64 // segments)
            found.append((Plan(ForwardChoice(width, False), most, bound), time))
    return found


@each_row
def test_the_plan_is_as_fast_as_the_best_that_was_measured(row):
    found = plan.forward(*given(row))
    times = dict(ways(row))
    assert times.get(found, row.chosen) == row.chosen
    if found not in times:
        assert found == Plan(ForwardChoice(128, False), 32, WARM_LOG_BOUND)
    assert row.chosen < 1.05 * min(times.values())


@each_row
def test_the_model_is_near_measured_times(row):
    for found, time in ways(row):
        if row.cold is None and found.warm_log_bound > -math.inf:
            warm, cold = (plan.forward_time(found, *given(row), x) for x in (0.0, 1.0))
            assert warm + row.others < time < cold + row.others
        else:
            modelled = plan.forward_time(found, *given(row), row.cold or 0.0)
            assert modelled + row.others == pytest.approx(time, rel=NEAR)
