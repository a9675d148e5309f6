"""Decides whether a forward keeps its segments for its backward, where the caller leaves it open.

A backward that takes the forward's segments does not map them again, but its cuts are then the
forward's, which are not those that it would make. All functions are pure functions of numbers, by
the model of times in `durations` (docs/lessons.md).
"""

import functools

from qla_kernels.gdn import bands, durations, plan
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.shapes import key_room
from qla_kernels.tile.constants import CHUNK

KEEPING_GAIN = 0.97  # a backward with the forward's segments must take less than this of its time
# The most that is kept, of what autograd saves for a call anyway. A, which is saved for the same
# reason, is a fifth to a quarter of that. Up to there segments save more time per byte than A.
KEEPING_SHARE = 0.25


@functools.lru_cache(maxsize=4096)
def keeps(
    sequences: Lengths,
    num_heads: int,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
) -> bool:
    """Returns whether a forward should keep its segments: a backward is faster, and they are small.

    Args:
        sequences: (chunks, how many sequences have that many) pairs.
        warm_log_bound: the caller's.
    """
    shape = num_value_heads, K, V, sm_count, warm_log_bound
    most = plan.forward(sequences, *shape, False, True).segment_chunks
    if most is None:
        return False
    num_tokens = CHUNK * durations.total(sequences)
    slots = plan.capacity(num_tokens, sum(count for _, count in sequences), most)
    small = are_small(slots, num_tokens, num_heads, num_value_heads, K, V)
    return small and is_faster(sequences, most, *shape)


@functools.lru_cache(maxsize=4096)
def keeps_by_length(
    batch: tuple[int, int],
    num_heads: int,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
) -> bool:
    """Returns the same where the device alone knows the lengths: `bands.py`.

    Segments have to be the forward's only path, and a backward faster with them for all batches by
    which paths are chosen.

    Args:
        batch: the numbers of sequences and of tokens.
    """
    shape = num_value_heads, K, V, sm_count, warm_log_bound
    found, (num_sequences, num_tokens) = bands.forward(batch, *shape), batch
    slots = max(num_sequences, *(band.segments for band in found.bands))
    small = are_small(slots, num_tokens, num_heads, num_value_heads, K, V)
    if found.whole or not small:
        return False
    cuts = [(sequences, bands.cut(found, sequences)) for sequences in bands.likely(batch)]
    return all(most is not None and is_faster(x, most, *shape) for x, most in cuts)


def is_faster(
    sequences: Lengths,
    most: int,
    num_value_heads: int,
    K: int,
    V: int,
    sm_count: int,
    warm_log_bound: float,
) -> bool:
    """Returns whether a backward is faster with a forward's segments, of at most `most` chunks."""
    shape, bound = (num_value_heads, V, sm_count), plan.gradient_bound(warm_log_bound)
    pieces = plan.cut_lengths(sequences, most)
    kept = durations.gradient_pieces(sequences, pieces, *shape, bound)
    own = plan.backward(sequences, num_value_heads, K, V, sm_count, bound)
    if own is None:
        alone = durations.both_chains(sequences, *shape)[1]
    else:
        pieces = plan.cut_lengths(sequences, own)
        alone = durations.cut_backward(sequences, pieces, num_value_heads, K, V, sm_count, bound)
    rest = durations.chunk_grads(durations.total(sequences), num_value_heads, sm_count)
    return kept + rest < KEEPING_GAIN * (alone + rest)


def are_small(
    slots: int, num_tokens: int, num_heads: int, num_value_heads: int, K: int, V: int
) -> bool:
    """Returns whether `slots` segments, with maps and start states, take little memory."""
    saved = num_tokens * saved_bytes(num_heads, num_value_heads, K, V)
    return kept_bytes(slots, num_value_heads, K, V) <= KEEPING_SHARE * saved


def kept_bytes(slots: int, num_value_heads: int, K: int, V: int) -> int:
    """Returns the bytes of the maps and start states of `slots` segments, without their tables."""
    room = key_room(K)
    return 4 * room * (room + V) * num_value_heads * slots


def saved_bytes(num_heads: int, num_value_heads: int, K: int, V: int) -> int:
    """Returns what autograd saves of a token anyway: q, k, v, beta and A in 16 bits, and g_cum."""
    return 2 * (2 * num_heads * K + num_value_heads * (V + 1 + CHUNK)) + 4 * num_value_heads
