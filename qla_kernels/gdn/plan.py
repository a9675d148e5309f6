"""Decides whether long sequences are cut into segments, and how long these are.

All functions are pure functions of numbers. A cut sequence runs on several CTAs per head and tile,
but the states between its segments have to be computed first (docs/notes/gdn-segments.md). Times
are in us, measured on an H200.
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
    ForwardChoice,
)
from qla_kernels.tile.constants import CHUNK

# A window of chunks at a segment's end may stand for the whole segment if it scales the state
# before it by less than e^this, 6e-6. Rounding a state to bf16, as an operand, changes it by 2e-3.
WARM_LOG_BOUND = -12.0
# Below this bound all entries of a map are under 2^-150, half of fp32's least number: 0 in fp32.
EXACT_LOG_BOUND = -104.0
LONG_LOG_BOUND = 2 * WARM_LOG_BOUND  # with a lower bound windows, and reading their keys, are long

# Fixed cost of cutting, keyed by whether segment_map solves for A. If it does not, two of its CTAs
# share an SM, segment_plan doubles as chunk_table and launches overlap: hence a negative cost.
CUT = {True: 6.0, False: -10.0}
# A CTA of segment_map before its first chunk; a wave of CTAs of segment_map_bwd before theirs.
MAP_START, GRADIENT_MAP_WAVE = {True: 1.6, False: 7.5}, 12.0
LOOK, LOOK_STEP = 2.3, 1.3  # a CTA's search for its window: gates; per chunk, norms of its keys
GROWTH = 0.03  # kkt_solve summing what keys add to the bound: per chunk and value head, on one SM
SHORT = 3.5  # a launch in the backward
AROUND_BACKWARD = 20.0  # segment_plan, gradients of sequences' first states, and joining streams
MAP_CTAS = {True: 1, False: 2}  # of segment_map on an SM
# Per chunk of a CTA of segment_map: at most one CTA per SM at once, or more CTAs than SMs.
MAP_STEP = {True: (1.4, 1.6), False: (1.15, 1.28)}
MAP_TILE = 64  # columns of a CTA
SCAN_STEP = 0.65  # a cold segment in segment_scan
COLD_SHARE = 0.25  # share of the heads that is cold, at gates like those FlashQLA publishes
FORGOTTEN = 3.2  # log decay of the warm heads per chunk: 64 tokens, each keeps 95 % of the state
GAIN = 0.95  # a cut must take less than this share of the time of whole sequences
UNCUT = 0.94, -8.0  # the measured time of whole sequences is 0.94 of the model's time, less 8 us
CUT_KERNELS = (
    ForwardChoice(64, True),
    ForwardChoice(128, False),
)  # cutting never gained with others of STEP
WAVES = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3)  # waves of CTAs that segments are sized to fill
QUIET, BUSY = 0.92, 0.9  # a chunk takes 0.92 of its time if at most 0.9 of the SMs have a CTA

Lengths = tuple[tuple[int, int], ...]  # (chunks, how many sequences or segments have that length)


class Plan(NamedTuple):
    kernel: (
        ForwardChoice  # its `solves` holds for segment_map, too: both solve for A, or both read it
    )
    segment_chunks: int | None  # the most chunks of a segment; None leaves sequences whole
    warm_log_bound: float = -math.inf  # the caller's; or -inf: all heads are folded, none searched

    @property
    def grows(self) -> bool:
        """True if kkt_solve has to sum what keys add to the bound, which costs it 7 % more time.

        It does so only for long windows: segment_map reads the keys of short ones as fast itself.
        """
        return not self.kernel.solves and -math.inf < self.warm_log_bound < LONG_LOG_BOUND


def capacity(num_tokens: int, num_sequences: int, segment_chunks: int) -> int:
    """Returns the most segments there can be; a sequence without tokens has one, too."""
    return num_sequences + num_tokens // (segment_chunks * CHUNK)


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
    return tuple(sorted(Counter(_rounded(-(-length // CHUNK)) for length in lengths).items()))


def _rounded(chunks: int) -> int:
    unit = 1 << max(0, chunks.bit_length() - 4)
    return (chunks + unit // 2) // unit * unit


def cut_lengths(sequences: Lengths, most: int) -> Lengths:
    """Returns the numbers of chunks of the sequences' segments, cut as segment_plan cuts them."""
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
    """Returns the plan of a forward that takes the least time by the model below.

    Sequences stay whole unless cutting takes less than GAIN of their time.

    Args:
        sequences: (chunks, how many sequences have that many) pairs.
        warm_log_bound: log of what maps may leave out. The plan has this bound, or -inf where
            leaving out nothing is faster.
        mapped: other ranks need this rank's maps, so the plan has segments in any case, be it one
            per sequence.
    """
    kernels = [kernel for kernel in STEP if V % kernel.tile_v == 0]
    solving = _solve(sequences, num_value_heads, sm_count)

    def duration(plan: Plan) -> float:
        ctas, step = num_value_heads * V // plan.kernel.tile_v, STEP[plan.kernel]
        before, pieces = 0.0 if plan.kernel.solves else solving, sequences
        if plan.segment_chunks is not None:
            pieces = cut_lengths(sequences, plan.segment_chunks)
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
    share, more = UNCUT
    return best if duration(best) < GAIN * (share * duration(whole) + more) else whole


@functools.lru_cache(maxsize=4096)
def tree(levels: tuple[Lengths, ...], num_value_heads: int, V: int, sm_count: int) -> ForwardChoice:
    """Returns the kernel of a forward over a tree, whose levels run one after the other.

    Args:
        levels: of each level (chunks, how many nodes have that many) pairs.
    """
    every = tuple(pair for level in levels for pair in level)

    def duration(kernel: ForwardChoice) -> float:
        ctas = num_value_heads * V // kernel.tile_v
        before = 0.0 if kernel.solves else _solve(every, num_value_heads, sm_count)
        return before + sum(_chains(level, STEP[kernel], ctas, sm_count) for level in levels)

    return min((kernel for kernel in STEP if V % kernel.tile_v == 0), key=duration)


def gradient_bound(warm_log_bound: float) -> float:
    """Returns the bound for maps made in a backward: warm_log_bound, or -inf for long windows.

    A backward has no sums from kkt_solve of what keys add to the bound. Where windows are long,
    folding every head then takes less time than searching for its window.
    """
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
    """Returns the most chunks of a segment in a backward, or None to leave sequences whole.

    The two chains of a backward run at the same time; the model counts one of them, on half of the
    SMs. With `mapped`, other ranks need this rank's maps, so the result is never None.
    """
    half = sm_count // 2
    ctas = {step: num_value_heads * V // tile for tile, step in CHAIN_STEP.items() if tile <= V}

    def chains(pieces: Lengths) -> float:
        return min(_chains(pieces, step, ctas[step], half) for step in ctas)

    def duration(most: int) -> float:
        pieces = cut_lengths(sequences, most)
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
    """Returns numbers of chunks per segment: for each of WAVES, the fewest that fit into it.

    Segments with `ctas` CTAs each fit into a number of waves if their CTAs are at most that many
    times sm_count. Numbers that would leave all sequences whole are not returned.
    """

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
    """Returns the time of the kernels gate and kkt_solve."""
    return SOLVE_START + SOLVE_STEP * heads * _total(sequences) / sm_count


def _total(sequences: Lengths) -> int:
    return sum(chunks * count for chunks, count in sequences)


def _chains(pieces: Lengths, step: float, ctas: int, sm_count: int) -> float:
    """Returns the time of a chain's kernel with `ctas` CTAs per piece and one CTA on an SM.

    Pieces of equal length run in waves. Where lengths differ, short pieces fill the SMs that the
    last wave leaves empty.
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
    """Returns the time of segment_map, which maps every segment but each sequence's last.

    CTAs of cold heads come first and walk a segment each. CTAs of warm heads fill up the last wave:
    those for b walk a window, those for M walk nothing. A sequence's first segment needs no M.

    Args:
        pieces: the segments that `sequences` are cut into.
        solves: segment_map solves for A.
        reads_keys: segment_map reads the norms of keys to find windows; kkt_solve has not.
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
    """Returns the time of segment_map_bwd: every segment but a sequence's first, one CTA an SM."""
    length, mapped = _mapped(sequences, pieces)
    ctas = mapped * heads * V / MAP_TILE
    share, window = _windows(warm_log_bound, length)
    steps = ctas * (share * length + (1 - share) * window)
    waves = GRADIENT_MAP_WAVE * ctas / sm_count
    return SHORT + waves + CHAIN_STEP[MAP_TILE] * max(length, steps / sm_count)


def _folds(sequences: Lengths, pieces: Lengths) -> float:
    """Returns the time of segment_scan, which folds all but a sequence's first and last segment."""
    most = max(chunks for chunks, _ in sequences) / max(chunks for chunks, _ in pieces)
    return SCAN_STEP * max(0.0, most - 2)


def _mapped(sequences: Lengths, pieces: Lengths) -> tuple[int, int]:
    """Returns the chunks of the longest segment, and the number of segments that have a map."""
    segments, of_sequence = (sum(count for _, count in x) for x in (pieces, sequences))
    return max(chunks for chunks, _ in pieces), segments - of_sequence


def _windows(warm_log_bound: float, length: int) -> tuple[float, int]:
    """Returns the share of heads that is cold in segments of `length` chunks, and the number of
    chunks that a warm head walks.
    """
    if warm_log_bound == -math.inf:
        return 1.0, length
    window = math.ceil(-warm_log_bound / FORGOTTEN)
    return (COLD_SHARE, window) if window < length else (1.0, length)
