"""Says which sequences a call cuts into segments, without a launch and without a GPU."""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qla_kernels import device
from qla_kernels.arguments import flag
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn import bands, choices, plan
from qla_kernels.gdn.bands import Bands, GradientBands
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.durations import Lengths
from qla_kernels.gdn.keywords import is_invariant, warm_bound
from qla_kernels.gdn.paths import Shape
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import HEAD_SIZES, KEY_SIZES, VALUE_SIZES, WIDE
from qla_kernels.tile.constants import CHUNK

CUTS_OP = "segments_of"
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
HOPPER_SMS = 132  # of an H100 SXM, and of an H200
SAID = 3  # kinds of cut sequences that a sentence lists


class Cuts(NamedTuple):
    """Into how many segments a call cuts each of its sequences; what `segments_of` returns.

    `str` makes a sentence of it.
    """

    lengths: tuple[int, ...]  # of the sequences, in tokens
    segments: tuple[int, ...]  # of each sequence; 1 leaves it whole
    segment_tokens: int | None  # the most tokens of a segment; None if no sequence is cut
    direction: str  # "fwd" or "bwd"

    @property
    def cut(self) -> bool:
        """True if a sequence is cut."""
        return self.segment_tokens is not None

    def __str__(self) -> str:
        which, pairs = DIRECTIONS[self.direction], zip(self.lengths, self.segments, strict=True)
        kinds = Counter((length, n) for length, n in pairs if n > 1)
        if not kinds:
            return f"The {which} cuts no sequence."
        said = [
            f"{count} sequence{'s' * (count > 1)} of {length} tokens into {n} segments"
            for (length, n), count in kinds.most_common(SAID)
        ]
        if others := kinds.total() - sum(count for _, count in kinds.most_common(SAID)):
            said.append(f"{others} more")
        whole = self.segments.count(1)
        rest = f", and leaves {whole} whole" if whole else ""
        return f"The {which} cuts {', '.join(said)}{rest}."


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
    """Returns into how many segments `chunk_gated_delta_rule` cuts each sequence on a GPU.

        >>> print(segments_of([8192]))
        The forward cuts 1 sequence of 8192 tokens into 4 segments.

    Nothing is launched, and no GPU is needed: this asks the plan that a call runs. Of a call with
    `cp_context`, or of a tree of shared prompts, it says nothing.

    Args:
        lengths: tokens of each sequence.
        heads: key heads and value heads.
        head_dim: K.
        value_dim: V; K if None.
        direction: "fwd", with gradients or without, or "bwd": the backward of a call with the
            default `enable_fwd_cp_cache`, not compiled. It may take the forward's segments.
        packed: the sequences are packed in one row, with `cu_seqlens`, and are not the rows of a
            batch [B, T]. None: they are if their lengths differ.
        cu_seqlens_cpu: a packed call is given `cu_seqlens_cpu`. Without it the device finds the
            lengths, and cuts by another plan.
        exact, warm_log_bound: as the call's.
        sm_count: SMs of the GPU. None: those of the current GPU; without one, 132, as an H100 SXM
            and an H200 have.

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
    batch = _batch(lengths, in_a_row, on_host)
    made = choices.forward(batch, shape, bound)
    forward = _forward_chunks(made, lengths)
    if direction == "fwd":
        return _cut(lengths, forward, direction)
    kept = None
    if forward is not None and shape[1] != WIDE:
        kept = _kept(batch, heads[0], shape, bound, made)
    return _cut(lengths, _backward_chunks(batch, shape, bound, kept, forward, lengths), direction)


def _lengths(lengths: Any) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, lengths))
    except TypeError:
        found = (-1,)
    if any(n < 0 for n in found):
        needs = "a sequence of whole numbers of tokens, such as [8192]"
        raise ValueError(need(CUTS_OP, f"lengths is {lengths!r}", needs, "pass such a list"))
    return found


def _shape(heads: Any, head_dim: int, value_dim: int | None, sm_count: int | None) -> Shape:
    V = head_dim if value_dim is None else value_dim
    whole = isinstance(heads, tuple) and len(heads) == 2 and all(type(n) is int for n in heads)
    if not whole or min(heads) < 1 or heads[1] % heads[0]:
        needs = "key heads and value heads, a multiple of them, such as (16, 32)"
        raise ValueError(need(CUTS_OP, f"heads is {heads!r}", needs, "pass such a pair"))
    if head_dim not in KEY_SIZES or V not in VALUE_SIZES:
        raise Unsupported(need(CUTS_OP, f"K = {head_dim}, V = {V}", HEAD_SIZES, "pad to them"))
    if sm_count is None:
        here = torch.cuda.is_available()
        sm_count = device.sm_count(torch.device("cuda")) if here else HOPPER_SMS
    if type(sm_count) is not int or sm_count < 1:
        fix = f"leave it out for the current GPU's, or {HOPPER_SMS}"
        raise ValueError(need(CUTS_OP, f"sm_count is {sm_count!r}", "a number of SMs", fix))
    return heads[1], head_dim, V, sm_count


def _batch(lengths: tuple[int, ...], packed: bool, on_host: bool) -> BatchLengths:
    size, told = (len(lengths), sum(lengths)), packed and on_host
    chunks = plan.sequence_chunks(*size, lengths if told else None)
    in_order = tuple(plan.rounded(-(-n // CHUNK)) for n in lengths)
    return BatchLengths(chunks, size, told or not packed, (lambda: in_order) if told else None)


def _chunks(lengths: tuple[int, ...]) -> Lengths:
    """Returns the numbers of chunks as the device counts them."""
    return tuple(sorted(Counter(-(-n // CHUNK) for n in lengths).items()))


def _forward_chunks(made: Plan | Bands, lengths: tuple[int, ...]) -> int | None:
    """Returns the most chunks of a segment."""
    return bands.cut(made, _chunks(lengths)) if isinstance(made, Bands) else made.segment_chunks


def _kept(
    batch: BatchLengths, num_heads: int, shape: Shape, bound: float, made: Plan | Bands
) -> int | None:
    """Returns the room of the segments that a training forward keeps, or None if it keeps none."""
    several = isinstance(made, Bands) and bool(made.whole)
    if several or not choices.keeps(batch, num_heads, shape, bound, made):
        return None
    num_sequences, num_tokens = batch.size
    if isinstance(made, Bands):
        return max(num_sequences, *(band.segments for band in made.bands))
    assert made.segment_chunks is not None, "only a forward that cuts is asked"
    return plan.capacity(num_tokens, num_sequences, made.segment_chunks)


def _backward_chunks(
    batch: BatchLengths,
    shape: Shape,
    bound: float,
    kept: int | None,
    forward: int | None,
    lengths: tuple[int, ...],
) -> int | None:
    """Returns the most chunks of a segment; `forward` is that of the forward."""
    if shape[1] == WIDE:
        return None
    found = choices.backward(batch, shape, plan.gradient_bound(bound), True, kept)
    if not isinstance(found, GradientBands):
        return forward if kept is not None and found.segment_chunks else found.segment_chunks
    if not found.bands:
        return None
    chunks = _chunks(lengths)
    most_segments = bands.row_of(found.rows, chunks)[-1]
    return bands.segment_chunks(chunks, most_segments) if most_segments else None


def _cut(lengths: tuple[int, ...], most: int | None, direction: str) -> Cuts:
    """Returns the cuts of sequences of more than `most` chunks, as segment_plan makes them."""
    if most is None or max(lengths) <= CHUNK * most:
        return Cuts(lengths, (1,) * len(lengths), None, direction)
    chunks = (-(-n // CHUNK) for n in lengths)
    return Cuts(lengths, tuple(max(1, -(-n // most)) for n in chunks), CHUNK * most, direction)
