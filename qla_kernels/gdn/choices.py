"""What launches ask before they cut sequences: the plan of a batch, by what the host knows of it.

`segments_of` asks the same.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from qla_kernels.gdn import bands, lengths, times
from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.lengths import Lengths, cut_lengths, num_items
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE, key_room
from qla_kernels.gdn.times import Shape
from qla_kernels.runtime.native.symbols import decided
from qla_kernels.tile.constants import CHUNK

KEEPING_GAIN = 0.97  # a backward with the forward's segments must take less than this of its time
# The most that is kept, of what autograd saves for a call anyway. A, which is saved for the same
# reason, is a fifth to a quarter of that. Up to there segments save more time per byte than A.
KEEPING_SHARE = 0.25


class BatchLengths(NamedTuple):
    """The sequences of a call, as far as the host knows them."""

    chunks: Lengths  # as `lengths.sequence_chunks` counts them
    size: tuple[int, int]  # the numbers of sequences and of tokens
    known: bool  # the host knows the lengths
    # of packed sequences whose lengths the host knows: their numbers of chunks, rounded, in order
    in_order: Callable[[], tuple[int, ...]] | None = None


def forward(
    batch: BatchLengths, shape: Shape, warm_log_bound: float, one_path: bool = False
) -> Plan:
    """Returns the plan of a forward that may cut.

    If the device alone knows the lengths, there may be bands; with `one_path`, the plan is that of
    equal lengths, and has no shares, which states in a pool cannot have. At K = 256 there is one
    path, and the plan is then that of equal lengths.
    """
    wide = shape[1] == WIDE
    if not (batch.known or one_path or wide):
        plan = decided(bands.forward, batch.size, shape, warm_log_bound)
        alone = len(plan.bands) == 1 and not plan.bands[0].segments
        return plan.of_whole(plan.kernel) if alone else plan
    plan = decided(gdn_plan.forward, batch.chunks, shape, warm_log_bound, False, not one_path)
    if len(batch.chunks) > 1 and batch.in_order is not None and not (one_path or wide):
        plan = gdn_plan.in_order(plan, batch.in_order(), shape)
    return plan


def backward(
    batch: BatchLengths,
    shape: Shape,
    bound: float,
    auto_cp: bool = True,
    kept_capacity: int | None = None,
) -> Plan:
    """Returns how a backward runs its chains; for K = 256, whose sequences stay whole, do not ask.

    Args:
        bound: `plan.gradient_bound` of the caller's.
        auto_cp: False: sequences stay whole, and the width does not depend on the batch.
        kept_capacity: the room of the segments that the forward kept, or None if it kept none. A
            plan with segments then means those.
    """
    if kept_capacity is not None:
        num_sequences, num_tokens = batch.size
        most = max(1, num_tokens // CHUNK // max(1, kept_capacity - num_sequences))  # `capacity`
        return decided(gdn_plan.chains, batch.chunks, shape, bound, auto_cp, most)
    if auto_cp and not batch.known:
        return decided(bands.backward, batch.size, shape, bound)
    return decided(gdn_plan.chains, batch.chunks, shape, bound, auto_cp)


def keeps(
    batch: BatchLengths, num_heads: int, shape: Shape, warm_log_bound: float, plan: Plan
) -> bool:
    """Returns whether a training forward keeps its segments for its backward, where the caller
    leaves it open; `plan` is that of the forward.
    """
    chunks, unknown = ((), batch.size) if plan.bands else (batch.chunks, None)
    return decided(is_worth_keeping, chunks, num_heads, shape, warm_log_bound, unknown)


@functools.lru_cache(maxsize=4096)
def is_worth_keeping(
    sequences: Lengths,
    num_heads: int,
    shape: Shape,
    warm_log_bound: float,
    unknown: tuple[int, int] | None = None,
) -> bool:
    """Returns whether a forward should keep its segments: a backward is faster, and they are small.

    A backward that takes the forward's segments does not map them again, but its cuts are then the
    forward's, which are not those that it would make. Where the device alone knows the lengths,
    segments have to be the forward's only path, and a backward faster with them for all samples.

    Args:
        sequences: (chunks, how many sequences have that many) pairs.
        warm_log_bound: the caller's.
        unknown: the numbers of sequences and of tokens, if the device alone knows the lengths.
    """
    if unknown is None:
        plan = gdn_plan.forward(sequences, shape, warm_log_bound, False, True)  # as `forward` asks
        samples = [sequences]
        size = num_items(sequences), CHUNK * lengths.total(sequences)
    else:
        plan = bands.forward(unknown, shape, warm_log_bound)
        samples, size = lengths.likely(*bands.rounded_size(*unknown)), unknown
    if plan.whole or not plan.has_segments:
        return False
    saved = size[1] * saved_bytes(num_heads, shape)
    if kept_bytes(plan.capacity(*size), shape) > KEEPING_SHARE * saved:
        return False
    cuts = [(x, plan.cut(x)) for x in samples]
    return all(most is not None and is_faster(x, most, shape, warm_log_bound) for x, most in cuts)


def is_faster(sequences: Lengths, most: int, shape: Shape, warm_log_bound: float) -> bool:
    """Returns whether a backward is faster with a forward's segments, of at most `most` chunks."""
    bound = gdn_plan.gradient_bound(warm_log_bound)
    kept = times.gradient_pieces(sequences, cut_lengths(sequences, most), shape, bound)
    own = gdn_plan.backward(sequences, shape, bound)
    if own is None:
        alone = times.both_chains(sequences, shape)[1]
    else:
        alone = times.cut_backward(sequences, cut_lengths(sequences, own), shape, bound)
    rest = times.chunk_grads(lengths.total(sequences), shape)
    return kept + rest < KEEPING_GAIN * (alone + rest)


def kept_bytes(slots: int, shape: Shape) -> int:
    """Returns the bytes of the maps and start states of `slots` segments, without their tables."""
    heads, K, V, _ = shape
    room = key_room(K)
    return 4 * room * (room + V) * heads * slots


def saved_bytes(num_heads: int, shape: Shape) -> int:
    """Returns what autograd saves of a token anyway: q, k, v, beta and A in 16 bits, and g_cum."""
    heads, K, V, _ = shape
    return 2 * (2 * num_heads * K + heads * (V + 1 + CHUNK)) + 4 * heads
