"""Chooses kernel variants and numbers of CTAs for a shape, by pure functions of numbers.

Times are in us, fitted to an H200 (docs/lessons.md).
"""

from typing import NamedTuple


class ForwardChoice(NamedTuple):
    tile_v: int  # columns of V a CTA computes
    solves: bool  # computes A itself; otherwise it reads the A that kkt_solve wrote


# Per chunk of a CTA. Half the columns take more than half the time, because latency that does not
# depend on the columns bounds a chunk; solving for A in the same CTA adds the most of it.
STEP = {ForwardChoice(64, True): 1.7, ForwardChoice(128, True): 2.7, ForwardChoice(128, False): 2.2}
LAUNCH, START = 4.0, 10.0  # per kernel; per CTA, before its first chunk and after its last one
# gate and kkt_solve: their launches, and the time per chunk and value head on one SM
SOLVE_START, SOLVE_STEP = 28.0, 0.5

# The kernel for every batch if results may not depend on it: others sum in another order.
BATCH_INVARIANT = ForwardChoice(64, True)
SHARING = ForwardChoice(128, True)  # the one with equal shares, for K with the room SHARED_KEYS
POOL_16 = ForwardChoice(64, True)  # the one that takes pools in bf16


def ctas(items: int, equal_lengths: bool, sm_count: int) -> int:
    """Returns the number of CTAs that walk `items`, one for each sequence, head and tile.

    If items have equal lengths, there is at most one CTA per SM, and each overlaps the start of an
    item with the end of the one before. The items of such a CTA are fixed beforehand, so that items
    of different lengths get one CTA each: the hardware then balances them better.
    """
    return min(items, sm_count) if equal_lengths else items


# Per chunk of a CTA of wide_fwd, by tile_v; and KB a us that memory gives all CTAs. Measured on an
# H100 (docs/lessons.md).
WIDE_STEP = {128: 2.6, 64: 1.6}
WIDE_MEMORY = 3250


def wide_tile(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> int:
    """Returns how many columns of V a CTA of wide_fwd computes, 64 or 128.

    It is the width whose waves of CTAs, one CTA on an SM, take less time.
    """

    def duration(width: int) -> float:
        ctas = num_sequences * num_value_heads * (V // width)
        return -(-ctas // sm_count) * wide_step(width, V, min(ctas, sm_count))

    return min((width for width in WIDE_STEP if V % width == 0), key=duration)


def wide_step(width: int, V: int, at_once: int) -> float:
    """Returns the time of a chunk in wide_fwd, where so many CTAs run at once.

    The CTAs of a head share 80 KB of q, k, A and P, which memory is read for once. A CTA has 16 KB
    of v and of o for each 64 columns, together.
    """
    return max(WIDE_STEP[width], at_once * (80 * width / V + width / 4) / WIDE_MEMORY)


def scan_columns(columns: int, sm_count: int) -> int:
    """Returns how many of the `columns` columns of V, over all heads, a CTA of segment_scan folds.

    16 take less time than 32 as long as all CTAs run at once.
    """
    return 16 if columns // 16 <= sm_count else 32


# Per chunk of a CTA of the backward's chains, by tile_v
CHAIN_STEP = {128: 2.3, 64: 1.45}


def tile_v(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> int:
    """Returns how many columns of V a CTA of a backward chain computes, 64 or 128.

    It is the width whose waves of CTAs, one CTA on an SM, take less time.
    """
    widths = [width for width in CHAIN_STEP if V % width == 0]

    def duration(width: int) -> float:
        ctas = num_sequences * num_value_heads * (V // width)
        return -(-ctas // sm_count) * CHAIN_STEP[width]

    return min(widths, key=duration)
