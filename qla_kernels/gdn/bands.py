"""Plans for packed sequences whose lengths the device alone knows: a plan for each band.

The device finds the longest sequence and takes the band in which its number of chunks lies. A band
names a path: whole sequences in one kernel, or segments. Of segments it says how many there may be;
the device then cuts sequences as finely as that allows. The host computes the bands from the
numbers of sequences, tokens and heads, by the model of `plan`, and launches the kernels of every
path; those of a path that is not taken find no tokens. They cost time all the same, so there are
few paths, and often one. Whole sequences may have equal shares of chunks, which share_table cuts by
the lengths; the results have the same bits, so lengths need not decide that.

All functions are pure functions of numbers. See docs/lessons.md.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from qla_kernels.gdn import durations, plan, samples
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.heuristics import CHAIN_STEP, SHARING, STEP, ForwardChoice
from qla_kernels.gdn.kernels.tables import TABLE_WARPS
from qla_kernels.gdn.paths import TABLES_TIME, Path, Shape, idle, most_cut, path_time, segments
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.tile.constants import CHUNK

WHOLE_GRADIENTS = 30.0  # what it adds to a backward if segments are whole sequences
# Sequences of equal length may take so many times what they take by the best path alone: in a
# forward, where paths that are not taken take time; in a backward, which has one path.
ALIKE, ALIKE_GRADIENTS = 1.12, 1.08
SHARES_LOSE = 1.01  # likewise, where there are equal shares, over what is taken without them
MOST_PATHS = 3

Choice = TypeVar("Choice")
Paths = tuple[Path, ...]


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


def cut(found: Bands, sequences: Lengths) -> int | None:
    """Returns the most chunks of a segment in the path taken for such sequences, or None."""
    *_, most_segments = row_of(found.rows, sequences)
    return segment_chunks(sequences, most_segments) if most_segments else None


def likely(batch: tuple[int, int]) -> list[Lengths]:
    """Returns the batches by which paths are chosen, that of sequences of equal length first."""
    rounded = _rounded(*batch)
    return [samples.lengths(*rounded, longest) for longest in samples.compared(*rounded)]


def _rounded(num_sequences: int, num_tokens: int) -> tuple[int, int]:
    """Returns numbers of sequences and of chunks; they are few, so that bands are in a cache."""
    return plan.rounded(num_sequences), plan.rounded(-(-num_tokens // CHUNK))


@functools.lru_cache(maxsize=4096)
def _forward(
    num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float, may_share: bool
) -> Bands:
    V = shape[2]
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
        return path_time(path, samples.lengths(num_sequences, num_chunks, longest), shape)

    def taken(paths: Paths, longest: int) -> tuple[float, Path]:
        """Returns the time of the path that takes least, with the time of the others, and it."""

        def duration(path: Path) -> float:
            others = sum(idle(other, num_sequences, shape) for other in paths if other != path)
            tables = TABLES_TIME if others and path.warm_log_bound is None else 0.0
            return best(path, longest)[0] + others + tables

        return min(((duration(path), path) for path in paths), key=lambda found: found[0])

    compared = samples.compared(num_sequences, num_chunks)

    def least_lost(whole: Sequence[Path], cut: Sequence[Path], must: Sequence[Path] = ()) -> Paths:
        """Returns the paths that lose least, at most one of `cut`, and among them all of `must`."""
        least = [min(best(path, longest)[0] for path in (*whole, *cut)) for longest in compared]
        choices = [
            (*segmented, *others)
            for count in range(1, MOST_PATHS + 1)
            for segmented in ((), *((path,) for path in cut))
            for others in itertools.combinations(whole, count - len(segmented))
            if len({path.kernel for path in (*segmented, *others)}) == count
            if {*must} <= {*others}
        ]
        times = [[taken(choice, x)[0] for x in compared] for choice in choices]
        return _least_lost(choices, times, least, ALIKE)

    paths, longest = least_lost(whole, cut), samples.grid(num_sequences, num_chunks)
    share = Path(SHARING, shares=True, or_whole=Path(SHARING) in paths)
    if may_share and best(share, compared[0])[0] < math.inf:
        # Instead of one of the paths, or beside them: what long sequences take stays.
        kept = [[path for path in paths if path in of] for of in (whole, cut)]
        others = least_lost([*kept[0], share], kept[1], must=[share])
        without, shared = ([taken(of, x)[0] for x in longest] for of in (paths, others))
        if _gains(shared, without):
            paths = others
    found = [taken(paths, x)[1] for x in longest]
    bands = [(path.kernel, best(path, x)[1]) for path, x in zip(found, longest, strict=True)]
    rows = tuple(Band(least, *band) for least, band in _merged(longest, bands))
    most = most_cut(num_sequences, num_chunks, shape) if share in found else None
    for kernel, bound, *_ in found:
        if bound is not None:
            return Bands(rows, kernel, bound, most)
    return Bands(rows, most_cut=most)


def _gains(shared: Sequence[float], without: Sequence[float]) -> bool:
    """Returns whether paths with equal shares gain for equal lengths, and lose for no others.

    Both have times for each longest sequence of the grid, from equal lengths on.
    """
    loses = any(a > SHARES_LOSE * b for a, b in zip(shared, without, strict=True))
    return plan.gains(shared[0], without[0]) and not loses


@functools.lru_cache(maxsize=4096)
def _backward(
    num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float
) -> GradientBands:
    num_value_heads, _, V, sm_count = shape
    chains = num_value_heads, V, sm_count
    rest = durations.chunk_grads(num_chunks, num_value_heads, sm_count)
    widths = [width for width in CHAIN_STEP if V % width == 0]

    @functools.cache
    def best(width: int, cuts: bool, longest: int) -> tuple[float, int]:
        """Returns a backward's least time and the segments it then has, as `_best` does."""
        sequences = samples.lengths(num_sequences, num_chunks, longest)
        whole = durations.chains_of_width(sequences, width, *chains) + rest
        if not cuts:
            return whole, 0

        def cut(most: int) -> float:
            both = sequences, plan.cut_lengths(sequences, plan.spacing(sequences, most))
            return durations.cut_backward(*both, *shape, warm_log_bound, width) + rest

        found = segments(sequences, num_value_heads * V // width, sm_count // 2)
        return min([(whole + WHOLE_GRADIENTS, 0), *((cut(most), most) for most in found)])

    compared = samples.compared(num_sequences, num_chunks)
    choices = list(itertools.product(widths, (False, True)))
    times = [[best(*choice, x)[0] for x in compared] for choice in choices]
    least = [min(of_sample) for of_sample in zip(*times, strict=True)]
    width, cuts = _least_lost(choices, times, least, ALIKE_GRADIENTS)
    if not cuts:
        return GradientBands(width)
    longest = samples.grid(num_sequences, num_chunks)
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


def _merged(longest: list[int], bands: list[Choice]) -> Iterator[tuple[int, Choice]]:
    """Yields (least, band) of each run of equal bands; the first one begins at 0."""
    for i, found in enumerate(bands):
        if i == 0 or found != bands[i - 1]:
            yield longest[i] if i else 0, found
