"""Chooses how many tokens a warp walks: a pure function of sizes."""

LONGEST, SHORTEST = 128, 16  # tokens of a run
WAVES = 4  # with this many waves of CTAs, it costs little if the last wave is not full
STARTING = 12  # the start of a run takes as long as this many tokens


def run_tokens(num_tokens: int, tiles: int, runs: int, places: int) -> int:
    """Returns how many consecutive tokens one warp walks over: the tokens of a run.

    A run also reads up to 2 (W - 1) tokens of its neighbours and writes sums for the weight's
    gradient, so long runs cost least. Large batches, whose runs of LONGEST tokens make at least
    WAVES waves of CTAs, have such runs. For other batches the result is the length that fills a
    whole number of waves and takes the least time.

    Args:
        num_tokens: tokens of the batch.
        tiles: number of CTAs that share the channels of a token.
        runs: number of runs of a CTA.
        places: number of CTAs that are resident on the GPU at a time.
    """
    if -(-num_tokens // (LONGEST * runs)) * tiles >= WAVES * places:
        return LONGEST
    steps = {}
    for waves in range(WAVES, 0, -1):  # of equally fast ones the last counts: the fewest waves
        blocks = max(1, waves * places // tiles)
        run = max(SHORTEST, -(-num_tokens // (blocks * runs)))
        blocks = -(-num_tokens // (run * runs))
        taken = -(-blocks * tiles // places)
        steps[taken * (run + STARTING)] = run
    return steps[min(steps)]
