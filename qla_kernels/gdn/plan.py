"""Decides whether sequences are cut into segments, how finely, and which kernels run.

A cut sequence runs on several CTAs per head and tile, but the states between its segments have to
be computed first (docs/lessons.md). A plan is the choice of least time by the model of `times`.
The functions here plan one sample of lengths: those that the host knows. `bands` plans samples that
stand for lengths which the device alone knows, and `choices` asks what a call needs.

All functions are pure functions of numbers, and times are in us.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from qla_kernels.gdn import lengths, times
from qla_kernels.gdn.lengths import Lengths, cut_lengths, longest_of, num_items
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.gdn.times import (
    CHAIN_STEP,
    COLD_SHARE,
    SHARING,
    STEP,
    WIDE_STEP,
    ForwardChoice,
    Shape,
    whole_time,
)

# A window of chunks at a segment's end may stand for the whole segment if it scales the state
# before it by less than e^this, 6e-6. Rounding a state to bf16, as an operand, changes it by 2e-3.
WARM_LOG_BOUND = -12.0
# Below this bound all entries of a map are under 2^-150, half of fp32's least number: 0 in fp32.
EXACT_LOG_BOUND = -104.0
LONG_LOG_BOUND = 2 * WARM_LOG_BOUND  # with a lower bound windows, and reading their keys, are long

# The kernel for every batch if results may not depend on it: others sum in another order.
BATCH_INVARIANT = ForwardChoice(64, True)
POOL_16 = ForwardChoice(64, True)  # the one that takes pools in bf16
# Cutting never gained with others of STEP.
CUT_KERNELS = ForwardChoice(64, True), ForwardChoice(128, False)

GAIN = 0.95  # a cut must take less than this share of the time of whole sequences
GRADIENT_GAIN = 0.97  # likewise, of a backward's chains
KEPT_GAIN = 1.08  # likewise, if maps are kept: the model's time of gradients' maps is too long
# At K = 256 a cut must be expected to take less than this share of whole sequences' time, and not
# more than that share if all heads are cold.
WIDE_GAIN, WIDE_LOSS = 0.9, 1.1
# Equal shares must take less than this share of the time of any other plan, and so many us less;
# and than this share of that of whole items in their order, beside which the model's time of shares
# was 6 % too short.
SHARES_GAIN, LEAST_GAIN, DEALT_GAIN = 0.97, 10.0, 0.92


class Band(NamedTuple):
    """What is taken if the longest sequence has `least` chunks or more, up to the next band's."""

    least: int
    path: int  # 0: segments; i: whole sequences in the plan's whole[i - 1]
    segments: int = 0  # the most there may be, if that many are enough; 0 leaves sequences whole


def band_of(bands: Sequence[tuple[int, int, int]], sequences: Lengths) -> tuple[int, int, int]:
    """Returns the band that segment_plan takes for sequences of such chunks."""
    return [band for band in bands if band[0] <= longest_of(sequences)][-1]


class Plan(NamedTuple):
    """How a forward, or the two chains of a backward, run over a batch."""

    # Of the chain; of a backward the columns of V of a CTA, which is given an A. Its `solves` holds
    # for segment_map, too: both solve for A or read it. With bands, that of segments if there are.
    kernel: ForwardChoice
    segment_chunks: int | None = None  # the most chunks of a segment; None: no sequence is cut
    warm_log_bound: float = -math.inf  # the caller's; or -inf: all heads are folded, none searched
    shares: bool = False  # each CTA gets an equal share of all chunks: for whole sequences
    # Items stay whole if a sequence has more chunks, which the device finds; None: the host knows.
    most_cut: int | None = None
    bands: tuple[Band, ...] = ()  # the first one from 0 on; none if there is one path and no choice
    whole: tuple[ForwardChoice, ...] = ()  # with bands: the kernels of whole sequences, by path

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

    @property
    def has_segments(self) -> bool:
        """True if sequences are cut, or the device may cut them."""
        return self.segment_chunks is not None or any(band.path == 0 for band in self.bands)

    def of_whole(self, kernel: ForwardChoice) -> "Plan":
        """Returns the plan of whole sequences in this kernel: that of a path."""
        if kernel == SHARING and self.most_cut is not None:
            return Plan(kernel, shares=True, most_cut=self.most_cut)
        return Plan(kernel)

    def cut(self, sequences: Lengths) -> int | None:
        """Returns the most chunks of a segment for such sequences, or None if they stay whole."""
        if not self.bands:
            return self.segment_chunks
        most_segments = band_of(self.bands, sequences)[2]
        return lengths.device_spacing(sequences, most_segments) if most_segments else None

    def capacity(self, num_sequences: int, num_tokens: int) -> int:
        """Returns the most segments there can be."""
        if self.segment_chunks is None:
            return max([num_sequences, *(band.segments for band in self.bands)])
        return lengths.capacity(num_tokens, num_sequences, self.segment_chunks)


# ---- forward ----


@functools.lru_cache(maxsize=4096)
def forward(
    sequences: Lengths,
    shape: Shape,
    warm_log_bound: float = WARM_LOG_BOUND,
    mapped: bool = False,
    shares: bool = True,
) -> Plan:
    """Returns the plan of a forward that takes the least time by the model.

    Sequences stay whole unless cutting takes less than GAIN of their time. CTAs have equal shares
    of them where that `gains` on both. At K = 256 see `_wide_forward`.

    Args:
        sequences: (chunks, how many sequences have that many) pairs.
        warm_log_bound: log of what maps may leave out. The plan has this bound, or -inf where
            leaving out nothing is faster.
        mapped: other ranks need this rank's maps, so the plan has segments in any case, be it one
            per sequence.
        shares: the plan may have equal shares.
    """
    if shape[1] == WIDE:
        return _wide_forward(sequences, shape, warm_log_bound)
    kernels = kernels_of(shape)

    def duration(plan: Plan) -> float:
        return forward_time(plan, sequences, shape)

    cut = _cuts([x for x in kernels if x in CUT_KERNELS], sequences, shape, warm_log_bound)
    if mapped:
        most, bounds = max(1, longest_of(sequences)), (warm_log_bound, -math.inf)
        cut += [Plan(kernel, most, bound) for kernel in kernels for bound in bounds]
        return min(cut, key=duration)
    least, best = min((duration(Plan(kernel)), i) for i, kernel in enumerate(kernels))
    least, plan = whole_time(least), Plan(kernels[best])
    if cut:
        time, i = min((duration(plan), i) for i, plan in enumerate(cut))
        if time < GAIN * least:
            least, plan = time, cut[i]
    shared = whole_time(times.shares(sequences, shape)) if shares else math.inf
    return Plan(SHARING, shares=True) if gains(shared, least) else plan


def kernels_of(shape: Shape) -> list[ForwardChoice]:
    """Returns the kernels of a forward that compute so many columns of V."""
    return [kernel for kernel in STEP if shape[2] % kernel.tile_v == 0]


def _cuts(
    kernels: Sequence[ForwardChoice], sequences: Lengths, shape: Shape, warm_log_bound: float
) -> list[Plan]:
    """Returns plans with segments that fill the GPU, of which one may take the least time."""
    heads, _, V, sm_count = shape
    return [
        Plan(kernel, most, bound)
        for kernel in kernels
        for most in sorted(lengths.spacings(sequences, heads * V // kernel.tile_v, sm_count))
        for bound in dict.fromkeys((warm_log_bound, -math.inf))  # once, if they are the same
    ]


def gains(shared: float, least: float) -> bool:
    """Returns whether equal shares, of the time `shared`, gain enough on a plan of time `least`."""
    return shared < min(SHARES_GAIN * least, least - LEAST_GAIN)


def forward_time(
    plan: Plan, sequences: Lengths, shape: Shape, cold_share: float = COLD_SHARE
) -> float:
    """Returns the time of a forward by the model; `whole_time` corrects that of whole sequences.

    At K = 256 it is without gate, solve_score and chunk_table, which every plan has.

    Args:
        cold_share: at K = 256, the share of heads that is cold, if the plan looks for windows.
    """
    (heads, K, V, sm_count), (kernel, most, bound) = shape, plan[:3]
    pieces = sequences if most is None else cut_lengths(sequences, most)
    ctas, before = heads * V // kernel.tile_v, 0.0
    all_ctas = ctas * num_items(pieces)
    if K == WIDE:
        if most is not None:
            before = times.wide_starts(sequences, pieces, shape, bound, cold_share)
        step = times.wide_step(kernel.tile_v, V, min(sm_count, all_ctas))
    else:
        step = STEP[kernel]
        if not kernel.solves:
            before = times.solve(sequences, shape)
        if most is not None:
            before += times.CUT[kernel.solves] + times.folds(sequences, pieces)
            before += times.maps(sequences, pieces, shape, bound, kernel.solves, not plan.grows)
            if plan.grows:
                before += times.growth(sequences, shape)
            if all_ctas <= times.BUSY * sm_count:
                step *= times.QUIET
    return before + times.chain(pieces, step, ctas, sm_count)


@functools.lru_cache(maxsize=4096)
def in_order(plan: Plan, chunks: tuple[int, ...], shape: Shape) -> Plan:
    """Returns the plan of sequences in any order, or equal shares where this order is bad.

    Whole items go to SMs in their order. A long one that comes late runs alone at the end.
    """
    heads, _, V, sm_count = shape
    ctas = heads * V // plan.kernel.tile_v
    whole = plan.segment_chunks is None and not plan.shares
    if not (whole and sm_count < ctas * len(chunks) <= times.FEW_ITEMS * sm_count):
        return plan
    sequences = tuple(sorted(Counter(chunks).items()))
    before = 0.0 if plan.solves else times.solve(sequences, shape)
    items = before + times.dealt(chunks, STEP[plan.kernel], ctas, sm_count)
    gained = whole_time(times.shares(sequences, shape)) < DEALT_GAIN * whole_time(items)
    return Plan(SHARING, shares=True) if gained else plan


def wide(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> Plan:
    """Returns the plan of a forward at K = 256 that leaves sequences whole; A is given."""

    def step(width: int, at_once: int) -> float:
        return times.wide_step(width, V, at_once)

    width = _by_waves(WIDE_STEP, num_sequences * num_value_heads, V, sm_count, step)
    return Plan(ForwardChoice(width, False))


def _wide_forward(sequences: Lengths, shape: Shape, warm_log_bound: float) -> Plan:
    """Returns the plan of a forward at K = 256 that is expected to take the least time.

    Whether heads are cold depends on gates, which a plan does not know. A single cold head costs
    nearly what all of them do, so `expected` is the mean of two calls. Sequences stay whole unless
    cutting takes less than WIDE_GAIN of their time, and at most WIDE_LOSS of it where no head
    forgets.
    """
    heads, _, V, sm_count = shape
    whole = wide(num_items(sequences), heads, V, sm_count)
    least = forward_time(whole, sequences, shape)
    kernels = [ForwardChoice(width, False) for width in WIDE_STEP if V % width == 0]
    gaining = [
        plan
        for plan in _cuts(kernels, sequences, shape, warm_log_bound)
        if expected(plan, sequences, shape) < WIDE_GAIN * least
        and forward_time(plan, sequences, shape, 1.0) <= WIDE_LOSS * least
    ]
    return min(gaining, key=lambda plan: expected(plan, sequences, shape), default=whole)


def expected(plan: Plan, sequences: Lengths, shape: Shape) -> float:
    """Returns the mean time of a call whose heads are all warm, and of one of COLD_SHARE cold."""
    return sum(forward_time(plan, sequences, shape, share) for share in (0, COLD_SHARE)) / 2


@functools.lru_cache(maxsize=4096)
def tree(levels: tuple[Lengths, ...], shape: Shape) -> ForwardChoice:
    """Returns the kernel of a forward over a tree, whose levels run one after the other.

    Args:
        levels: of each level (chunks, how many nodes have that many) pairs.
    """
    heads, _, V, sm_count = shape
    every = tuple(pair for level in levels for pair in level)

    def duration(kernel: ForwardChoice) -> float:
        ctas = heads * V // kernel.tile_v
        before = 0.0 if kernel.solves else times.solve(every, shape)
        return before + sum(times.chain(level, STEP[kernel], ctas, sm_count) for level in levels)

    return min(kernels_of(shape), key=duration)


# ---- backward ----


def gradient_bound(warm_log_bound: float) -> float:
    """Returns the bound for maps made in a backward: warm_log_bound, or -inf for long windows.

    A backward has no sums from kkt_solve of what keys add to the bound. Where windows are long,
    folding every head then takes less time than searching for its window.
    """
    return warm_log_bound if warm_log_bound >= LONG_LOG_BOUND else -math.inf


def chains(
    sequences: Lengths,
    shape: Shape,
    warm_log_bound: float = WARM_LOG_BOUND,
    auto_cp: bool = True,
    kept: int | None = None,
) -> Plan:
    """Returns how a backward runs: by `backward`, or by `kept_is_faster` where segments are kept.

    Args:
        auto_cp: as for `of_backward`.
        kept: the most chunks of a segment of the forward, which kept them; None if it did not.
    """
    if kept is not None:
        faster = not auto_cp or kept_is_faster(sequences, shape, kept, warm_log_bound)
        most = kept if faster else None
    else:
        most = backward(sequences, shape, warm_log_bound) if auto_cp else None
    width = BATCH_INVARIANT.tile_v
    if auto_cp:
        pieces = sequences if most is None else cut_lengths(sequences, most)
        width, _ = times.both_chains(pieces, shape)
    return Plan(ForwardChoice(width, False), most)


@functools.lru_cache(maxsize=4096)
def backward(
    sequences: Lengths, shape: Shape, warm_log_bound: float = WARM_LOG_BOUND, mapped: bool = False
) -> int | None:
    """Returns the most chunks of a segment in a backward, or None to leave sequences whole.

    With `mapped`, other ranks need this rank's maps, so the result is never None.
    """
    heads, _, V, sm_count = shape

    def duration(most: int) -> float:
        pieces = cut_lengths(sequences, most)
        return times.cut_backward(sequences, pieces, shape, warm_log_bound)

    tiles = [heads * V // width for width in CHAIN_STEP if V % width == 0]
    wanted = set().union(*(lengths.spacings(sequences, ctas, sm_count // 2) for ctas in tiles))
    if mapped:
        return min(wanted | {max(1, longest_of(sequences))}, key=duration)
    best = min(sorted(wanted), key=duration, default=None)
    if best is None or duration(best) > GRADIENT_GAIN * times.both_chains(sequences, shape)[1]:
        return None
    return best


@functools.lru_cache(maxsize=4096)
def kept_is_faster(
    sequences: Lengths, shape: Shape, segment_chunks: int, warm_log_bound: float = WARM_LOG_BOUND
) -> bool:
    """Returns whether a backward should take a forward's segments of at most `segment_chunks`.

    Their maps and start states are kept, but gradients need maps of their own: where whole
    sequences fill the GPU, these cost more than is won.
    """
    pieces = cut_lengths(sequences, segment_chunks)
    cut = times.gradient_pieces(sequences, pieces, shape, warm_log_bound)
    return cut <= KEPT_GAIN * times.both_chains(sequences, shape)[1]


# ---- numbers of CTAs, and widths of tiles that need no plan ----


def ctas(items: int, equal_lengths: bool, sm_count: int) -> int:
    """Returns the number of CTAs that walk `items`, one for each sequence, head and tile.

    If items have equal lengths, there is at most one CTA per SM, and each overlaps the start of an
    item with the end of the one before. The items of such a CTA are fixed beforehand, so that items
    of different lengths get one CTA each: the hardware then balances them better.
    """
    return min(items, sm_count) if equal_lengths else items


def scan_columns(columns: int, sm_count: int) -> int:
    """Returns how many of the `columns` columns of V, over all heads, a CTA of segment_scan folds.

    16 take less time than 32 as long as all CTAs run at once.
    """
    return 16 if columns // 16 <= sm_count else 32


def tile_v(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> int:
    """Returns how many columns of V a CTA of a backward chain computes, 64 or 128."""

    def step(width: int, _: int) -> float:
        return CHAIN_STEP[width]

    return _by_waves(CHAIN_STEP, num_sequences * num_value_heads, V, sm_count, step)


def _by_waves(
    widths: Iterable[int], heads: int, V: int, sm_count: int, step: Callable[[int, int], float]
) -> int:
    """Returns the width whose waves of CTAs, one CTA on an SM, take less time.

    Args:
        widths: columns of V of a CTA, from which to choose.
        heads: value heads of all sequences.
        step: the time of a chunk, for a width and the number of CTAs that run at once.
    """

    def duration(width: int) -> float:
        ctas = heads * (V // width)
        return -(-ctas // sm_count) * step(width, min(ctas, sm_count))

    return min((width for width in widths if V % width == 0), key=duration)
