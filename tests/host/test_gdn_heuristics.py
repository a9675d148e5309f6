"""Widths of tiles and numbers of CTAs for a shape."""

import pytest

from qla_kernels.gdn.heuristics import CHAIN_STEP, ctas, tile_v

SMS = 132


def test_narrow_values_have_narrow_tiles():
    for sequences in (0, 1, 50, 70_000):
        assert tile_v(sequences, 32, 64, SMS) == 64


@pytest.mark.parametrize(
    ("sequences", "heads", "width"),
    [
        (1, 16, 64),
        (2, 33, 64),  # the last size at which the narrow tiles fit in one wave
        (2, 34, 128),  # two narrow waves take longer than a wide one
        (4, 32, 128),
        (5, 32, 64),  # three narrow waves are faster than two wide ones
        (4, 64, 128),
        (1000, 64, 128),
    ],
)
def test_the_width_of_a_backward_chain(sequences, heads, width):
    assert tile_v(sequences, heads, 128, SMS) == width


@pytest.mark.parametrize(
    ("items", "equal_lengths", "found"),
    [(512, True, SMS), (512, False, 512), (100, True, 100), (100, False, 100)],
)
def test_items_of_one_length_are_walked_by_one_cta_an_sm(items, equal_lengths, found):
    assert ctas(items, equal_lengths, SMS) == found


def test_a_backward_that_fills_the_gpu_many_times_has_wide_tiles():
    """Only the rate counts there."""
    assert CHAIN_STEP[128] < 2 * CHAIN_STEP[64]
    assert all(tile_v(n, 32, 128, SMS) == 128 for n in range(60, 200))
