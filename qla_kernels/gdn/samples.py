"""Batches that stand for all of as many sequences and chunks: `bands` compares paths for them.

All functions are pure functions of numbers.
"""

import math

from qla_kernels.gdn.durations import Lengths

GRID = 2**0.25  # ratio of neighbouring lengths for which a band is computed


def lengths(num_sequences: int, num_chunks: int, longest: int) -> Lengths:
    """Returns one sequence of `longest` chunks and others that share the rest evenly."""
    others = max(0, num_sequences - 1)
    rest = max(0, round((num_chunks - longest) / max(1, others)))
    return tuple(pair for pair in ((rest, others), (longest, 1)) if pair[1])


def compared(num_sequences: int, num_chunks: int) -> list[int]:
    """Returns chunks of the longest sequence of the batches for which paths are compared.

    Sequences are of equal length; or parts of a line that is broken at random, whose longest is
    1 + 1/2 + ... + 1/N times the mean; or half as far from the mean; or twice as long, if that is
    at most half of all tokens.
    """
    mean = num_chunks / max(1, num_sequences)
    broken = mean * sum(1 / n for n in range(1, num_sequences + 1))
    found = mean, (mean + broken) / 2, broken, max(broken, min(2 * broken, num_chunks / 2))
    return [max(1, math.ceil(x)) for x in found]


def grid(num_sequences: int, num_chunks: int) -> list[int]:
    """Returns chunks of a longest sequence, from the mean to all chunks."""
    found, longest = [], max(1, -(-num_chunks // max(1, num_sequences)))
    while longest < num_chunks:
        found.append(longest)
        longest = max(longest + 1, round(longest * GRID))
    return [*found, max(1, num_chunks)]
