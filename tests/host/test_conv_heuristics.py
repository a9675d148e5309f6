"""How warps of the convolution share tokens and channels."""

import pytest

from qla_kernels.conv.heads import heads_of, takes, tile_ctas
from qla_kernels.conv.heuristics import LONGEST, SHORTEST, run_tokens
from qla_kernels.conv.shapes import PIECE, RUNS, TILE
from qla_kernels.gdn.shapes import KEY_SIZES

PLACES = (396, 264)  # an H200's, forward and backward


def run_of(tokens: int, channels: int, places: int) -> int:
    return run_tokens(tokens, tile_ctas(channels, heads_of(0, 0)), RUNS, places)


def waves(tokens: int, channels: int, places: int) -> float:
    run = run_of(tokens, channels, places)
    return -(-tokens // (run * RUNS)) * -(-channels // TILE) / places


@pytest.mark.parametrize("places", PLACES)
def test_large_batches_have_runs_of_one_length(places):
    for tokens, channels in ((32768, 8192), (65536, 4096), (1 << 20, 2048), (4096, 65536)):
        assert run_of(tokens, channels, places) == LONGEST


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("channels", [2048, 4096, 6144, 8192, 10240])
@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_others_fill_whole_waves(tokens, channels, places):
    """With runs of 32 tokens the forward of 8192 x 8192 took 5.2 waves, so 6, a seventh of idle."""
    filled = waves(tokens, channels, places)
    assert filled / -(-filled // 1) > 0.8 or run_of(tokens, channels, places) == SHORTEST


def test_the_runs_of_8192_tokens():
    assert [run_of(8192, 8192, places) for places in PLACES] == [171, 256]


def test_few_tokens_have_the_shortest_runs():
    for tokens in (1, 16, 500):
        assert run_of(tokens, 8192, 396) == SHORTEST
    assert run_of(2048, 256, 396) == SHORTEST


@pytest.mark.parametrize("size", [size for size in range(1, 300) if takes(size)])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 32])
def test_tiles_of_heads_have_each_channel_once(size, count):
    heads = heads_of(count, size)
    places = [
        tile * heads.lanes + lane for tile in range(heads.tiles) for lane in range(heads.lanes)
    ]
    assert [place for place in places if place < heads.pieces] == list(range(count * size // PIECE))
    assert heads.lanes % 4 == 0  # four lanes hold different sums
    assert (heads.reach + 1) & heads.reach == 0
    own = size // PIECE  # lanes of a head; none has lanes in two tiles, or in two pairs of tiles
    across = heads.lanes << heads.wide
    assert all(at // across == (at + own - 1) // across for at in range(0, count * own, own))
    assert heads.wide == (size > TILE)
    assert heads.wide == 0 or heads.tiles == 2 * count


def test_all_sizes_of_keys_are_taken():
    assert all(takes(size) for size in KEY_SIZES)
    assert not any(takes(size) for size in (0, -16, 8, 24, 144, 288, 512))


def test_ctas_of_a_run():
    assert tile_ctas(8192, heads_of(0, 0)) == tile_ctas(8192, heads_of(32, 128)) == 64
    assert tile_ctas(8192, heads_of(8, 256)) == 32  # two tiles each
    assert tile_ctas(2 * 30 * 96 + 30 * 192, heads_of(60, 96)) == 60 + 45
    assert tile_ctas(136, heads_of(1, 16)) == 2
