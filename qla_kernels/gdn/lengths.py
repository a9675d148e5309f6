"""Numbers of chunks of a batch's sequences, and of the segments that they are cut into.

All functions are pure functions of numbers.
"""

import bisect
import math
from collections import Counter
from collections.abc import Sequence

from qla_kernels.gdn.kernels.tables import TABLE_WARPS
from qla_kernels.tile.constants import CHUNK

Lengths = tuple[tuple[int, int], ...]  # (chunks, how many sequences or segments have that length)

WAVES = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3)  # waves of CTAs that segments are sized to fill
GRID = 2**0.25  # ratio of neighbouring lengths for which a band is computed


def sequence_chunks(
    num_sequences: int, num_tokens: int, lengths: Sequence[int] | None = None
) -> Lengths:
    """Returns the numbers of chunks of a batch's sequences, and how many have each number.

    If `lengths` (in tokens) is None, all sequences count as equally long. Otherwise each number of
    chunks is rounded to four binary digits. Few different numbers remain, so that a plan is quick
    to compute and more batches find theirs in the cache.
    """
    if lengths is None:
        mean = -(-num_tokens // (max(num_sequences, 1) * CHUNK))
        return ((mean, num_sequences),) if num_sequences else ()
    return tuple(sorted(Counter(rounded(-(-length // CHUNK)) for length in lengths).items()))


def rounded(chunks: int) -> int:
    """Returns a number rounded to four binary digits."""
    unit = 1 << max(0, chunks.bit_length() - 4)
    return (chunks + unit // 2) // unit * unit


def total(sequences: Lengths) -> int:
    """Returns the number of chunks of all sequences."""
    return sum(chunks * count for chunks, count in sequences)


def num_items(sequences: Lengths) -> int:
    """Returns how many sequences, or segments, there are."""
    return sum(count for _, count in sequences)


def longest_of(sequences: Lengths) -> int:
    """Returns the number of chunks of the longest sequence; 0 if there is none."""
    return max((chunks for chunks, _ in sequences), default=0)


def capacity(num_tokens: int, num_sequences: int, segment_chunks: int) -> int:
    """Returns the most segments there can be; a sequence without tokens has one, too."""
    return num_sequences + num_tokens // (segment_chunks * CHUNK)


def num_segments(sequences: Lengths, most: int) -> int:
    """Returns how many segments of at most `most` chunks there are."""
    return sum(max(1, -(-chunks // most)) * count for chunks, count in sequences)


def cut_lengths(sequences: Lengths, most: int) -> Lengths:
    """Returns the numbers of chunks of the sequences' segments, cut as segment_plan cuts them."""
    pieces: Counter[int] = Counter()
    for chunks, count in sequences:
        segments = max(1, -(-chunks // most))
        pieces[chunks // segments + 1] += chunks % segments * count
        pieces[chunks // segments] += (segments - chunks % segments) * count
    return tuple(sorted((+pieces).items()))


def spacing(sequences: Lengths, most_segments: int) -> int:
    """Returns the fewest chunks per segment with which there are at most `most_segments`.

    If there are more sequences than that, it is the number of chunks of the longest one.
    """
    fits = range(1, longest_of(sequences))
    return 1 + bisect.bisect_left(
        fits, True, key=lambda most: num_segments(sequences, most) <= most_segments
    )


def spacings(sequences: Lengths, ctas: int, sm_count: int) -> set[int]:
    """Returns numbers of chunks per segment: for each of WAVES, the fewest that fit into it.

    Segments with `ctas` CTAs each fit into a number of waves if their CTAs are at most that many
    times sm_count. Numbers that would leave all sequences whole are not returned.
    """
    fewest = (spacing(sequences, int(waves * sm_count) // ctas) for waves in WAVES)
    return {most for most in fewest if most < longest_of(sequences)}


def segment_counts(sequences: Lengths, ctas: int, sm_count: int) -> list[int]:
    """Returns numbers of segments, of `ctas` CTAs each, that fill the GPU and cut a sequence."""
    room = sorted({int(waves * sm_count) // ctas for waves in WAVES})
    return [most for most in room if most > num_items(sequences)]


def device_spacing(sequences: Lengths, most_segments: int) -> int:
    """Returns the most chunks of a segment, as segment_plan finds it.

    It is the least number with which there are at most `most_segments`, or one of 1024 candidates
    if the longest sequence has more chunks than that. If there are more sequences than
    `most_segments`, it leaves them whole. Each step compares a candidate a warp.
    """
    below, step = 0, max(1, longest_of(sequences))
    for _ in range(2):
        step = -(-step // TABLE_WARPS)
        candidates = (below + (i + 1) * step for i in range(TABLE_WARPS))
        fits = [num_segments(sequences, most) <= most_segments for most in candidates]
        below += (fits.index(True) if True in fits else TABLE_WARPS - 1) * step
    return below + step


# ---- samples, which stand for all batches of as many sequences and chunks ----


def with_longest(num_sequences: int, num_chunks: int, longest: int) -> Lengths:
    """Returns one sequence of `longest` chunks and others that share the rest evenly."""
    others = max(0, num_sequences - 1)
    rest = max(0, round((num_chunks - longest) / max(1, others)))
    return tuple(pair for pair in ((rest, others), (longest, 1)) if pair[1])


def likely(num_sequences: int, num_chunks: int) -> list[Lengths]:
    """Returns the samples by which paths are chosen, that of sequences of equal length first.

    Then parts of a line that is broken at random, whose longest is 1 + 1/2 + ... + 1/N times the
    mean; before them half as far from the mean; and twice as long, if that is at most half of all
    tokens.
    """
    mean = num_chunks / max(1, num_sequences)
    broken = mean * sum(1 / n for n in range(1, num_sequences + 1))
    longest = mean, (mean + broken) / 2, broken, max(broken, min(2 * broken, num_chunks / 2))
    return [with_longest(num_sequences, num_chunks, max(1, math.ceil(x))) for x in longest]


def grid(num_sequences: int, num_chunks: int) -> list[Lengths]:
    """Returns the samples of which each may begin a band: from equal lengths to one sequence."""
    steps, longest = [], max(1, -(-num_chunks // max(1, num_sequences)))
    while longest < num_chunks:
        steps.append(longest)
        longest = max(longest + 1, round(longest * GRID))
    return [with_longest(num_sequences, num_chunks, x) for x in (*steps, max(1, num_chunks))]
