"""Chooses how many tokens a warp walks: a pure function of sizes."""

LONGEST, SHORTEST = 128, 16  # tokens of a run; fewer tokens than runs of 128 fill have longer ones
WAVES = 4  # of CTAs, from which on a last wave that is not full costs little
STARTING = 12  # tokens that a warp could walk while it finds its node and loads its first rows


def run_tokens(num_tokens: int, tiles: int, runs: int, places: int) -> int:
    """Returns the tokens of a run.

    Args:
        num_tokens: of the batch.
        tiles: CTAs that share the channels of a run.
        runs: of a CTA.
        places: CTAs that are resident together.

    A run reads up to 2 (W - 1) rows of its neighbours, and has sums of weights to add, so long ones
    cost least. Batches whose runs of LONGEST tokens are WAVES CTAs a place have these. Others have
    runs of a length that just fills a whole number of waves: the one that takes the fewest steps.
    """
    if -(-num_tokens // (LONGEST * runs)) * tiles >= WAVES * places:
        return LONGEST
    steps = {}
    for waves in range(WAVES, 0, -1):  # of equals the fewest waves
        blocks = max(1, waves * places // tiles)
        run = max(SHORTEST, -(-num_tokens // (blocks * runs)))
        blocks = -(-num_tokens // (run * runs))
        taken = -(-blocks * tiles // places)
        steps[taken * (run + STARTING)] = run
    return steps[min(steps)]
