"""Plans for packed sequences whose lengths the device alone knows: a plan for each band.

The device finds the longest sequence and takes the band in which its number of chunks lies. A band
names a path: whole sequences in one kernel, or segments. Of segments it says how many there may be;
the device then cuts sequences as finely as that allows. The host computes the bands from the
numbers of sequences, tokens and heads, by the model of `plan`, and launches the kernels of every
path; those of a path that is not taken find no tokens. They cost time all the same, so there are
few paths, and often one. Whole sequences may have equal shares of chunks, which share_table cuts by
the lengths; the results have the same bits, so lengths need not decide that.

All functions are pure functions of numbers. docs/notes/gdn-segments.md, section 23.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from qla_kernels.gdn import durations, plan
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.heuristics import CHAIN_STEP, SHARING, STEP, ForwardChoice
from qla_kernels.gdn.kernels.tables import TABLE_WARPS
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.tile.constants import CHUNK

# What several paths add to a forward, in us, estimated: segment_plan, if segments do not need it
# anyway, and share_table, if it leaves items whole; per path that is not taken its launches, of
# which segments' run beside others, and share_table; per SM its CTAs. Then what it adds to a
# forward and to a backward if segments are whole sequences.
TABLES_TIME, IDLE_WHOLE, IDLE_SEGMENTS, IDLE_TABLE, IDLE_CTA = 4.5, 2.5, 4.0, 1.0, 0.8
WHOLE_SEGMENTS, WHOLE_GRADIENTS = 8.0, 30.0
# Sequences of equal length may take so many times what they take by the best path alone: in a
# forward, where paths that are not taken take time; in a backward, which has one path.
ALIKE, ALIKE_GRADIENTS = 1.12, 1.08
SHARES_LOSE = 1.01  # likewise, where there are equal shares, over what is taken without them
MOST_PATHS = 3
GRID = 2**0.25  # ratio of neighbouring lengths for which a band is computed

Choice = TypeVar("Choice")
Shape = tuple[int, int, int, int]  # value heads, K, V, and the GPU's number of SMs


class Band(NamedTuple):
    least: int  # chunks of the longest sequence from which on the band is taken, up to the next one
    kernel: ForwardChoice
    segments: int = 0  # the most there may be, if that many are enough; 0 leaves sequences whole


@dataclass(frozen=True)
class Bands:
    bands: tuple[Band, ...]  # the first one from 0 on
    segmented: ForwardChoice | None = None  # kernel of the path with segments, if there is one
    warm_log_bound: float = -math.inf  # of segments, as in a Plan
    # Whole sequences in the kernel SHARING have equal shares, unless one has more chunks than this.
    most_cut: int | None = None

    @property
    def solves(self) -> bool:
        """True if no kernel is given an A."""
        return self.segmented is None or self.segmented.solves

    @functools.cached_property
    def whole(self) -> tuple[ForwardChoice, ...]:
        """The kernels of whole sequences, of one path each."""
        every = dict.fromkeys(band.kernel for band in self.bands)
        return tuple(kernel for kernel in every if kernel != self.segmented)

    def whole_plan(self, kernel: ForwardChoice) -> Plan:
        """Returns the plan of whole sequences in this kernel."""
        if kernel == SHARING and self.most_cut is not None:
            return Plan(kernel, None, shares=True, most_cut=self.most_cut)
        return Plan(kernel, None)

    @functools.cached_property
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the bands as segment_plan reads them; path 0 is the one with segments."""
        paths = self.segmented, *self.whole
        return tuple((band.least, paths.index(band.kernel), band.segments) for band in self.bands)


class GradientBand(NamedTuple):
    least: int
    segments: int  # as in a Band


@dataclass(frozen=True)
class GradientBands:
    tile_v: int  # columns of V that a CTA of the chains computes
    bands: tuple[GradientBand, ...] = ()  # empty if sequences are never cut

    @functools.cached_property
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the bands as segment_plan reads them; there is only path 0."""
        return tuple((band.least, 0, band.segments) for band in self.bands)


class Path(NamedTuple):
    kernel: ForwardChoice
    warm_log_bound: float | None = None  # of segments; None if sequences stay whole
    shares: bool = False  # of whole sequences


@functools.lru_cache(maxsize=4096)
def forward(
    batch: tuple[int, int],
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
) -> Bands:
    """Returns the bands of a forward. With a single band, and no segments, no table is needed.

    Args:
        batch: the numbers of sequences and of tokens.
    """
    shape = num_value_heads, K, V, sm_count
    items = batch[0] * num_value_heads * V // SHARING.tile_v  # before rounding
    may_share = sm_count < items <= durations.FEW_ITEMS * sm_count
    return _forward(*_rounded(*batch), shape, warm_log_bound, may_share)


@functools.lru_cache(maxsize=4096)
def backward(
    batch: tuple[int, int],
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float = WARM_LOG_BOUND,
) -> GradientBands:
    """Returns the bands of a backward, which has one path; `batch` is as for `forward`."""
    return _backward(*_rounded(*batch), (num_value_heads, K, V, sm_count), warm_log_bound)


def row_of(rows: Sequence[tuple[int, ...]], sequences: Lengths) -> tuple[int, ...]:
    """Returns the row that segment_plan takes, of `rows` of bands, for sequences of such chunks."""
    longest = max((chunks for chunks, _ in sequences), default=0)
    return [row for row in rows if row[0] <= longest][-1]


def segment_chunks(sequences: Lengths, most_segments: int) -> int:
    """Returns the most chunks of a segment, as segment_plan finds it.

    It is the least number with which there are at most `most_segments`, or one of 1024 candidates
    if the longest sequence has more chunks than that. If there are more sequences than
    `most_segments`, it leaves them whole. Each step compares a candidate a warp.
    """
    longest = max((chunks for chunks, _ in sequences), default=0)
    below, step = 0, max(1, longest)
    for _ in range(2):
        step = -(-step // TABLE_WARPS)
        candidates = (below + (i + 1) * step for i in range(TABLE_WARPS))
        fits = [plan.num_segments(sequences, most) <= most_segments for most in candidates]
        below += (fits.index(True) if True in fits else TABLE_WARPS - 1) * step
    return below + step


def _rounded(num_sequences: int, num_tokens: int) -> tuple[int, int]:
    """Returns numbers of sequences and of chunks; they are few, so that bands are in a cache."""
    return plan.rounded(num_sequences), plan.rounded(-(-num_tokens // CHUNK))


@functools.lru_cache(maxsize=4096)
def _forward(
    num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float, may_share: bool
) -> Bands:
    num_value_heads, _, V, sm_count = shape
    if not num_sequences or not num_chunks:
        return Bands((Band(0, plan.forward((), *shape).kernel),))
    kernels = [kernel for kernel in STEP if V % kernel.tile_v == 0]
    whole = [Path(kernel) for kernel in kernels if kernel.solves]
    cut = [
        Path(kernel, bound)
        for kernel in kernels
        if kernel in plan.CUT_KERNELS
        for bound in dict.fromkeys((warm_log_bound, -math.inf))
    ]

    @functools.cache
    def best(path: Path, longest: int) -> tuple[float, int]:
        return _best(path, _lengths(num_sequences, num_chunks, longest), shape)

    def idle(path: Path) -> float:
        ctas = num_sequences * num_value_heads * V // path.kernel.tile_v
        launches = IDLE_WHOLE if path.warm_log_bound is None else IDLE_SEGMENTS
        return launches + IDLE_TABLE * path.shares + IDLE_CTA * ctas / sm_count

    def taken(paths: tuple[Path, ...], longest: int) -> tuple[float, Path]:
        """Returns the time of the path that takes least, with the time of the others, and it."""

        def duration(path: Path) -> float:
            others = sum(idle(other) for other in paths if other != path)
            tables = TABLES_TIME if others and path.warm_log_bound is None else 0.0
            return best(path, longest)[0] + others + tables

        return min(((duration(path), path) for path in paths), key=lambda found: found[0])

    samples = _samples(num_sequences, num_chunks)

    def least_lost(among: Sequence[Path], must: tuple[Path, ...] = ()) -> tuple[Path, ...]:
        """Returns the paths that lose least, at most one with segments; all of `must` are taken."""
        least = [min(best(path, longest)[0] for path in among) for longest in samples]
        segmented = [path for path in among if path.warm_log_bound is not None]
        choices = [
            (*first, *others)
            for count in range(1, MOST_PATHS + 1)
            for first in ((), *((path,) for path in segmented))
            for others in itertools.combinations(
                [path for path in among if path.warm_log_bound is None], count - len(first)
            )
            if len({path.kernel for path in (*first, *others)}) == count and {*must} <= {*others}
        ]
        times = [[taken(choice, x)[0] for x in samples] for choice in choices]
        return _least_lost(choices, times, least, ALIKE)

    paths, longest = least_lost([*whole, *cut]), _grid(num_sequences, num_chunks)
    share = Path(SHARING, shares=True)
    if may_share and best(share, samples[0])[0] < math.inf:
        others = least_lost([*paths, share], must=(share,))  # which keeps what long ones take
        without, shared = ([taken(of, x)[0] for x in longest] for of in (paths, others))
        if _gains(shared, without):
            paths = others
    found = [taken(paths, x)[1] for x in longest]
    bands = [(path.kernel, best(path, x)[1]) for path, x in zip(found, longest, strict=True)]
    rows = tuple(Band(least, *band) for least, band in _merged(longest, bands))
    most_cut = _most_cut(num_sequences, num_chunks, shape) if share in found else None
    for kernel, bound, _ in found:
        if bound is not None:
            return Bands(rows, kernel, bound, most_cut)
    return Bands(rows, most_cut=most_cut)


def _gains(shared: Sequence[float], without: Sequence[float]) -> bool:
    """Returns whether paths with equal shares gain for equal lengths, and lose for no others.

    Both have times for each longest sequence of the grid, from equal lengths on.
    """
    loses = any(a > SHARES_LOSE * b for a, b in zip(shared, without, strict=True))
    return plan.gains(shared[0], without[0]) and not loses


def _most_cut(num_sequences: int, num_chunks: int, shape: Shape) -> int:
    """Returns the most chunks of a longest sequence with which shares take less than whole items.

    share_table compares it with the longest one.
    """

    def loses(longest: int) -> bool:
        sequences = _lengths(num_sequences, num_chunks, longest)
        whole = plan.forward_time(Plan(SHARING, None), sequences, *shape)
        shared = durations.shares(sequences, *shape)
        return plan.whole_time(shared) > plan.whole_time(whole) + TABLES_TIME

    longest = range(-(-num_chunks // num_sequences), num_chunks + 1)
    return longest.start - 1 + bisect.bisect_left(longest, True, key=loses)


def _best(path: Path, sequences: Lengths, shape: Shape) -> tuple[float, int]:
    """Returns the least time of a path, and the segments it then has; 0 if sequences are whole."""
    (num_value_heads, _, V, sm_count), (kernel, bound, shares) = shape, path
    whole = plan.whole_time(plan.forward_time(Plan(kernel, None), sequences, *shape))
    if shares:
        shared = plan.whole_time(durations.shares(sequences, *shape))
        return min(shared, whole + TABLES_TIME), 0
    if bound is None:
        return whole, 0

    def cut(most: int) -> float:
        return plan.forward_time(
            Plan(kernel, plan.spacing(sequences, most), bound), sequences, *shape
        )

    found = _segments(sequences, num_value_heads * V // kernel.tile_v, sm_count)
    return min([(whole + WHOLE_SEGMENTS, 0), *((cut(most), most) for most in found)])


@functools.lru_cache(maxsize=4096)
def _backward(
    num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float
) -> GradientBands:
    num_value_heads, K, V, sm_count = shape
    chains = num_value_heads, V, sm_count
    rest = durations.chunk_grads(num_chunks, num_value_heads, sm_count)
    widths = [width for width in CHAIN_STEP if V % width == 0]

    @functools.cache
    def best(width: int, cuts: bool, longest: int) -> tuple[float, int]:
        """Returns a backward's least time and the segments it then has, as `_best` does."""
        sequences = _lengths(num_sequences, num_chunks, longest)
        whole = durations.chains_of_width(sequences, width, *chains) + rest
        if not cuts:
            return whole, 0

        def cut(most: int) -> float:
            both = sequences, plan.cut_lengths(sequences, plan.spacing(sequences, most))
            maps = durations.maps(
                *both, num_value_heads, K, V, sm_count, warm_log_bound, False, True
            )
            return maps + durations.gradient_pieces(*both, *chains, warm_log_bound, width) + rest

        found = _segments(sequences, num_value_heads * V // width, sm_count // 2)
        return min([(whole + WHOLE_GRADIENTS, 0), *((cut(most), most) for most in found)])

    samples = _samples(num_sequences, num_chunks)
    choices = list(itertools.product(widths, (False, True)))
    times = [[best(*choice, x)[0] for x in samples] for choice in choices]
    least = [min(of_sample) for of_sample in zip(*times, strict=True)]
    width, cuts = _least_lost(choices, times, least, ALIKE_GRADIENTS)
    if not cuts:
        return GradientBands(width)
    longest = _grid(num_sequences, num_chunks)
    found = [best(width, cuts, x)[1] for x in longest]
    bands = _merged(longest, found) if any(found) else ()
    return GradientBands(width, tuple(GradientBand(*band) for band in bands))


def _least_lost(
    choices: Sequence[Choice],
    times: Sequence[Sequence[float]],
    least: Sequence[float],
    limit: float,
) -> Choice:
    """Returns the choice that loses least in the mean, to a percent; of equals the first.

    A choice has a time for each sample, and none loses more than `limit` at the first sample.
    """
    lost = [[a / b for a, b in zip(of_choice, least, strict=True)] for of_choice in times]
    mean = [round(sum(x) / len(x), 2) if x[0] <= limit else math.inf for x in lost]
    return choices[mean.index(min(mean))]


def _segments(sequences: Lengths, ctas: int, sm_count: int) -> list[int]:
    """Returns numbers of segments, of `ctas` CTAs each, that fill the GPU and cut a sequence."""
    num_sequences = sum(count for _, count in sequences)
    room = sorted({int(waves * sm_count) // ctas for waves in plan.WAVES})
    return [most for most in room if most > num_sequences]


def _lengths(num_sequences: int, num_chunks: int, longest: int) -> Lengths:
    """Returns one sequence of `longest` chunks and others that share the rest evenly."""
    others = max(0, num_sequences - 1)
    rest = max(0, round((num_chunks - longest) / max(1, others)))
    return tuple(pair for pair in ((rest, others), (longest, 1)) if pair[1])


def _samples(num_sequences: int, num_chunks: int) -> list[int]:
    """Returns chunks of the longest sequence of the batches for which paths are compared.

    Sequences are of equal length; or parts of a line that is broken at random, whose longest is
    1 + 1/2 + ... + 1/N times the mean; or half as far from the mean; or twice as long, if that is
    at most half of all tokens.
    """
    mean = num_chunks / max(1, num_sequences)
    broken = mean * sum(1 / n for n in range(1, num_sequences + 1))
    found = mean, (mean + broken) / 2, broken, max(broken, min(2 * broken, num_chunks / 2))
    return [max(1, math.ceil(x)) for x in found]


def _grid(num_sequences: int, num_chunks: int) -> list[int]:
    """Returns chunks of a longest sequence, from the mean to all chunks."""
    found, longest = [], max(1, -(-num_chunks // max(1, num_sequences)))
    while longest < num_chunks:
        found.append(longest)
        longest = max(longest + 1, round(longest * GRID))
    return [*found, max(1, num_chunks)]


def _merged(longest: list[int], bands: list[Choice]) -> Iterator[tuple[int, Choice]]:
    """Yields (least, band) of each run of equal bands; the first one begins at 0."""
    for i, found in enumerate(bands):
        if i == 0 or found != bands[i - 1]:
            yield longest[i] if i else 0, found
