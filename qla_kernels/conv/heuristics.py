"""Chooses how many tokens a warp walks: a pure function of sizes."""

from qla_kernels.conv.shapes import RUNS, TILE

RUN_TOKENS = (128, 64, 32, 16)
WAVES = 4  # of CTAs, so that the last one leaves few SMs idle


def run_tokens(num_tokens: int, channels: int, places: int) -> int:
    """Returns the tokens of a run: as many as leave WAVES CTAs for each of the GPU's places.

    A run reads up to 2 (W - 1) rows of its neighbours, so longer runs read less twice, and have
    fewer sums of weights to add. `places` is the number of CTAs that are resident together.
    """
    tiles = -(-channels // TILE)
    for run in RUN_TOKENS:
        if -(-num_tokens // (run * RUNS)) * tiles >= WAVES * places:
            return run
    return RUN_TOKENS[-1]
