"""Plans for packed sequences whose lengths the device alone knows: a plan with bands.

The device finds the longest sequence and takes the band in which its number of chunks lies. A band
names a path, whole sequences in one kernel or segments. Of segments it says how many there may be;
the device then cuts as finely as that allows. The host computes the bands from samples, which stand
for all batches of as many sequences and tokens, and launches the kernels of every path; those of a
path that is not taken find no tokens. They cost time all the same, so there are few paths, and
often one. Whole sequences may have equal shares of chunks, which share_table cuts by the lengths;
the results have the same bits, so lengths need not decide that.

All functions are pure functions of numbers, and times are in us.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from qla_kernels.gdn import lengths, plan, times
from qla_kernels.gdn.lengths import Lengths, cut_lengths, longest_of, num_items, rounded
from qla_kernels.gdn.plan import CUT_KERNELS, WARM_LOG_BOUND, Band, Plan, forward_time
from qla_kernels.gdn.times import CHAIN_STEP, SHARING, ForwardChoice, Shape, whole_time
from qla_kernels.tile.constants import CHUNK

# Sequences of equal length may take so many times what they take by the best path alone:
# in a forward, where paths that are not taken take time; in a backward, which has one path; with
# equal shares, of what is taken without them.
ALIKE, ALIKE_GRADIENTS, SHARES_LOSE = 1.12, 1.08, 1.01
MOST_PATHS = 3
# What several paths add to a forward, estimated: segment_plan, if segments do not need it anyway,
# and share_table, if it leaves items whole; per path that is not taken its launches, of which
# segments' run beside others, and share_table; per SM its CTAs. Then what it adds to a forward, and
# to a backward, if segments are whole sequences.
TABLES_TIME, IDLE_WHOLE, IDLE_SEGMENTS, IDLE_TABLE, IDLE_CTA = 4.5, 2.5, 4.0, 1.0, 0.8
WHOLE_SEGMENTS, WHOLE_GRADIENTS = 8.0, 30.0

Choice = TypeVar("Choice")


class Path(NamedTuple):
    """One way to run all sequences; a band takes one."""

    kernel: ForwardChoice
    warm_log_bound: float | None = None  # of segments; None if sequences stay whole
    shares: bool = False  # of whole sequences
    or_whole: bool = False  # of shares: taken also where they would lose, and items stay whole


def banded(
    bands: Mapping[int, tuple[ForwardChoice, int]],
    segmented: ForwardChoice | None = None,
    warm_log_bound: float = -math.inf,
    most_cut: int | None = None,
) -> Plan:
    """Returns a plan with bands.

    Args:
        bands: the kernel and the segments of each, by the least chunks of the longest sequence.
        segmented: the kernel of segments, if there are any.
    """
    whole = tuple(dict.fromkeys(kernel for kernel, _ in bands.values() if kernel != segmented))
    paths = segmented, *whole
    rows = tuple(Band(least, paths.index(kernel), most) for least, (kernel, most) in bands.items())
    return Plan(segmented or whole[0], None, warm_log_bound, False, most_cut, rows, whole)


def rounded_size(num_sequences: int, num_tokens: int) -> tuple[int, int]:
    """Returns numbers of sequences and of chunks; they are few, so that bands are in a cache."""
    return rounded(num_sequences), rounded(-(-num_tokens // CHUNK))


@functools.lru_cache(maxsize=4096)
def forward(batch: tuple[int, int], shape: Shape, warm_log_bound: float = WARM_LOG_BOUND) -> Plan:
    """Returns the bands of a forward. With a single band, and no segments, no table is needed.

    Args:
        batch: the numbers of sequences and of tokens.
    """
    heads, _, V, sm_count = shape
    items = batch[0] * heads * V // SHARING.tile_v  # before rounding
    may_share = sm_count < items <= times.FEW_ITEMS * sm_count
    return _forward(*rounded_size(*batch), shape, warm_log_bound, may_share)


@functools.lru_cache(maxsize=4096)
def _forward(
    num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float, may_share: bool
) -> Plan:
    if not num_sequences or not num_chunks:
        return banded({0: (plan.forward((), shape).kernel, 0)})
    kernels = plan.kernels_of(shape)
    whole = [Path(kernel) for kernel in kernels if kernel.solves]
    cut = [
        Path(kernel, bound)
        for kernel in kernels
        if kernel in CUT_KERNELS
        for bound in dict.fromkeys((warm_log_bound, -math.inf))
    ]

    @functools.cache
    def best(path: Path, sequences: Lengths) -> tuple[float, int]:
        return path_time(path, sequences, shape)

    def taken(paths: Sequence[Path], sequences: Lengths) -> tuple[float, Path]:
        """Returns the time of the path that takes least, with the time of the others, and it."""

        def duration(path: Path) -> float:
            others = sum(idle(other, num_sequences, shape) for other in paths if other != path)
            tables = TABLES_TIME if others and path.warm_log_bound is None else 0.0
            return best(path, sequences)[0] + others + tables

        return min(((duration(path), path) for path in paths), key=lambda x: x[0])

    samples = lengths.likely(num_sequences, num_chunks)

    def least_lost(
        whole: Sequence[Path], cut: Sequence[Path], must: Sequence[Path] = ()
    ) -> tuple[Path, ...]:
        """Returns the paths that lose least, at most one of `cut`, and among them all of `must`."""
        least = [min(best(path, x)[0] for path in (*whole, *cut)) for x in samples]
        choices = [
            (*segmented, *others)
            for count in range(1, MOST_PATHS + 1)
            for segmented in ((), *((path,) for path in cut))
            for others in itertools.combinations(whole, count - len(segmented))
            if len({path.kernel for path in (*segmented, *others)}) == count
            if {*must} <= {*others}
        ]
        return _least_lost(choices, lambda paths, x: taken(paths, x)[0], samples, least, ALIKE)

    paths, grid = least_lost(whole, cut), lengths.grid(num_sequences, num_chunks)
    share = Path(SHARING, shares=True, or_whole=Path(SHARING) in paths)
    if may_share and best(share, samples[0])[0] < math.inf:
        # Instead of one of the paths, or beside them: what long sequences take stays.
        kept = [[path for path in paths if path in of] for of in (whole, cut)]
        others = least_lost([*kept[0], share], kept[1], must=[share])
        without, shared = ([taken(of, x)[0] for x in grid] for of in (paths, others))
        loses = any(a > SHARES_LOSE * b for a, b in zip(shared, without, strict=True))
        if plan.gains(shared[0], without[0]) and not loses:  # of equal lengths; of no others
            paths = others
    chosen = [(x, taken(paths, x)[1]) for x in grid]
    bands = _merged((x, (path.kernel, best(path, x)[1])) for x, path in chosen)
    taken_paths = [path for _, path in chosen]
    most = most_cut(num_sequences, num_chunks, shape) if share in taken_paths else None
    for kernel, bound, *_ in taken_paths:
        if bound is not None:
            return banded(bands, kernel, bound, most)
    return banded(bands, most_cut=most)


def idle(path: Path, num_sequences: int, shape: Shape) -> float:
    """Returns what a path adds that is not taken."""
    heads, _, V, sm_count = shape
    ctas = num_sequences * heads * V // path.kernel.tile_v
    launches = IDLE_WHOLE if path.warm_log_bound is None else IDLE_SEGMENTS
    return launches + IDLE_TABLE * path.shares + IDLE_CTA * ctas / sm_count


def path_time(path: Path, sequences: Lengths, shape: Shape) -> tuple[float, int]:
    """Returns the least time of a path, and the segments it then has; 0 if sequences are whole."""
    (heads, _, V, sm_count), (kernel, bound, shares, or_whole) = shape, path
    whole = whole_time(forward_time(Plan(kernel), sequences, shape))
    if shares:
        shared = _shared_time(sequences, shape)
        return (min(shared, whole + TABLES_TIME) if or_whole else shared), 0
    if bound is None:
        return whole, 0

    def cut(most: int) -> float:
        plan = Plan(kernel, lengths.spacing(sequences, most), bound)
        return forward_time(plan, sequences, shape)

    counts = lengths.segment_counts(sequences, heads * V // kernel.tile_v, sm_count)
    return min([(whole + WHOLE_SEGMENTS, 0), *((cut(most), most) for most in counts)])


def _shared_time(sequences: Lengths, shape: Shape) -> float:
    """Returns the time of equal shares, with the CTAs that have none."""
    heads, _, V, sm_count = shape
    items = num_items(sequences) * heads * V // SHARING.tile_v
    none = IDLE_CTA * (items - sm_count) / sm_count
    return whole_time(times.shares(sequences, shape)) + none


def most_cut(num_sequences: int, num_chunks: int, shape: Shape) -> int:
    """Returns the most chunks of a longest sequence with which shares take less than whole items.

    share_table compares it with the longest one.
    """

    def loses(longest: int) -> bool:
        sequences = lengths.with_longest(num_sequences, num_chunks, longest)
        whole = forward_time(Plan(SHARING), sequences, shape)
        return _shared_time(sequences, shape) > whole_time(whole) + TABLES_TIME

    longest = range(-(-num_chunks // num_sequences), num_chunks + 1)
    return longest.start - 1 + bisect.bisect_left(longest, True, key=loses)


def _least_lost(
    choices: Sequence[Choice],
    time: Callable[[Choice, Lengths], float],
    samples: Sequence[Lengths],
    least: Sequence[float],
    limit: float,
) -> Choice:
    """Returns the choice that loses least in the mean, to a percent; of equals the first.

    It loses over the `least` time of each sample, and no more than `limit` at the first sample.
    """
    times_of = [[time(choice, x) for x in samples] for choice in choices]
    lost = [[a / b for a, b in zip(of, least, strict=True)] for of in times_of]
    mean = [round(sum(x) / len(x), 2) if x[0] <= limit else math.inf for x in lost]
    return choices[mean.index(min(mean))]


def _merged(bands: Iterable[tuple[Lengths, Choice]]) -> dict[int, Choice]:
    """Returns each run of equal bands by its least chunks of a longest sequence, from 0 on."""
    runs = [next(run) for _, run in itertools.groupby(bands, key=lambda x: x[1])]
    return {longest_of(x) if i else 0: band for i, (x, band) in enumerate(runs)}


@functools.lru_cache(maxsize=4096)
def backward(batch: tuple[int, int], shape: Shape, warm_log_bound: float = WARM_LOG_BOUND) -> Plan:
    """Returns the bands of a backward, which has one path; `batch` is as for `forward`."""
    return _backward(*rounded_size(*batch), shape, warm_log_bound)


@functools.lru_cache(maxsize=4096)
def _backward(num_sequences: int, num_chunks: int, shape: Shape, warm_log_bound: float) -> Plan:
    heads, _, V, sm_count = shape
    rest = times.chunk_grads(num_chunks, shape)

    @functools.cache
    def best(width: int, cuts: bool, sequences: Lengths) -> tuple[float, int]:
        """Returns a backward's least time and the segments it then has, as `path_time` does."""
        whole = times.chains_of_width(sequences, width, shape) + rest
        if not cuts:
            return whole, 0

        def cut(most: int) -> float:
            pieces = cut_lengths(sequences, lengths.spacing(sequences, most))
            return times.cut_backward(sequences, pieces, shape, warm_log_bound, width) + rest

        counts = lengths.segment_counts(sequences, heads * V // width, sm_count // 2)
        return min([(whole + WHOLE_GRADIENTS, 0), *((cut(most), most) for most in counts)])

    samples = lengths.likely(num_sequences, num_chunks)
    widths = [width for width in CHAIN_STEP if V % width == 0]
    choices = list(itertools.product(widths, (False, True)))
    least = [min(best(*choice, x)[0] for choice in choices) for x in samples]
    width, cuts = _least_lost(
        choices, lambda choice, x: best(*choice, x)[0], samples, least, ALIKE_GRADIENTS
    )
    grid = lengths.grid(num_sequences, num_chunks) if cuts else []
    bands = _merged((x, best(width, cuts, x)[1]) for x in grid)
    rows = tuple(Band(least, 0, most) for least, most in bands.items() if any(bands.values()))
    return Plan(ForwardChoice(width, False), bands=rows)
