"""`segments_of`: predicts, without a GPU, which sequences a call cuts into segments."""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qla_kernels.gdn import choices, plan
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.keywords import is_invariant, warm_bound
from qla_kernels.gdn.lengths import Lengths, rounded, sequence_chunks
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import HEAD_SIZES, KEY_SIZES, VALUE_SIZES, WIDE
from qla_kernels.gdn.times import Shape
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.tile.constants import CHUNK

CUTS_OP = "segments_of"
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
HOPPER_SMS = 132  # of an H100 SXM, and of an H200
LISTED_KINDS = 3  # kinds of cut sequences that a sentence lists


class Cuts(NamedTuple):
    """A record: the number of segments into which a call cuts each sequence, from `segments_of`.

    The segments of a sequence run in parallel on a GPU. str(cuts) is a sentence that says how many
    sequences are cut into how many segments.

    Attributes:
        lengths: tokens of each sequence.
        segments: number of segments of each sequence; 1 leaves it whole.
        segment_tokens: the most tokens of a segment; None if no sequence is cut.
        direction: "fwd" for the forward, "bwd" for the backward.
    """

    lengths: tuple[int, ...]
    segments: tuple[int, ...]
    segment_tokens: int | None
    direction: str

    @property
    def cut(self) -> bool:
        """True if at least one sequence is cut into several segments."""
        return self.segment_tokens is not None

    def __str__(self) -> str:
        which, pairs = DIRECTIONS[self.direction], zip(self.lengths, self.segments, strict=True)
        kinds = Counter((length, n) for length, n in pairs if n > 1)
        if not kinds:
            return f"The {which} cuts no sequence."
        kinds_text = [
            f"{count} sequence{'s' * (count > 1)} of {length} tokens into {n} segments"
            for (length, n), count in kinds.most_common(LISTED_KINDS)
        ]
        if others := kinds.total() - sum(count for _, count in kinds.most_common(LISTED_KINDS)):
            kinds_text.append(f"{others} more")
        uncut = self.segments.count(1)
        rest = f", and leaves {uncut} whole" if uncut else ""
        return f"The {which} cuts {', '.join(kinds_text)}{rest}."


def segments_of(
    lengths: Sequence[int],
    heads: tuple[int, int] = (16, 32),
    head_dim: int = 128,
    value_dim: int | None = None,
    *,
    direction: str = "fwd",
    packed: bool | None = None,
    cu_seqlens_cpu: bool = True,
    exact: bool | None = None,
    warm_log_bound: float | None = None,
    sm_count: int | None = None,
) -> Cuts:
    """Returns the number of segments into which `chunk_gated_delta_rule` cuts each sequence.

        >>> print(segments_of([8192]))
        The forward cuts 1 sequence of 8192 tokens into 4 segments.

    Long sequences with few heads would not fill a GPU, so calls cut them into segments that run in
    parallel. This function uses the planner of the call, launches nothing and needs no GPU. It is
    not for calls with `cp_context` or for `shared_prefix_gated_delta_rule`.

    Args:
        lengths: tokens of each sequence.
        heads: number of key heads, and number of value heads.
        head_dim: K, the size of a key.
        value_dim: V, the size of a value; K if None.
        direction: "fwd", with or without gradients; or "bwd", the backward of a call that is not
            compiled and has the default `enable_fwd_cp_cache`. Such a backward may reuse the
            segments of the forward.
        packed: True for sequences packed in one row with `cu_seqlens`, False for the rows of a
            batch [B, T]. None: packed if the lengths differ.
        cu_seqlens_cpu: whether a packed call passes `cu_seqlens_cpu`. Without cu_seqlens_cpu the
            device reads the lengths and cuts by another plan.
        exact, warm_log_bound: the values that the call will pass, which limit what the start state
            of a segment may omit; None for the defaults.
        sm_count: number of SMs. None: that of the current GPU; without a GPU, 132, as on H100 SXM
            and H200.

    Raises:
        ValueError: an argument is malformed.
        Unsupported: no kernel runs these head sizes.
    """
    lengths = _lengths(lengths)
    shape = _shape(heads, head_dim, value_dim, sm_count)
    if direction not in DIRECTIONS:
        raise ValueError(need(CUTS_OP, f"direction is {direction!r}", "'fwd' or 'bwd'", "pass one"))
    bound = warm_bound(CUTS_OP, exact, warm_log_bound)
    differ = len({*lengths}) > 1
    in_a_row = differ if packed is None else flag(CUTS_OP, "packed", packed)
    if differ and not in_a_row:
        needs = "rows of one length, or packed=True"
        raise ValueError(need(CUTS_OP, "packed=False and lengths differ", needs, "leave it out"))
    on_host = flag(CUTS_OP, "cu_seqlens_cpu", cu_seqlens_cpu)
    if is_invariant(CUTS_OP, None) or not sum(lengths):
        return _cut(lengths, None, direction)
    batch, chunks = _batch(lengths, in_a_row, on_host), _chunks(lengths)
    forward = choices.forward(batch, shape, bound)
    most = forward.cut(chunks)
    if direction == "bwd":
        most = _backward(batch, heads[0], shape, bound, forward, most, chunks)
    return _cut(lengths, most, direction)


def _backward(
    batch: BatchLengths,
    num_heads: int,
    shape: Shape,
    bound: float,
    forward: Plan,
    most: int | None,
    chunks: Lengths,
) -> int | None:
    """Returns the most chunks of a segment of the backward; `most` is that of the forward."""
    if shape[1] == WIDE:
        return None
    saved = None  # room of the segments that the forward keeps
    if most is not None and choices.keeps(batch, num_heads, shape, bound, forward):
        saved = forward.capacity(*batch.size)
    backward = choices.backward(batch, shape, plan.gradient_bound(bound), True, saved)
    return most if saved is not None and backward.has_segments else backward.cut(chunks)


def _lengths(lengths: Any) -> tuple[int, ...]:
    try:
        counts = tuple(map(operator.index, lengths))
    except TypeError:
        counts = (-1,)
    if any(n < 0 for n in counts):
        needs = "a sequence of whole numbers of tokens, such as [8192]"
        raise ValueError(need(CUTS_OP, f"lengths is {lengths!r}", needs, "pass such a list"))
    return counts


def _shape(heads: Any, head_dim: int, value_dim: int | None, sm_count: int | None) -> Shape:
    V = head_dim if value_dim is None else value_dim
    is_pair = isinstance(heads, tuple) and len(heads) == 2 and all(type(n) is int for n in heads)
    if not is_pair or min(heads) < 1 or heads[1] % heads[0]:
        needs = "key heads and value heads, a multiple of them, such as (16, 32)"
        raise ValueError(need(CUTS_OP, f"heads is {heads!r}", needs, "pass such a pair"))
    if head_dim not in KEY_SIZES or V not in VALUE_SIZES:
        raise Unsupported(need(CUTS_OP, f"K = {head_dim}, V = {V}", HEAD_SIZES, "pad to them"))
    if sm_count is None:
        has_gpu = torch.cuda.is_available()
        sm_count = device.sm_count(torch.device("cuda")) if has_gpu else HOPPER_SMS
    if type(sm_count) is not int or sm_count < 1:
        fix = f"leave it out for the current GPU's, or {HOPPER_SMS}"
        raise ValueError(need(CUTS_OP, f"sm_count is {sm_count!r}", "a number of SMs", fix))
    return heads[1], head_dim, V, sm_count


def _batch(lengths: tuple[int, ...], packed: bool, on_host: bool) -> BatchLengths:
    size, lengths_known = (len(lengths), sum(lengths)), packed and on_host
    chunks = sequence_chunks(*size, lengths if lengths_known else None)
    in_order = tuple(rounded(-(-n // CHUNK)) for n in lengths)
    return BatchLengths(
        chunks, size, lengths_known or not packed, (lambda: in_order) if lengths_known else None
    )


def _chunks(lengths: tuple[int, ...]) -> Lengths:
    """Returns pairs (chunks of a sequence, number of such sequences), ascending."""
    return tuple(sorted(Counter(-(-n // CHUNK) for n in lengths).items()))


def _cut(lengths: tuple[int, ...], most: int | None, direction: str) -> Cuts:
    """Returns the cuts of sequences of more than `most` chunks, as segment_plan makes them."""
    if most is None or max(lengths) <= CHUNK * most:
        return Cuts(lengths, (1,) * len(lengths), None, direction)
    chunks = (-(-n // CHUNK) for n in lengths)
    return Cuts(lengths, tuple(max(1, -(-n // most)) for n in chunks), CHUNK * most, direction)
