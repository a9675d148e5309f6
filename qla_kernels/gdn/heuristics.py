"""Which variant runs a shape: pure functions of ints.

Times in us, fitted to an H200 (docs/notes/gdn-forward.md).
"""

from typing import NamedTuple

from qla_kernels.tile.constants import CHUNK


class Forward(NamedTuple):
    tile_v: int  # columns of V a CTA computes
    solves: bool  # or is given A by kkt_solve


# A chunk of a CTA. Half the columns take more than half the time: what a chunk waits for is not the
# columns; and a chunk whose A is solved for in the same CTA waits longest of all.
STEP = {Forward(64, True): 1.7, Forward(128, True): 2.7, Forward(128, False): 2.2}
LAUNCH, START = 4.0, 10.0  # of the kernel; of each CTA, before its first chunk and after its last
# gate and kkt_solve: launches, and a chunk of a value head on one SM
SOLVE_START, SOLVE_STEP = 28.0, 0.5

# Whatever the batch: plans differ in the order of sums.
BATCH_INVARIANT = Forward(64, True)


def forward(
    num_sequences: int, num_tokens: int, num_value_heads: int, V: int, sm_count: int
) -> Forward:
    """The fastest way through a batch. Sequences count as equally long: lengths are on the device.

    One CTA fills an SM.
    """
    heads = num_sequences * num_value_heads
    chunks = -(-num_tokens // (max(num_sequences, 1) * CHUNK))

    def duration(plan: Forward) -> float:
        waves = -(-heads * (V // plan.tile_v) // sm_count)
        before = 0.0 if plan.solves else SOLVE_START + SOLVE_STEP * heads * chunks / sm_count
        return before + LAUNCH + waves * (START + chunks * STEP[plan])

    return min((plan for plan in STEP if V % plan.tile_v == 0), key=duration)


def ctas(items: int, alike: bool, sm_count: int) -> int:
    """How many CTAs walk so many sequences, heads and tiles.

    One each SM hides how an item starts behind the end of the one before. Which items it has is
    settled beforehand, though: where they are not alike, the hardware deals them out better.
    """
    return min(items, sm_count) if alike else items


def scan_columns(columns: int, sm_count: int) -> int:
    """How many of all heads' columns of V a CTA of segment_scan folds.

    Fewer take less time, as long as all CTAs fit the GPU at once.
    """
    return 16 if columns // 16 <= sm_count else 32


# us per chunk of the backward's chains, as STEP
CHAIN_STEP = {128: 2.3, 64: 1.45}


def tile_v(num_sequences: int, num_value_heads: int, V: int, sm_count: int) -> int:
    """Columns of V a CTA of a backward chain computes: the width whose waves take less time."""
    widths = [width for width in CHAIN_STEP if V % width == 0]

    def duration(width: int) -> float:
        ctas = num_sequences * num_value_heads * (V // width)
        return -(-ctas // sm_count) * CHAIN_STEP[width]

    return min(widths, key=duration)
