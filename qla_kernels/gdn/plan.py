"""Decides whether long sequences are cut into segments, and how long these are.

All functions are pure functions of numbers; `durations` has the model of times. A cut sequence runs
on several CTAs per head and tile, but the states between its segments have to be computed first
(docs/lessons.md). Times are in us, measured on an H200.
"""

import bisect
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from qla_kernels.gdn import durations
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.heuristics import (
    BATCH_INVARIANT,
    CHAIN_STEP,
    SHARING,
    STEP,
    ForwardChoice,
    wide_tile,
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
GROWTH = 0.03  # kkt_solve summing what keys add to the bound: per chunk and value head, on one SM
GAIN = 0.95  # a cut must take less than this share of the time of whole sequences
GRADIENT_GAIN = 0.97  # likewise, of a backward's chains
KEPT_GAIN = 1.08  # likewise, if maps are kept: the model's time of gradients' maps is too long
# Equal shares must take less than this share of the time of any other plan, and so many us less.
SHARES_GAIN, LEAST_GAIN = 0.97, 10.0
UNCUT = 0.94, -8.0  # the measured time of whole sequences is 0.94 of the model's time, less 8 us
# Cutting never gained with others of STEP.
CUT_KERNELS = ForwardChoice(64, True), ForwardChoice(128, False)
WAVES = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3)  # waves of CTAs that segments are sized to fill
QUIET, BUSY = 0.92, 0.9  # a chunk takes 0.92 of its time if at most 0.9 of the SMs have a CTA


class Plan(NamedTuple):
    kernel: ForwardChoice  # its `solves` holds for segment_map, too: both solve for A or read it
    segment_chunks: int | None  # the most chunks of a segment; None leaves sequences whole
    warm_log_bound: float = -math.inf  # the caller's; or -inf: all heads are folded, none searched
    shares: bool = False  # each CTA gets an equal share of all chunks: for whole sequences
    # Items stay whole if a sequence has more chunks, which the device finds; None: the host knows.
    most_cut: int | None = None

    @property
    def solves(self) -> bool:
        """True if no kernel is given an A."""
        return self.kernel.solves

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
    return tuple(sorted(Counter(rounded(-(-length // CHUNK)) for length in lengths).items()))


def rounded(chunks: int) -> int:
    """Returns a number rounded to four binary digits."""
    unit = 1 << max(0, chunks.bit_length() - 4)
    return (chunks + unit // 2) // unit * unit


def num_segments(sequences: Lengths, most: int) -> int:
    """Returns how many segments of at most `most` chunks there are."""
    return sum(max(1, -(-chunks // most)) * count for chunks, count in sequences)


def cut_lengths(sequences: Lengths, most: int) -> Lengths:
    """Returns the numbers of chunks of the sequences' segments, cut as segment_plan cuts them."""
    found: Counter[int] = Counter()
    for chunks, count in sequences:
        segments = max(1, -(-chunks // most))
        found[chunks // segments + 1] += chunks % segments * count
        found[chunks // segments] += (segments - chunks % segments) * count
    return tuple(sorted((+found).items()))


def wide(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> Plan:
    """Returns the plan of a forward at K = 256 that leaves sequences whole; A is given."""
    width = wide_tile(num_sequences, num_value_heads, V, sm_count)
    return Plan(ForwardChoice(width, False), None)


@functools.lru_cache(maxsize=4096)
def forward(
    sequences: Lengths,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
    mapped: bool = False,
    shares: bool = True,
) -> Plan:
    """Returns the plan of a forward that takes the least time by the model below.

    Sequences stay whole unless cutting takes less than GAIN of their time. CTAs have equal shares
    of them where that `gains` on both.

    Args:
        sequences: (chunks, how many sequences have that many) pairs.
        warm_log_bound: log of what maps may leave out. The plan has this bound, or -inf where
            leaving out nothing is faster.
        mapped: other ranks need this rank's maps, so the plan has segments in any case, be it one
            per sequence.
        shares: the plan may have equal shares.
    """
    shape = sequences, num_value_heads, K, V, sm_count
    kernels = [kernel for kernel in STEP if V % kernel.tile_v == 0]

    def duration(plan: Plan) -> float:
        return forward_time(plan, *shape)

    whole = min((Plan(kernel, None) for kernel in kernels), key=duration)
    bounds = dict.fromkeys((warm_log_bound, -math.inf))  # once, if they are the same
    cut = [
        Plan(kernel, most, bound)
        for kernel in kernels
        if kernel in CUT_KERNELS
        for most in sorted(spacings(sequences, num_value_heads * V // kernel.tile_v, sm_count))
        for bound in bounds
    ]
    if mapped:
        longest = max((chunks for chunks, _ in sequences), default=0)
        cut += [Plan(kernel, max(1, longest), bound) for kernel in kernels for bound in bounds]
        return min(cut, key=duration)
    best, least = whole, whole_time(duration(whole))
    if cut and duration(found := min(cut, key=duration)) < GAIN * least:
        best, least = found, duration(found)
    shared = whole_time(durations.shares(*shape)) if shares else math.inf
    return Plan(SHARING, None, shares=True) if gains(shared, least) else best


def gains(shared: float, least: float) -> bool:
    """Returns whether equal shares, of the time `shared`, gain enough on a plan of time `least`."""
    return shared < min(SHARES_GAIN * least, least - LEAST_GAIN)


def forward_time(
    plan: Plan, sequences: Lengths, num_value_heads: int, K: int, V: int, sm_count: int
) -> float:
    """Returns the time of a forward by the model; `whole_time` corrects that of whole sequences."""
    ctas, step = num_value_heads * V // plan.kernel.tile_v, STEP[plan.kernel]
    before, pieces = 0.0, sequences
    if not plan.kernel.solves:
        before = durations.solve(sequences, num_value_heads, sm_count)
    if plan.segment_chunks is not None:
        pieces = cut_lengths(sequences, plan.segment_chunks)
        shape = sequences, pieces, num_value_heads, K, V, sm_count
        before += CUT[plan.kernel.solves] + durations.folds(sequences, pieces)
        before += durations.maps(*shape, plan.warm_log_bound, plan.kernel.solves, not plan.grows)
        if plan.grows:
            before += GROWTH * num_value_heads * durations.total(sequences) / sm_count
        if ctas * sum(count for _, count in pieces) <= BUSY * sm_count:
            step *= QUIET
    return before + durations.chain(pieces, step, ctas, sm_count)


def whole_time(duration: float) -> float:
    """Returns the measured time of a forward of whole sequences, from the model's."""
    share, more = UNCUT
    return share * duration + more


@functools.lru_cache(maxsize=4096)
def tree(levels: tuple[Lengths, ...], num_value_heads: int, V: int, sm_count: int) -> ForwardChoice:
    """Returns the kernel of a forward over a tree, whose levels run one after the other.

    Args:
        levels: of each level (chunks, how many nodes have that many) pairs.
    """
    every = tuple(pair for level in levels for pair in level)

    def duration(kernel: ForwardChoice) -> float:
        ctas = num_value_heads * V // kernel.tile_v
        before = 0.0 if kernel.solves else durations.solve(every, num_value_heads, sm_count)
        return before + sum(
            durations.chain(level, STEP[kernel], ctas, sm_count) for level in levels
        )

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

    With `mapped`, other ranks need this rank's maps, so the result is never None.
    """
    shape = num_value_heads, V, sm_count

    def duration(most: int) -> float:
        both = sequences, cut_lengths(sequences, most)
        return durations.cut_backward(*both, num_value_heads, K, V, sm_count, warm_log_bound)

    tiles = [num_value_heads * V // tile for tile in CHAIN_STEP if V % tile == 0]
    wanted = set().union(*(spacings(sequences, ctas, sm_count // 2) for ctas in tiles))
    if mapped:
        longest = max((chunks for chunks, _ in sequences), default=0)
        return min(wanted | {max(1, longest)}, key=duration)
    best = min(sorted(wanted), key=duration, default=None)
    if best is None or duration(best) > GRADIENT_GAIN * durations.both_chains(sequences, *shape)[1]:
        return None
    return best


class ChainsPlan(NamedTuple):
    """How a backward runs its chains."""

    segment_chunks: int | None  # the most chunks of a segment; None leaves sequences whole
    tile_v: int  # columns of V of a CTA


def chains(
    sequences: Lengths,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
    auto_cp: bool = True,
) -> ChainsPlan:
    """Returns how a backward runs, by `backward`.

    Without auto_cp, sequences stay whole, and the width does not depend on the batch.
    """
    shape = num_value_heads, V, sm_count
    most = backward(sequences, num_value_heads, K, V, sm_count, warm_log_bound) if auto_cp else None
    return ChainsPlan(most, _width(sequences, most, *shape, auto_cp))


def kept_chains(
    sequences: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    segment_chunks: int,
    warm_log_bound: float = WARM_LOG_BOUND,
    auto_cp: bool = True,
) -> ChainsPlan:
    """Returns how a backward runs that may take a forward's segments, by `kept_is_faster`."""
    shape = num_value_heads, V, sm_count
    faster = not auto_cp or kept_is_faster(sequences, *shape, segment_chunks, warm_log_bound)
    most = segment_chunks if faster else None
    return ChainsPlan(most, _width(sequences, most, *shape, auto_cp))


def _width(
    sequences: Lengths, most: int | None, HV: int, V: int, sm_count: int, auto_cp: bool
) -> int:
    if not auto_cp:
        return BATCH_INVARIANT.tile_v
    pieces = sequences if most is None else cut_lengths(sequences, most)
    return durations.both_chains(pieces, HV, V, sm_count)[0]


@functools.lru_cache(maxsize=4096)
def kept_is_faster(
    sequences: Lengths,
    num_value_heads: int,
    V: int,
    sm_count: int,
    segment_chunks: int,
    warm_log_bound: float = WARM_LOG_BOUND,
) -> bool:
    """Returns whether a backward should take a forward's segments of at most `segment_chunks`.

    Their maps and start states are kept, but gradients need maps of their own: where whole
    sequences fill the GPU, these cost more than is won.
    """
    shape = num_value_heads, V, sm_count
    pieces = cut_lengths(sequences, segment_chunks)
    cut = durations.gradient_pieces(sequences, pieces, *shape, warm_log_bound)
    return cut <= KEPT_GAIN * durations.both_chains(sequences, *shape)[1]


def spacings(sequences: Lengths, ctas: int, sm_count: int) -> set[int]:
    """Returns numbers of chunks per segment: for each of WAVES, the fewest that fit into it.

    Segments with `ctas` CTAs each fit into a number of waves if their CTAs are at most that many
    times sm_count. Numbers that would leave all sequences whole are not returned.
    """
    longest = max((chunks for chunks, _ in sequences), default=0)
    found = (spacing(sequences, int(waves * sm_count) // ctas) for waves in WAVES)
    return {most for most in found if most < longest}


def spacing(sequences: Lengths, most_segments: int) -> int:
    """Returns the fewest chunks per segment with which there are at most `most_segments`.

    If there are more sequences than that, it is the number of chunks of the longest one.
    """
    longest = max((chunks for chunks, _ in sequences), default=0)
    fits = range(1, longest)
    return 1 + bisect.bisect_left(
        fits, True, key=lambda most: num_segments(sequences, most) <= most_segments
    )
