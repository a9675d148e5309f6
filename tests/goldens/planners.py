"""What the planners of gdn answer for random batches: which kernels, cuts, bands and shares.

    python -m tests.goldens.planners PATTERN...

200,000 batches and a million answers, in blocks. A block has a seed, planners that it asks, a
digest, and its first answers. `--show "planners/008 of_bands"` prints all of them.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from qla_kernels.gdn import bands, choices, cuts, plan
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.lengths import Lengths, rounded, sequence_chunks
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE
from qla_kernels.tile.constants import CHUNK
from tests.goldens.store import Texts, chosen, printed
from tests.native.plans import HEADS, SIZES, lengths_of

BLOCKS, BLOCK, READABLE = 200, 1000, 4
BOUNDS = plan.WARM_LOG_BOUND, plan.EXACT_LOG_BOUND, -3.0, -30.0


def plain(x: Any) -> str:
    """Returns numbers without the names of classes and fields."""
    if isinstance(x, tuple):
        return f"({' '.join(map(plain, x))})"
    if isinstance(x, bool) or x is None:
        return {True: "yes", False: "no", None: "-"}[x]
    return f"{x:.9g}" if isinstance(x, float) else str(x)


def of_forward(x: Plan) -> tuple[object, ...]:
    """What a plan says of a forward: one path, or the kernels and segments of its bands."""
    if not x.bands:
        return x[:5]
    paths = x.kernel, *x.whole
    rows = tuple((least, paths[path], segments) for least, path, segments in x.bands)
    return rows, x.kernel if x.has_segments else None, x.warm_log_bound, x.most_cut


def of_backward(x: Plan) -> tuple[object, ...]:
    return x.segment_chunks, x.kernel.tile_v


def of_backward_bands(x: Plan) -> tuple[object, ...]:
    return x.kernel.tile_v, tuple((least, segments) for least, _, segments in x.bands)


class Batch:
    """Sequences, heads and a GPU, drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.lengths = lengths_of(rng)
        (self.H, self.HV), (self.K, self.V) = rng.choice(HEADS), rng.choice(SIZES)
        self.sms, self.bound = rng.choice((132, 114, 78)), rng.choice(BOUNDS)
        self.most, self.wide_V = rng.randint(1, 64), rng.choice((128, 256, 512))
        self.shape = self.HV, self.K, self.V, self.sms
        self.size, self.chunks = (len(self.lengths), sum(self.lengths)), chunks_of(self.lengths)
        self.in_order = tuple(rounded(-(-n // CHUNK)) for n in self.lengths)
        self.gradient = plan.gradient_bound(self.bound)

    def __str__(self) -> str:
        N, T = self.size
        lengths = "+".join(map(str, self.lengths)) if N < 9 else f"{N} sequences, {T} tokens"
        return f"{self.H}x{self.HV} {self.K}x{self.V} {self.sms} SMs {self.bound:g} {lengths}"


def chunks_of(lengths: Sequence[int]) -> Lengths:
    return sequence_chunks(len(lengths), sum(lengths), lengths)


def forward(x: Batch) -> Iterator[object]:
    """Of known lengths: as a call plans it, in its order, without shares, between ranks."""
    made = plan.forward(x.chunks, x.shape, x.bound)
    known = BatchLengths(x.chunks, x.size, True, lambda: x.in_order)
    yield from map(
        of_forward,
        (
            made,
            plan.in_order(made, x.in_order, x.shape),
            plan.forward(x.chunks, x.shape, x.bound, False, False),
            plan.forward(x.chunks, x.shape, x.bound, True),
            choices.forward(known, x.shape, x.bound),
        ),
    )


def backward(x: Batch) -> Iterator[object]:
    """Likewise; between ranks, invariant to the batch, and with a forward's segments."""
    yield choices.is_worth_keeping(x.chunks, x.H, x.shape, x.bound)
    yield of_backward(plan.chains(x.chunks, x.shape, x.gradient))
    yield plan.backward(x.chunks, x.shape, x.gradient, True)
    yield of_backward(plan.chains(x.chunks, x.shape, x.gradient, False))
    yield of_backward(plan.chains(x.chunks, x.shape, x.gradient, True, x.most))
    yield of_backward(plan.chains(x.chunks, x.shape, x.gradient, False, x.most))


def wide_and_tree(x: Batch) -> Iterator[object]:
    yield of_forward(plan.forward(x.chunks, (x.HV, WIDE, x.wide_V, x.sms), x.bound))
    half = len(x.lengths) // 2
    levels = chunks_of(x.lengths[:half]), chunks_of(x.lengths[half:])
    yield plan.tree(levels, x.shape)


def of_bands(x: Batch) -> Iterator[object]:
    """Of lengths that the device alone knows; the last one's states are in a pool."""
    yield of_forward(bands.forward(x.size, x.shape, x.bound))
    yield of_backward_bands(bands.backward(x.size, x.shape, x.gradient))
    yield choices.is_worth_keeping((), x.H, x.shape, x.bound, x.size)
    unknown = BatchLengths(sequence_chunks(*x.size), x.size, False)
    yield of_forward(choices.forward(unknown, x.shape, x.bound))
    yield of_backward_bands(choices.backward(unknown, x.shape, x.gradient))
    yield of_forward(choices.forward(unknown, x.shape, x.bound, True))


def of_cuts(x: Batch) -> Iterator[object]:
    """As the public function says it, with lengths on the host and on the device."""
    for on_host in (True, False):
        for direction in ("fwd", "bwd"):
            cut = cuts.segments_of(
                x.lengths, (x.H, x.HV), x.K, x.V, direction=direction, packed=True,
                cu_seqlens_cpu=on_host, exact=x.bound == BOUNDS[1], sm_count=x.sms,
            )  # fmt: skip
            yield cut.segment_tokens, cut.segments if cut.cut else ()


PLANNERS = {f.__name__: f for f in (forward, backward, wide_and_tree, of_bands, of_cuts)}
ORDER = 3 * ["forward", "backward"] + ["forward", "wide_and_tree", "of_bands", "of_cuts"]


def answers(block: int, planners: str) -> Iterator[str]:
    rng = random.Random(block)
    for batch in (Batch(rng) for _ in range(BLOCK)):
        yield f"{batch}: {', '.join(map(plain, PLANNERS[planners](batch)))}"


def texts(patterns: Sequence[str], full: bool = False) -> Texts:
    for block in range(BLOCKS):
        planners = ORDER[block % len(ORDER)]
        key = f"{block:03} {planners}"
        if chosen(key, patterns):
            lines = list(answers(block, planners))
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
            yield key, "\n".join([digest, *(lines if full else lines[:READABLE]), ""])


if __name__ == "__main__":
    full = sys.argv[1:2] == ["full"]
    printed(texts(sys.argv[1 + full :], full))
