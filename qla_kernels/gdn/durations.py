"""The time that the parts of a call take, by a model: what `plan` compares.

All functions are pure functions of numbers. Times are in us, measured on an H200
(docs/lessons.md).
"""

import functools
import math

from qla_kernels.gdn.heuristics import (
    CHAIN_STEP,
    LAUNCH,
    SHARING,
    SOLVE_START,
    SOLVE_STEP,
    START,
)
from qla_kernels.gdn.shapes import SHARED_KEYS, key_room

# A CTA of segment_map before its first chunk; a wave of CTAs of segment_map_bwd before theirs.
MAP_START, GRADIENT_MAP_WAVE = {True: 1.6, False: 7.5}, 12.0
LOOK, LOOK_STEP = 2.3, 1.3  # a CTA's search for its window: gates; per chunk, norms of its keys
SHORT = 3.5  # a launch in the backward
AROUND_BACKWARD = 20.0  # segment_plan, gradients of sequences' first states, and joining streams
MAP_CTAS = {True: 1, False: 2}  # of segment_map on an SM
# Per chunk of a CTA of segment_map: at most one CTA per SM at once, or more CTAs than SMs.
MAP_STEP = {True: (1.4, 1.6), False: (1.15, 1.28)}
MAP_TILE = 64  # columns of a CTA
SCAN_STEP = 0.65  # a cold segment in segment_scan
GRADIENT_FOLD = 3.0  # a segment of a backward: it is folded twice, and begins in every kernel
COLD_SHARE = 0.25  # share of the heads that is cold, at gates like those FlashQLA publishes
FORGOTTEN = 3.2  # log decay of the warm heads per chunk: 64 tokens, each keeps 95 % of the state
# Both chains of a backward on one SM, per chunk of a CTA of each, by columns of a CTA: one chain
# mostly after the other; and side by side, where they move fewer bytes in the same time.
PAIR_STEP = {64: (3.15, 3.48), 128: (5.0, 8.1)}
# Where both chains come in waves: a CTA that starts while others run, and a chunk's mean time over
# CHAIN_STEP's, because the later waves are of chunk_states, whose chunks take less time.
NEXT_WAVE, LATER_WAVES = 1.0, 0.925
CHUNK_GRADS = 7.0  # chunk_grads, per chunk and value head on one SM
# Equal shares (docs/lessons.md): share_table; a CTA's next item, of which more than FEW_ITEMS a
# CTA were not measured and count as a whole start; a chunk, and what it takes more for each chunk
# that the next CTA is ahead or behind in the same keys, up to FAR; a state that a CTA waits for.
SHARES, NEXT_ITEM, FEW_ITEMS = 12.0, 3.0, 3
SHARE_STEP, APART_STEP, FAR = 2.65, 0.0037, 60
HANDED = 3.0  # estimated
MOST_SHARED = 8192  # items with equal shares: one CTA makes their table

Lengths = tuple[tuple[int, int], ...]  # (chunks, how many sequences or segments have that length)


def solve(sequences: Lengths, heads: int, sm_count: int) -> float:
    """Returns the time of the kernels gate and kkt_solve."""
    return SOLVE_START + SOLVE_STEP * heads * total(sequences) / sm_count


def total(sequences: Lengths) -> int:
    """Returns the number of chunks of all sequences."""
    return sum(chunks * count for chunks, count in sequences)


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


def shares(sequences: Lengths, heads: int, K: int, V: int, sm_count: int) -> float:
    """Returns the time of a forward whose CTAs have equal shares of all chunks; inf if it has none.

    Items that fit a single wave have none. A CTA has its part of the items, and cuts one of them.
    Pieces of an item that is longer than a share run one after the other.
    """
    tiles = heads * V // SHARING.tile_v
    items = tiles * sum(count for _, count in sequences)
    fits = V % SHARING.tile_v == 0 and key_room(K) == SHARED_KEYS
    if not fits or not sm_count < items <= MOST_SHARED:
        return math.inf
    share = max(1, -(-tiles * total(sequences) // sm_count))
    longest = max(chunks for chunks, _ in sequences)
    step = SHARE_STEP + APART_STEP * _apart(sequences, tiles, sm_count)
    start = NEXT_ITEM if items <= FEW_ITEMS * sm_count else START
    waiting = HANDED * ((longest - 1) // share)
    around = SHARES + LAUNCH + START + start * items / sm_count
    return around + waiting + step * max(share, longest)


def _apart(sequences: Lengths, tiles: int, sm_count: int) -> float:
    """Returns how many chunks of a sequence lie between CTAs with neighbouring shares, at most FAR.

    Neighbours that compute the same sequence read the same keys, which L2 keeps for a while.
    """
    lengths = {chunks for chunks, _ in sequences}
    longest = max(lengths)
    if len(lengths) > 1:  # some are near and some far
        return min(longest / 4, FAR)
    between = tiles * total(sequences) / sm_count % max(1, longest)
    return min(between, longest - between, FAR)


@functools.lru_cache(maxsize=4096)
def both_chains(pieces: Lengths, num_value_heads: int, V: int, sm_count: int) -> tuple[int, float]:
    """Returns the columns of V a CTA of a backward's chains computes, and the chains' time.

    The width is the one that takes less time. The chains run at the same time: side by side where
    all CTAs of both fit the GPU, otherwise mostly one after the other, as their CTAs were launched.
    """

    def duration(tile_v: int) -> float:
        return chains_of_width(pieces, tile_v, num_value_heads, V, sm_count)

    width = min((tile_v for tile_v in CHAIN_STEP if V % tile_v == 0), key=duration)
    return width, duration(width)


def chains_of_width(
    pieces: Lengths, tile_v: int, num_value_heads: int, V: int, sm_count: int
) -> float:
    """Returns the time of a backward's chains, whose CTAs compute `tile_v` columns of V."""
    ctas = num_value_heads * V // tile_v
    beside = 2 * ctas * sum(count for _, count in pieces) <= sm_count
    step = CHAIN_STEP[tile_v] * (1.0 if beside else LATER_WAVES)
    work = PAIR_STEP[tile_v][beside] * ctas * total(pieces) / sm_count
    steps = chain(pieces, step, 2 * ctas, sm_count, NEXT_WAVE)
    return START + max(LAUNCH + work, steps)


def chunk_grads(num_chunks: int, num_value_heads: int, sm_count: int) -> float:
    """Returns the time of the kernel chunk_grads."""
    return LAUNCH + CHUNK_GRADS * num_chunks * num_value_heads / sm_count


def maps(
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
    length, mapped = mapped_segments(sequences, pieces)
    firsts = sum(count for chunks, count in sequences if chunks > length)
    share, window = windows(warm_log_bound, length)
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


def gradient_maps(
    sequences: Lengths, pieces: Lengths, heads: int, V: int, sm_count: int, warm_log_bound: float
) -> float:
    """Returns the time of segment_map_bwd: every segment but a sequence's first, one CTA an SM."""
    length, mapped = mapped_segments(sequences, pieces)
    ctas = mapped * heads * V / MAP_TILE
    share, window = windows(warm_log_bound, length)
    steps = ctas * (share * length + (1 - share) * window)
    waves = GRADIENT_MAP_WAVE * ctas / sm_count
    return SHORT + waves + CHAIN_STEP[MAP_TILE] * max(length, steps / sm_count)


def gradient_pieces(
    sequences: Lengths,
    pieces: Lengths,
    heads: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
    tile_v: int | None = None,
) -> float:
    """Returns the time of a backward over segments, from maps that exist to the chains' end.

    Args:
        tile_v: columns of V of a CTA of the chains; None takes those of the least time.
    """
    found = gradient_maps(sequences, pieces, heads, V, sm_count, warm_log_bound)
    if tile_v is None:
        _, chains = both_chains(pieces, heads, V, sm_count)
    else:
        chains = chains_of_width(pieces, tile_v, heads, V, sm_count)
    return AROUND_BACKWARD + found + folds(sequences, pieces, GRADIENT_FOLD) + chains


def cut_backward(
    sequences: Lengths,
    pieces: Lengths,
    heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
    tile_v: int | None = None,
) -> float:
    """Returns the time of a backward over segments that it maps itself, to the chains' end."""
    found = maps(sequences, pieces, heads, K, V, sm_count, warm_log_bound, False, True)
    return found + gradient_pieces(sequences, pieces, heads, V, sm_count, warm_log_bound, tile_v)


def folds(sequences: Lengths, pieces: Lengths, step: float = SCAN_STEP) -> float:
    """Returns the time of segment_scan, which folds all but a sequence's first and last segment."""
    longest, of_pieces = (max(1, *(chunks for chunks, _ in x)) for x in (sequences, pieces))
    most = longest / of_pieces
    return step * max(0.0, most - 2)


def mapped_segments(sequences: Lengths, pieces: Lengths) -> tuple[int, int]:
    """Returns the chunks of the longest segment, and the number of segments that have a map."""
    segments, of_sequence = (sum(count for _, count in x) for x in (pieces, sequences))
    return max(chunks for chunks, _ in pieces), segments - of_sequence


def windows(warm_log_bound: float, length: int) -> tuple[float, int]:
    """Returns the share of heads that is cold in segments of `length` chunks, and the number of
    chunks that a warm head walks.
    """
    if warm_log_bound == -math.inf:
        return 1.0, length
    window = math.ceil(-warm_log_bound / FORGOTTEN)
    return (COLD_SHARE, window) if window < length else (1.0, length)
