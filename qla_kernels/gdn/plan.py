"""Whether long sequences are cut into segments, and how far apart: pure functions of ints.

A sequence in segments has several CTAs a head and tile, for the price of finding out the states in
between (docs/notes/gdn-segments.md). Times in us, on an H200.
"""

import bisect
import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from qla_kernels.gdn.heuristics import (
    CHAIN_STEP,
    LAUNCH,
    SOLVE_START,
    SOLVE_STEP,
    START,
    STEP,
    Forward,
)
from qla_kernels.varlen import CHUNK

# How much of the state before them the chunks at a segment's end may leave for them to stand for
# the whole segment, log: 6e-6. A state as an operand, in bf16, is rounded by 2e-3.
WARM_LOG_BOUND = -12.0

# The kernels around the chains: a launch, and what each wave of CTAs takes until all of its SMs are
# busy with chunks. By whether segment_map solves: one CTA on an SM, or else two.
PLAN, SHORT = 3.5, 3.5
MAP_WAVE, GRADIENT_MAP_WAVE = {True: 12.0, False: 10.0}, 12.0
AROUND_BACKWARD = 10.0  # gathering the gradients of sequences' first states, and joining streams
MAP_CTAS = {True: 1, False: 2}
MAP_STEP = {True: (1.6, 1.6), False: (1.05, 1.3)}  # a chunk of a CTA alone, or among so many
MAP_TILE = 64  # columns of a CTA
SCAN_STEP = 1.35  # a cold segment in segment_scan
COLD_SHARE = 0.25  # of the heads: those to be folded, at gates as FlashQLA publishes
WARM_CHUNKS = 4  # of the others: 256 tokens that keep 95 % of the state each
GAIN = 0.95  # of the time of whole sequences at most, or they stay whole
WAVES = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3)  # of CTAs that segments are made to fill
QUIET, BUSY = 0.92, 0.9  # of a chunk's time in the forward; unless more of the SMs have a CTA

Lengths = tuple[tuple[int, int], ...]  # (chunks, how many have so many)


class Plan(NamedTuple):
    kernel: Forward  # which solves for A if segment_map does, and is given it if that is
    segment_chunks: int | None  # the most chunks of a segment; None leaves sequences whole


def capacity(num_tokens: int, num_sequences: int, segment_chunks: int) -> int:
    """The most segments there can be: a sequence of no token has one too."""
    return num_sequences + num_tokens // (segment_chunks * CHUNK)


def sequence_chunks(
    num_sequences: int, num_tokens: int, lengths: Sequence[int] | None = None
) -> Lengths:
    """The chunks of the sequences of a batch; of unknown length, as if all were equally long.

    Of known lengths four digits count, in base 2: plans are then soon found, and found again.
    """
    if lengths is None:
        mean = -(-num_tokens // (max(num_sequences, 1) * CHUNK))
        return ((mean, num_sequences),) if num_sequences else ()
    return tuple(sorted(Counter(_rounded(-(-length // CHUNK)) for length in lengths).items()))


def _rounded(chunks: int) -> int:
    unit = 1 << max(0, chunks.bit_length() - 4)
    return (chunks + unit // 2) // unit * unit


def segment_chunks(sequences: Lengths, most: int) -> Lengths:
    """The chunks of their segments, as segment_plan cuts them."""
    found: Counter[int] = Counter()
    for chunks, count in sequences:
        segments = max(1, -(-chunks // most))
        found[chunks // segments + 1] += chunks % segments * count
        found[chunks // segments] += (segments - chunks % segments) * count
    return tuple(sorted((+found).items()))


@functools.lru_cache(maxsize=4096)
def forward(
    sequences: Lengths,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    exact: bool = False,
    mapped: bool = False,
) -> Plan:
    """The fastest way through a batch.

    exact: every head is folded, whatever its gates. mapped: other ranks ask for maps, so that there
    are segments in any case, if only one a sequence.
    """
    kernels = [kernel for kernel in STEP if V % kernel.tile_v == 0]
    solving = _solve(sequences, num_value_heads, sm_count)

    def duration(plan: Plan) -> float:
        ctas, step = num_value_heads * V // plan.kernel.tile_v, STEP[plan.kernel]
        before, pieces = 0.0 if plan.kernel.solves else solving, sequences
        if plan.segment_chunks is not None:
            pieces = segment_chunks(sequences, plan.segment_chunks)
            solves = plan.kernel.solves
            before += _maps(sequences, pieces, num_value_heads, K, V, sm_count, exact, solves)
            before += _folds(sequences, pieces)
            if ctas * sum(count for _, count in pieces) <= BUSY * sm_count:
                step *= QUIET
        return before + _chains(pieces, step, ctas, sm_count)

    whole = min((Plan(kernel, None) for kernel in kernels), key=duration)
    cut = [
        Plan(kernel, most)
        for kernel in kernels
        for most in _spacings(sequences, num_value_heads * V // kernel.tile_v, sm_count)
    ]
    if mapped:
        longest = max((chunks for chunks, _ in sequences), default=0)
        uncut = [Plan(kernel, max(1, longest)) for kernel in kernels]
        return min(cut + uncut, key=duration)
    best = min(cut, key=duration, default=whole)
    return best if duration(best) < GAIN * duration(whole) else whole


@functools.lru_cache(maxsize=4096)
def backward(
    sequences: Lengths,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    exact: bool = False,
    mapped: bool = False,
) -> int | None:
    """The most chunks of a segment in a backward, or None to leave sequences whole.

    Its two chains run beside each other: the longer one counts, as if it had half the GPU. Where
    it is `mapped`, there are segments in any case.
    """
    half = sm_count // 2
    ctas = {step: num_value_heads * V // tile for tile, step in CHAIN_STEP.items() if tile <= V}

    def chains(pieces: Lengths) -> float:
        return min(_chains(pieces, step, ctas[step], half) for step in ctas)

    def duration(most: int) -> float:
        pieces = segment_chunks(sequences, most)
        found = _maps(sequences, pieces, num_value_heads, K, V, sm_count, exact, solves=False)
        found += _gradient_maps(sequences, pieces, num_value_heads, V, sm_count, exact)
        return AROUND_BACKWARD + found + _folds(sequences, pieces) + chains(pieces)

    wanted = set().union(*(_spacings(sequences, tiles, half) for tiles in ctas.values()))
    if mapped:
        longest = max((chunks for chunks, _ in sequences), default=0)
        return min(wanted | {max(1, longest)}, key=duration)
    best = min(wanted, key=duration, default=None)
    if best is None or duration(best) > GAIN * chains(sequences):
        return None
    return best


def _spacings(sequences: Lengths, ctas: int, sm_count: int) -> set[int]:
    """The shortest segments, of `ctas` each, that go into so many waves of the GPU."""

    def segments(most: int) -> int:
        return sum(max(1, -(-chunks // most)) * count for chunks, count in sequences)

    longest = max((chunks for chunks, _ in sequences), default=0)
    room = [int(waves * sm_count) // ctas for waves in WAVES]
    found = (
        1 + bisect.bisect_left(range(1, longest), True, key=lambda most: segments(most) <= n)
        for n in room
    )
    return {most for most in found if most < longest}


def _solve(sequences: Lengths, heads: int, sm_count: int) -> float:
    """gate and kkt_solve."""
    total = sum(chunks * count for chunks, count in sequences)
    return SOLVE_START + SOLVE_STEP * heads * total / sm_count


def _chains(pieces: Lengths, step: float, ctas: int, sm_count: int) -> float:
    """A chain's kernel, with so many CTAs a piece, of which one fills an SM.

    Equal ones go in waves; short ones among long ones fill what a wave leaves empty.
    """
    durations = [(START + step * chunks, ctas * count) for chunks, count in pieces]
    total = sum(count for _, count in durations)
    mean = sum(time * count for time, count in durations) / max(1, total)
    shortest, longest = (f((time for time, _ in durations), default=1.0) for f in (min, max))
    alike = shortest / longest
    waves = alike * -(-total // sm_count) + (1 - alike) * total / sm_count
    return LAUNCH + max(longest, waves * mean)


def _maps(
    sequences: Lengths,
    pieces: Lengths,
    heads: int,
    K: int,
    V: int,
    sm_count: int,
    exact: bool,
    solves: bool,
) -> float:
    """segment_plan and segment_map, where every segment but a sequence's last is mapped.

    CTAs of cold heads come first, and walk a segment each. Those of warm heads walk a few chunks
    or, for M, none. A sequence's first segment needs no M.
    """
    length, mapped = _mapped(sequences, pieces)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    share = 1.0 if exact else COLD_SHARE
    ctas = heads * (mapped * V + (mapped - firsts) * K) / MAP_TILE
    warm = heads * (1 - share) * mapped * V / MAP_TILE * min(WARM_CHUNKS, length)
    alone, among = MAP_STEP[solves]
    resident = MAP_CTAS[solves] * sm_count
    waves, rest = divmod(share * ctas, resident)
    last = (alone if rest <= sm_count else among) if rest else 0.0
    walk = length * (waves * among + last) + among * warm / resident
    return PLAN + SHORT + MAP_WAVE[solves] * ctas / resident + walk


def _gradient_maps(
    sequences: Lengths, pieces: Lengths, heads: int, V: int, sm_count: int, exact: bool
) -> float:
    """segment_map_bwd: all but a sequence's first segment, one CTA on an SM."""
    length, mapped = _mapped(sequences, pieces)
    ctas = mapped * heads * V / MAP_TILE
    steps = ctas * _mean_chunks(length, exact)
    waves = GRADIENT_MAP_WAVE * ctas / sm_count
    return SHORT + waves + CHAIN_STEP[MAP_TILE] * max(length, steps / sm_count)


def _folds(sequences: Lengths, pieces: Lengths) -> float:
    """segment_scan: neither the first nor the last segment of a sequence is folded."""
    most = max(chunks for chunks, _ in sequences) / max(chunks for chunks, _ in pieces)
    return SHORT + SCAN_STEP * max(0.0, most - 2)


def _mapped(sequences: Lengths, pieces: Lengths) -> tuple[int, int]:
    """Chunks of the longest segment, and how many segments have a map."""
    segments, of_sequence = (sum(count for _, count in x) for x in (pieces, sequences))
    return max(chunks for chunks, _ in pieces), segments - of_sequence


def _mean_chunks(length: int, exact: bool) -> float:
    """That a head of a segment walks for its map."""
    cold = 1.0 if exact else COLD_SHARE
    return cold * length + (1 - cold) * min(WARM_CHUNKS, length)
