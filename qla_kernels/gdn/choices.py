"""What launches ask before they cut sequences: the plan of a batch, by what the host knows of it.

Every choice follows from numbers: plan.py, wide_plan.py, bands.py, dealing.py and keeping.py make
them. `segments_of` asks the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from qla_kernels.gdn import bands, dealing, keeping, plan, wide_plan
from qla_kernels.gdn.bands import Bands, GradientBands
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.paths import Shape
from qla_kernels.gdn.plan import ChainsPlan, Plan
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.runtime.native.symbols import decided
from qla_kernels.tile.constants import CHUNK


class BatchLengths(NamedTuple):
    """The sequences of a call, as far as the host knows them."""

    chunks: Lengths  # as `plan.sequence_chunks` counts them
    size: tuple[int, int]  # the numbers of sequences and of tokens
    known: bool  # the host knows the lengths
    # of packed sequences whose lengths the host knows: their numbers of chunks, rounded, in order
    in_order: Callable[[], tuple[int, ...]] | None = None


def forward(
    batch: BatchLengths, shape: Shape, warm_log_bound: float, one_path: bool = False
) -> Plan | Bands:
    """Returns the plan of a forward that may cut, or bands where it has several paths.

    If the device alone knows the lengths, there may be several plans; with `one_path`, it is that
    of equal lengths, and has no shares, which states in a pool cannot have. At K = 256 there is one
    plan, which is then that of equal lengths.
    """
    HV, K, V, sm_count = shape
    if K == WIDE:
        return decided(wide_plan.forward, batch.chunks, HV, V, sm_count, warm_log_bound)
    if not batch.known and not one_path:
        found = decided(bands.forward, batch.size, *shape, warm_log_bound)
        first = found.bands[0]
        single = len(found.bands) == 1 and not first.segments
        return found.whole_plan(first.kernel) if single else found
    made = decided(plan.forward, batch.chunks, *shape, warm_log_bound, False, not one_path)
    if len(batch.chunks) > 1 and batch.in_order is not None and not one_path:
        made = dealing.in_order(made, batch.in_order(), *shape)
    return made


def keeps(
    batch: BatchLengths, num_heads: int, shape: Shape, warm_log_bound: float, made: Plan | Bands
) -> bool:
    """Returns whether a training forward keeps its segments where the caller leaves it open."""
    others = num_heads, *shape, warm_log_bound
    if isinstance(made, Bands):
        return decided(keeping.keeps_by_length, batch.size, *others)
    return decided(keeping.keeps, batch.chunks, *others)


def backward(
    batch: BatchLengths,
    shape: Shape,
    bound: float,
    auto_cp: bool = True,
    kept_capacity: int | None = None,
) -> ChainsPlan | GradientBands:
    """Returns how a backward runs its chains; for K = 256, whose sequences stay whole, do not ask.

    Args:
        bound: `plan.gradient_bound` of the caller's.
        kept_capacity: the room of the segments that the forward kept, or None if it kept none. A
            ChainsPlan with segments then means those.
    """
    HV, _, V, sm_count = shape
    if kept_capacity is not None:
        num_sequences, num_tokens = batch.size
        most = max(1, num_tokens // CHUNK // max(1, kept_capacity - num_sequences))  # `capacity`
        of = batch.chunks, HV, V, sm_count, most, bound, auto_cp
        return decided(plan.kept_chains, *of)
    if auto_cp and not batch.known:
        return decided(bands.backward, batch.size, *shape, bound)
    return decided(plan.chains, batch.chunks, *shape, bound, auto_cp)
