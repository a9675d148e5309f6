"""Which variant runs a shape."""

import pytest

from qla_kernels.gdn.heuristics import STEP_US, tile_v

SMS = 132


@pytest.mark.parametrize(
    ("sequences", "heads", "width"),
    [
        (1, 16, 64),  # 32 CTAs instead of 16: nobody waits
        (2, 33, 64),  # the last size at which the narrow tiles fit in one wave
        (2, 34, 128),  # two narrow waves take longer than a wide one
        (4, 32, 128),
        (5, 32, 64),  # three narrow waves are faster than two wide ones
        (4, 64, 128),
        (1000, 64, 128),
    ],
)
def test_the_width_with_the_shorter_waves(sequences, heads, width):
    assert tile_v(sequences, heads, 128, SMS) == width


def test_narrow_values_have_narrow_tiles():
    for sequences in (1, 50, 70_000):
        assert tile_v(sequences, 32, 64, SMS) == 64


def test_a_batch_that_fills_the_gpu_many_times_has_wide_tiles():
    """Only the rate counts there."""
    assert STEP_US[128] < 2 * STEP_US[64]
    assert all(tile_v(n, 32, 128, SMS) == 128 for n in range(60, 200))
