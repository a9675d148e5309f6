"""The time that the kernels of a call take, by a model: what `plan` compares.

Times are in us (docs/lessons.md). All functions are pure functions of numbers. plans.c repeats
those that plans of known lengths need; known.py gives it the constants. A `shape` has the value
heads, K, V and the GPU's number of SMs.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from qla_kernels.gdn.lengths import Lengths, longest_of, num_items, total
from qla_kernels.gdn.shapes import SHARED_KEYS, key_room

Shape = tuple[int, int, int, int]


class ForwardChoice(NamedTuple):
    """A variant of a chain's kernel."""

    tile_v: int  # columns of V a CTA computes
    solves: bool  # computes A itself; otherwise it reads the A that kkt_solve wrote


SHARING = ForwardChoice(128, True)  # the one with equal shares, for K with the room SHARED_KEYS

# ---- times by kernels, fitted to an H200 ----

# all: a launch; a CTA, before its first chunk and after its last one; a launch in the backward
LAUNCH, START, SHORT = 4.0, 10.0, 3.5
# gate and kkt_solve: their launches; per chunk and value head on one SM; what it takes more there
# if it sums what keys add to the bound
SOLVE_START, SOLVE_STEP, GROWTH = 28.0, 0.5, 0.03
# fused_fwd, per chunk of a CTA. Half the columns take more than half the time, because latency that
# does not depend on the columns bounds a chunk; solving for A in the same CTA adds the most of it.
STEP = {ForwardChoice(64, True): 1.7, ForwardChoice(128, True): 2.7, ForwardChoice(128, False): 2.2}
QUIET, BUSY = 0.92, 0.9  # a chunk takes 0.92 of its time if at most 0.9 of the SMs have a CTA
UNCUT = 0.94, -8.0  # the measured time of whole sequences is 0.94 of the model's time, less 8 us
# fused_fwd with equal shares: share_table; a CTA's next item, of which more than FEW_ITEMS a CTA
# were not measured and count as a whole start; a chunk, and what it takes more for each chunk that
# the next CTA is ahead or behind in the same keys, up to FAR; a state that a CTA waits for
# (estimated); items of which one CTA makes the table.
SHARES, NEXT_ITEM, FEW_ITEMS = 12.0, 3.0, 3
SHARE_STEP, APART_STEP, FAR = 2.65, 0.0037, 60
HANDED, MOST_SHARED = 3.0, 8192
# Cutting a forward, fixed, keyed by whether segment_map solves for A. If it does not, two of its
# CTAs share an SM, segment_plan doubles as chunk_table and launches overlap: hence a negative cost.
CUT = {True: 6.0, False: -10.0}
# segment_map, keyed likewise: its CTAs on an SM; a CTA before its first chunk; per chunk of a CTA,
# at most one CTA per SM at once, or more CTAs than SMs. A CTA's search for its window: gates; per
# chunk, norms of its keys. Columns of a CTA.
MAP_CTAS, MAP_START = {True: 1, False: 2}, {True: 1.6, False: 7.5}
MAP_STEP = {True: (1.4, 1.6), False: (1.15, 1.28)}
LOOK, LOOK_STEP, MAP_TILE = 2.3, 1.3, 64
# Heads: the share that is cold, at gates like those FlashQLA publishes; the log decay of the warm
# ones per chunk: 64 tokens, each keeps 95 % of the state
COLD_SHARE, FORGOTTEN = 0.25, 3.2
SCAN_STEP = 0.65  # segment_scan, a cold segment
# A backward's segments: segment_plan, gradients of first states, and joining streams; a wave of
# CTAs of segment_map_bwd before their first chunks; a segment, which is folded twice and begins in
# every kernel.
AROUND_BACKWARD, GRADIENT_MAP_WAVE, GRADIENT_FOLD = 20.0, 12.0, 3.0
# chunk_states and dstate_chain, per chunk of a CTA, by columns of V; and of both on one SM, per
# chunk of a CTA of each: one chain mostly after the other; and side by side, where they move fewer
# bytes in the same time.
CHAIN_STEP = {128: 2.3, 64: 1.45}
PAIR_STEP = {64: (3.15, 3.48), 128: (5.0, 8.1)}
# Where both chains come in waves: a CTA that starts while others run, and a chunk's mean time over
# CHAIN_STEP's, because the later waves are of chunk_states, whose chunks take less time.
NEXT_WAVE, LATER_WAVES = 1.0, 0.925
CHUNK_GRADS = 7.0  # chunk_grads, per chunk and value head on one SM

# ---- times by kernels, for K = 256, fitted to an H100 ----

# wide_fwd, per chunk of a CTA, by columns of V; KB a us that memory gives all CTAs
WIDE_STEP, WIDE_MEMORY = {128: 2.6, 64: 1.6}, 3250
WIDE_CUT = 10.0  # segment_plan, and the launches of the kernels below
# wide_windows: gates; per chunk of a window, norms of its keys (counted, not measured alone); the
# log decay a chunk of the head that has the longest window of the warm ones
WIDE_LOOK, WIDE_LOOK_STEP, WIDE_FORGOTTEN = 6.0, 0.7, 1.1
WIDE_MAP_STEP = {128: 1.9, 64: 1.2}  # wide_map, per chunk of a CTA; of 64 columns it is derived
# wide_scan, a segment: at least so much, or for each CTA of a cold head, which read L2 together;
# columns of V of a CTA
WIDE_FOLD, WIDE_FOLD_CTA, WIDE_FOLD_TILE = 7.8, 0.11, 16


# ---- chains ----


def solve(sequences: Lengths, shape: Shape) -> float:
    """Returns the time of the kernels gate and kkt_solve."""
    heads, *_, sm_count = shape
    return SOLVE_START + SOLVE_STEP * heads * total(sequences) / sm_count


def growth(sequences: Lengths, shape: Shape) -> float:
    """Returns what kkt_solve takes more if it sums what keys add to the bound."""
    heads, *_, sm_count = shape
    return GROWTH * heads * total(sequences) / sm_count


def chain(pieces: Lengths, step: float, ctas: int, sm_count: int, start: float = START) -> float:
    """Returns the time of a chain's kernel with `ctas` CTAs per piece and one CTA on an SM.

    Pieces of equal length run in waves. Where lengths differ, short pieces fill the SMs that the
    last wave leaves empty.
    """
    times = [(start + step * chunks, ctas * count) for chunks, count in pieces]
    all_ctas = sum(count for _, count in times)
    mean = sum(time * count for time, count in times) / max(1, all_ctas)
    shortest, longest = (f((time for time, _ in times), default=1.0) for f in (min, max))
    alike = shortest / longest
    waves = alike * -(-all_ctas // sm_count) + (1 - alike) * all_ctas / sm_count
    return LAUNCH + max(longest, waves * mean)


def dealt(
    chunks: Sequence[int], step: float, ctas: int, sm_count: int, start: float = START
) -> float:
    """Returns the time of a chain's kernel whose CTAs go, in their order, to the first free SM.

    `chain` has no order: its short pieces fill all gaps, the best that dealing can do.
    """
    free = [(0.0, sm_count)]  # (when, how many SMs), sorted
    for length in chunks:
        wanted = ctas
        while wanted:
            now, idle = free.pop(0)
            if idle > wanted:
                free.insert(0, (now, idle - wanted))
            took = min(idle, wanted)
            bisect.insort(free, (now + start + step * length, took))
            wanted -= took
    return LAUNCH + free[-1][0]


def whole_time(duration: float) -> float:
    """Returns the measured time of a forward of whole sequences, from the model's."""
    share, more = UNCUT
    return share * duration + more


def shares(sequences: Lengths, shape: Shape) -> float:
    """Returns the time of a forward whose CTAs have equal shares of all chunks; inf if it has none.

    Items that fit a single wave have none. A CTA has its part of the items, and cuts one of them.
    Pieces of an item that is longer than a share run one after the other.
    """
    heads, K, V, sm_count = shape
    tiles = heads * V // SHARING.tile_v
    items = tiles * num_items(sequences)
    fits = V % SHARING.tile_v == 0 and key_room(K) == SHARED_KEYS
    if not fits or not sm_count < items <= MOST_SHARED:
        return math.inf
    share, longest = max(1, -(-tiles * total(sequences) // sm_count)), longest_of(sequences)
    step = SHARE_STEP + APART_STEP * _apart(sequences, tiles, sm_count)
    start = NEXT_ITEM if items <= FEW_ITEMS * sm_count else START
    waiting = HANDED * ((longest - 1) // share)
    around = SHARES + LAUNCH + START + start * items / sm_count
    return around + waiting + step * max(share, longest)


def _apart(sequences: Lengths, tiles: int, sm_count: int) -> float:
    """Returns how many chunks of a sequence lie between CTAs with neighbouring shares, at most FAR.

    Neighbours that compute the same sequence read the same keys, which L2 keeps for a while.
    """
    longest = longest_of(sequences)
    if len({chunks for chunks, _ in sequences}) > 1:  # some are near and some far
        return min(longest / 4, FAR)
    between = tiles * total(sequences) / sm_count % max(1, longest)
    return min(between, longest - between, FAR)


def wide_step(width: int, V: int, at_once: int) -> float:
    """Returns the time of a chunk in wide_fwd, where so many CTAs run at once.

    The CTAs of a head share 80 KB of q, k, A and P, which memory is read for once. A CTA has 16 KB
    of v and of o for each 64 columns, together.
    """
    return max(WIDE_STEP[width], at_once * (80 * width / V + width / 4) / WIDE_MEMORY)


@functools.lru_cache(maxsize=4096)
def both_chains(pieces: Lengths, shape: Shape) -> tuple[int, float]:
    """Returns the columns of V a CTA of a backward's chains computes, and the chains' time.

    The width is the one that takes less time. The chains run at the same time: side by side where
    all CTAs of both fit the GPU, otherwise mostly one after the other, as their CTAs were launched.
    """
    times = {
        width: chains_of_width(pieces, width, shape)
        for width in CHAIN_STEP
        if shape[2] % width == 0
    }
    width = min(times, key=times.__getitem__)
    return width, times[width]


def chains_of_width(pieces: Lengths, tile_v: int, shape: Shape) -> float:
    """Returns the time of a backward's chains, whose CTAs compute `tile_v` columns of V."""
    heads, _, V, sm_count = shape
    ctas = heads * V // tile_v
    beside = 2 * ctas * num_items(pieces) <= sm_count
    step = CHAIN_STEP[tile_v] * (1.0 if beside else LATER_WAVES)
    work = PAIR_STEP[tile_v][beside] * ctas * total(pieces) / sm_count
    steps = chain(pieces, step, 2 * ctas, sm_count, NEXT_WAVE)
    return START + max(LAUNCH + work, steps)


def chunk_grads(num_chunks: int, shape: Shape) -> float:
    """Returns the time of the kernel chunk_grads."""
    heads, *_, sm_count = shape
    return LAUNCH + CHUNK_GRADS * num_chunks * heads / sm_count


# ---- segments; `pieces` are those that `sequences` are cut into ----


def windows(
    warm_log_bound: float, length: int, forgotten: float = FORGOTTEN, cold: float = COLD_SHARE
) -> tuple[float, int]:
    """Returns the share of heads that is cold in segments of `length` chunks, and the number of
    chunks that the slowest warm head walks.

    Args:
        forgotten: log decay of that head per chunk.
        cold: the share of heads that has no window.
    """
    if warm_log_bound == -math.inf:
        return 1.0, length
    window = math.ceil(-warm_log_bound / forgotten)
    return (cold, window) if window < length else (1.0, length)


def _mapped(
    sequences: Lengths, pieces: Lengths, shape: Shape, tile: int
) -> tuple[int, float, float]:
    """Returns the chunks of the longest segment, and the CTAs of `tile` columns for b and for M.

    Every segment but a sequence's last has a map. A sequence's first segment needs no M.
    """
    heads, K, V, _ = shape
    length, mapped = longest_of(pieces), num_items(pieces) - num_items(sequences)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    return length, heads * mapped * V / tile, heads * (mapped - firsts) * K / tile


def maps(
    sequences: Lengths,
    pieces: Lengths,
    shape: Shape,
    warm_log_bound: float,
    solves: bool,
    reads_keys: bool,
) -> float:
    """Returns the time of segment_map.

    CTAs of cold heads come first and walk a segment each. CTAs of warm heads fill up the last wave:
    those for b walk a window, those for M walk nothing.

    Args:
        solves: segment_map solves for A.
        reads_keys: segment_map reads the norms of keys to find windows; kkt_solve has not.
    """
    sm_count, (length, for_b, for_M) = shape[3], _mapped(sequences, pieces, shape, MAP_TILE)
    share, window = windows(warm_log_bound, length)
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


def folds(sequences: Lengths, pieces: Lengths, step: float = SCAN_STEP) -> float:
    """Returns the time of segment_scan, which folds all but a sequence's first and last segment."""
    most = max(1, longest_of(sequences)) / max(1, longest_of(pieces))
    return step * max(0.0, most - 2)


def map_tile(V: int) -> int:
    """Returns how many columns of V, or of K, a CTA of wide_map computes: 128 if V allows it."""
    return 128 if V % 128 == 0 else 64


def wide_starts(
    sequences: Lengths, pieces: Lengths, shape: Shape, warm_log_bound: float, cold_share: float
) -> float:
    """Returns the time of wide_windows, wide_map and wide_scan, one CTA an SM.

    CTAs of cold heads come first and walk a segment each. CTAs of warm heads, for b alone, fill up
    the last wave.

    Args:
        cold_share: the share of heads that is cold, if windows are looked for.
    """
    heads, _, V, sm_count = shape
    step = WIDE_MAP_STEP[map_tile(V)]
    length, for_b, for_M = _mapped(sequences, pieces, shape, map_tile(V))
    share, window = windows(warm_log_bound, length, WIDE_FORGOTTEN, cold_share)
    cold, warm = share * (for_b + for_M), (1 - share) * for_b
    walk, look_back = START + step * length, START + step * window
    last = max(walk * math.ceil(cold / sm_count), (walk * cold + look_back * warm) / sm_count)
    look = 0.0
    if warm_log_bound > -math.inf:
        look = WIDE_LOOK + WIDE_LOOK_STEP * window * (share < 1)
    mapped = look + LAUNCH + max(look_back, last)
    of_sequences = num_items(sequences) * heads
    fold = max(WIDE_FOLD, WIDE_FOLD_CTA * share * of_sequences * V / WIDE_FOLD_TILE)
    return WIDE_CUT + mapped + (folds(sequences, pieces, fold) if share else 0.0)


def gradient_maps(
    sequences: Lengths, pieces: Lengths, shape: Shape, warm_log_bound: float
) -> float:
    """Returns the time of segment_map_bwd: every segment but a sequence's first, one CTA an SM."""
    sm_count, (length, ctas, _) = shape[3], _mapped(sequences, pieces, shape, MAP_TILE)
    share, window = windows(warm_log_bound, length)
    steps = ctas * (share * length + (1 - share) * window)
    waves = GRADIENT_MAP_WAVE * ctas / sm_count
    return SHORT + waves + CHAIN_STEP[MAP_TILE] * max(length, steps / sm_count)


def gradient_pieces(
    sequences: Lengths,
    pieces: Lengths,
    shape: Shape,
    warm_log_bound: float,
    tile_v: int | None = None,
) -> float:
    """Returns the time of a backward over segments, from maps that exist to the chains' end.

    Args:
        tile_v: columns of V of a CTA of the chains; None takes those of the least time.
    """
    before = gradient_maps(sequences, pieces, shape, warm_log_bound)
    chains = (
        both_chains(pieces, shape)[1] if tile_v is None else chains_of_width(pieces, tile_v, shape)
    )
    return AROUND_BACKWARD + before + folds(sequences, pieces, GRADIENT_FOLD) + chains


def cut_backward(
    sequences: Lengths,
    pieces: Lengths,
    shape: Shape,
    warm_log_bound: float,
    tile_v: int | None = None,
) -> float:
    """Returns the time of a backward over segments that it maps itself, to the chains' end."""
    before = maps(sequences, pieces, shape, warm_log_bound, False, True)
    return before + gradient_pieces(sequences, pieces, shape, warm_log_bound, tile_v)
