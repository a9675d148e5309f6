"""Whether long sequences are cut into segments, and how far apart: pure functions of ints.

A sequence in segments has several CTAs a head and tile, for the price of finding out the states in
between (docs/notes/gdn-segments.md). Times in us, on an H200.
"""

import bisect
import functools
import math
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
from qla_kernels.tile.constants import CHUNK

# How much of the state before them the chunks at a segment's end may leave for them to stand for
# the whole segment, log: 6e-6. A state as an operand, in bf16, is rounded by 2e-3.
WARM_LOG_BOUND = -12.0
# Where no entry of such a map reaches 2^-150, half of the least number, the map is 0 in fp32.
EXACT_LOG_BOUND = -104.0
LONG_LOG_BOUND = 2 * WARM_LOG_BOUND  # windows are long from there on, and so is reading their keys

# The kernels around the chains: launches, and what each CTA or wave of CTAs takes until it is busy
# with chunks. By whether segment_map solves: one CTA on an SM, or else two, for which there is less
# to launch, since segment_plan is chunk_table too, and more that begins beside another kernel.
CUT = {True: 6.0, False: -10.0}
MAP_START, GRADIENT_MAP_WAVE = {True: 1.6, False: 7.5}, 12.0
LOOK, LOOK_STEP = 2.3, 1.3  # what a CTA does to find a window: gates; norms of a chunk's keys
GROWTH = 0.03  # or what kkt_solve does: a chunk of a value head on one SM
SHORT = 3.5  # a launch in the backward
AROUND_BACKWARD = 20.0  # segment_plan, gradients of sequences' first states, and joining streams
MAP_CTAS = {True: 1, False: 2}
MAP_STEP = {True: (1.4, 1.6), False: (1.15, 1.28)}  # a chunk of a CTA alone, or among so many
MAP_TILE = 64  # columns of a CTA
SCAN_STEP = 0.65  # a cold segment in segment_scan
COLD_SHARE = 0.25  # of the heads: those to be folded, at gates as FlashQLA publishes
FORGOTTEN = 3.2  # by the others in a chunk: 64 tokens that keep 95 % of the state each
GAIN = 0.95  # of the time of whole sequences at most, or they stay whole
WHOLE = 0.94, -8.0  # of the model's time of whole sequences, and more: what they take
CUT_KERNELS = (Forward(64, True), Forward(128, False))  # the others of STEP never gained
WAVES = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3)  # of CTAs that segments are made to fill
QUIET, BUSY = 0.92, 0.9  # of a chunk's time in the forward; unless more of the SMs have a CTA

Lengths = tuple[tuple[int, int], ...]  # (chunks, how many have so many)


class Plan(NamedTuple):
    kernel: Forward  # which solves for A if segment_map does, and is given it if that is
    segment_chunks: int | None  # the most chunks of a segment; None leaves sequences whole
    warm_log_bound: float = -math.inf  # the caller's, or -inf: every head is folded, unasked

    @property
    def grows(self) -> bool:
        """Whether kkt_solve is to sum what keys add to the bound, for which it takes 7 % longer:
        where windows are short, segment_map has read them itself as soon."""
        return not self.kernel.solves and -math.inf < self.warm_log_bound < LONG_LOG_BOUND


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
    warm_log_bound: float = WARM_LOG_BOUND,
    mapped: bool = False,
) -> Plan:
    """The fastest way through a batch.

    warm_log_bound: what maps may leave out, log; they leave out nothing where that is faster.
    mapped: other ranks ask for maps, so that there are segments in any case, if one a sequence.
    """
    kernels = [kernel for kernel in STEP if V % kernel.tile_v == 0]
    solving = _solve(sequences, num_value_heads, sm_count)

    def duration(plan: Plan) -> float:
        ctas, step = num_value_heads * V // plan.kernel.tile_v, STEP[plan.kernel]
        before, pieces = 0.0 if plan.kernel.solves else solving, sequences
        if plan.segment_chunks is not None:
            pieces = segment_chunks(sequences, plan.segment_chunks)
            shape = sequences, pieces, num_value_heads, K, V, sm_count
            before += CUT[plan.kernel.solves] + _folds(sequences, pieces)
            before += _maps(*shape, plan.warm_log_bound, plan.kernel.solves, not plan.grows)
            if plan.grows:
                before += GROWTH * num_value_heads * _total(sequences) / sm_count
            if ctas * sum(count for _, count in pieces) <= BUSY * sm_count:
                step *= QUIET
        return before + _chains(pieces, step, ctas, sm_count)

    whole = min((Plan(kernel, None) for kernel in kernels), key=duration)
    bounds = dict.fromkeys((warm_log_bound, -math.inf))  # once, if they are the same
    cut = [
        Plan(kernel, most, bound)
        for kernel in kernels
        if kernel in CUT_KERNELS
        for most in _spacings(sequences, num_value_heads * V // kernel.tile_v, sm_count)
        for bound in bounds
    ]
    if mapped:
        longest = max((chunks for chunks, _ in sequences), default=0)
        cut += [Plan(kernel, max(1, longest), bound) for kernel in kernels for bound in bounds]
        return min(cut, key=duration)
    best = min(cut, key=duration, default=whole)
    share, more = WHOLE
    return best if duration(best) < GAIN * (share * duration(whole) + more) else whole


def gradient_bound(warm_log_bound: float) -> float:
    """The one to make maps with in a backward, which has no sums of what keys add: where windows
    are long, folding every head takes less time than looking for them."""
    return warm_log_bound if warm_log_bound >= LONG_LOG_BOUND else -math.inf


@functools.lru_cache(maxsize=4096)
def backward(
    sequences: Lengths,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
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
        shape = sequences, pieces, num_value_heads
        found = _maps(*shape, K, V, sm_count, warm_log_bound, False, True)
        found += _gradient_maps(*shape, V, sm_count, warm_log_bound)
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
    return SOLVE_START + SOLVE_STEP * heads * _total(sequences) / sm_count


def _total(sequences: Lengths) -> int:
    return sum(chunks * count for chunks, count in sequences)


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
    warm_log_bound: float,
    solves: bool,
    reads_keys: bool,
) -> float:
    """segment_map, where every segment but a sequence's last is mapped.

    CTAs of cold heads come first, and walk a segment each. Those of warm heads walk a window or,
    for M, none: they fill up the last wave. A sequence's first segment needs no M.
    """
    length, mapped = _mapped(sequences, pieces)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    share, window = _windows(warm_log_bound, length)
    for_b, for_M = heads * mapped * V / MAP_TILE, heads * (mapped - firsts) * K / MAP_TILE
    alone, among = MAP_STEP[solves]
    start = MAP_START[solves]
    if warm_log_bound > -math.inf:
        start += LOOK
    look = start + LOOK_STEP * window * reads_keys
    warm = (1 - share) * (for_b * (look + among * window) + for_M * look)
    resident = MAP_CTAS[solves] * sm_count
    waves, rest = divmod(share * (for_b + for_M), resident)
    at_once = rest + warm / (start + among * length)
    walk = start + (alone if at_once <= sm_count else among) * length
    last = max(walk if rest else look + among * window, (rest * walk + warm) / resident)
    return waves * (start + among * length) + last


def _gradient_maps(
    sequences: Lengths, pieces: Lengths, heads: int, V: int, sm_count: int, warm_log_bound: float
) -> float:
    """segment_map_bwd: all but a sequence's first segment, one CTA on an SM."""
    length, mapped = _mapped(sequences, pieces)
    ctas = mapped * heads * V / MAP_TILE
    share, window = _windows(warm_log_bound, length)
    steps = ctas * (share * length + (1 - share) * window)
    waves = GRADIENT_MAP_WAVE * ctas / sm_count
    return SHORT + waves + CHAIN_STEP[MAP_TILE] * max(length, steps / sm_count)


def _folds(sequences: Lengths, pieces: Lengths) -> float:
    """segment_scan: neither the first nor the last segment of a sequence is folded."""
    most = max(chunks for chunks, _ in sequences) / max(chunks for chunks, _ in pieces)
    return SCAN_STEP * max(0.0, most - 2)


def _mapped(sequences: Lengths, pieces: Lengths) -> tuple[int, int]:
    """Chunks of the longest segment, and how many segments have a map."""
    segments, of_sequence = (sum(count for _, count in x) for x in (pieces, sequences))
    return max(chunks for chunks, _ in pieces), segments - of_sequence


def _windows(warm_log_bound: float, length: int) -> tuple[float, int]:
    """The share of heads that are cold in segments of so many chunks; how many others walk."""
    if warm_log_bound == -math.inf:
        return 1.0, length
    window = math.ceil(-warm_log_bound / FORGOTTEN)
    return (COLD_SHARE, window) if window < length else (1.0, length)
