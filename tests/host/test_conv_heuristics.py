"""How many tokens a warp of the convolution walks."""

import pytest

from qla_kernels.conv.heuristics import LONGEST, SHORTEST, run_tokens
from qla_kernels.conv.shapes import RUNS, TILE

PLACES = (396, 264)  # an H200's, forward and backward


def waves(tokens: int, channels: int, places: int) -> float:
    run = run_tokens(tokens, channels, places)
    return -(-tokens // (run * RUNS)) * -(-channels // TILE) / places


@pytest.mark.parametrize("places", PLACES)
def test_large_batches_have_runs_of_one_length(places):
    for tokens, channels in ((32768, 8192), (65536, 4096), (1 << 20, 2048), (4096, 65536)):
        assert run_tokens(tokens, channels, places) == LONGEST


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("channels", [2048, 4096, 6144, 8192, 10240])
@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_others_fill_whole_waves(tokens, channels, places):
    """With runs of 32 tokens the forward of 8192 x 8192 took 5.2 waves, so 6, a seventh of idle."""
    filled = waves(tokens, channels, places)
    assert filled / -(-filled // 1) > 0.8 or run_tokens(tokens, channels, places) == SHORTEST


def test_the_runs_of_8192_tokens():
    assert [run_tokens(8192, 8192, places) for places in PLACES] == [171, 256]


def test_few_tokens_have_the_shortest_runs():
    for tokens in (1, 16, 500):
        assert run_tokens(tokens, 8192, 396) == SHORTEST
    assert run_tokens(2048, 256, 396) == SHORTEST
