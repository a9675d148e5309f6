"""The gated-delta-net shapes, named. Tests and benchmarks draw from the same list.

A name says all that changes the work: `gdn-fwd-16x64-24576+8192-published-h0` is a forward over 16
key and 64 value heads, two packed sequences, gates as FlashQLA publishes with, initial state given.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..harness.workload import Direction, Heads, Lengths, Workload

Gate = Literal["model", "published"]
KERNELS = ("kkt_solve",)  # those that are timed alone, too

# Qwen3.5 and 3.6: (key heads, value heads) per GPU.
HEADS: dict[Heads, str] = {
    (2, 8): "397B, 122B at TP 8",
    (4, 16): "397B, 122B at TP 4",
    (8, 32): "397B, 122B at TP 2",
    (16, 64): "397B, 122B",
    (16, 32): "35B, 9B, 4B",
    (8, 24): "27B at TP 2",
    (16, 48): "27B",
    (16, 16): "2B, 0.8B",
    (32, 32): "as many key as value heads",
}
BACKWARD_HEADS: tuple[Heads, ...] = ((16, 64), (16, 32), (8, 16), (4, 8), (2, 4))

# 32k tokens in 8 sequences as training packs them; our anchor, so it is spelled out.
RAGGED_32K: Lengths = (3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759)

_LONG = ("32768x1", "16384x1", "8192x1", "4096x1", "2048x1")
_PAIRS_32K = ("28672+4096", "24576+8192", "16384+16384", "8192+24576", "4096+28672")
_PAIRS_8K = ("12288+4096", "6144+2048", "4096+4096", "2048+6144", "1024+7168")
_BATCHES = ("8192x4", "4096x8", "2048x4", "1024x8")
FORWARD_LENGTHS = (*_LONG, *_PAIRS_32K, *_PAIRS_8K, *_BATCHES)
ANCHOR_LENGTHS = ("32768x1", "8192x1", "2048x1", "24576+8192", "8192x4", "4096x8", "1024x8")
ANCHOR_HEADS: tuple[Heads, ...] = ((2, 8), (16, 32), (16, 64))


def parse_lengths(text: str) -> Lengths:
    """'8192x4' is four sequences of 8192 tokens, '32768x1' or '32768' one, '24576+8192' a pack.

    Names have '64 of 1', not '1x64', where there are more sequences than tokens in each.
    """
    if " of " in text:
        count, length = (int(part) for part in text.split(" of "))
        return (length,) * count
    if "x" in text:
        length, count = (int(part) for part in text.split("x"))
        return (length,) * count
    return tuple(int(part) for part in text.split("+"))


def label_lengths(lengths: Lengths) -> str:
    count, length = len(lengths), lengths[0]
    if count == 2:
        return "+".join(map(str, lengths))
    if len(set(lengths)) == 1:
        return f"{count} of {length}" if count > length else f"{length}x{count}"
    return f"{sum(lengths)} in {count}"


# Seeds stay: a name on record does not say the lengths that were drawn.
def random_lengths(total: int, count: int) -> Lengths:
    """`count` sequences of random length that fill `total` tokens; each at least one token."""
    cuts = sorted(random.Random(f"0:{total}:{count}").sample(range(1, total), count - 1))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def short_responses(count: int) -> Lengths:
    """A pack of many short sequences, as a rollout or a reinforcement-learning step makes them."""
    draw = random.Random(f"0:{count}")
    return tuple(draw.randint(1, 600) for _ in range(count))


class Sequences(Workload):
    """What has lengths."""

    lengths: Lengths

    @property
    def layout(self) -> str:
        return label_lengths(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Gdn(Sequences):
    """One call of the gated delta rule, or of one of its kernels, on packed sequences."""

    heads: Heads
    lengths: Lengths
    direction: Direction = "fwd"
    gate: Gate = "model"
    initial_state: bool = False
    head_dim: int = 128  # K, and V if value_dim is None
    value_dim: int | None = None
    kernel: str = ""  # a single kernel's launch instead of the whole operation
    decode: bool = False  # a forward token by token, of a batch of equally long sequences

    family = "gdn"

    @property
    def name(self) -> str:
        state = "-h0" if self.initial_state else ""
        size = f"-d{self.head_dim}" if (self.head_dim, self.V) != (128, 128) else ""
        size += f"x{self.V}" if self.head_dim != self.V else ""
        layout = self.layout.replace(" ", "")
        return f"gdn-{self.kind}-{self.heads_label}-{layout}-{self.gate}{state}{size}"

    @property
    def V(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def kind(self) -> str:
        """What is timed: a direction, decoding, or a kernel alone."""
        return self.kernel or ("decode" if self.decode else self.direction)

    @property
    def what(self) -> str:
        """What the heads and lengths do not say."""
        state = ", initial state" if self.initial_state else ""
        sizes = f", K {self.head_dim}, V {self.V}" if self.head_dim != self.V else ""
        return f"{self.gate} gates{state}{sizes}"

    def reduced(self, factor: int) -> "Gdn":
        """Every sequence `factor` times shorter, or fewer to decode, for machines without a GPU."""
        if self.decode:
            return replace(self, lengths=self.lengths[: max(1, len(self.lengths) // factor)])
        return replace(self, lengths=tuple(max(1, n // factor) for n in self.lengths))


def _rows(
    heads: Iterable[Heads], lengths: Iterable[str | Lengths], **others: Any
) -> tuple[Gdn, ...]:
    """Every head configuration at every length."""
    parsed = [parse_lengths(x) if isinstance(x, str) else x for x in lengths]
    return tuple(Gdn(h, x, **others) for h in heads for x in parsed)


# training's: one sequence, then two, four and eight of them
_BACKWARD_LENGTHS = (
    *((8192,), *(random_lengths(8192, count) for count in (2, 4, 8))),
    *((32768,), *(random_lengths(32768, count) for count in (2, 4)), RAGGED_32K),
)
_WAYS: tuple[Direction, ...] = ("fwd", "bwd")
_ANCHOR: dict[str, Any] = {"gate": "published", "initial_state": True}
_SEGMENTS = (*_LONG, "24576+8192", "16384+16384", "4096+4096")

GDN: dict[str, tuple[Gdn, ...]] = {
    # what design targets were set on; `--quick`
    "anchors": (
        *_rows(ANCHOR_HEADS, ANCHOR_LENGTHS, **_ANCHOR),
        *_rows(((16, 32), (4, 8)), ("8192x1", "32768x1", RAGGED_32K), direction="bwd", **_ANCHOR),
    ),
    "forward": _rows(HEADS, FORWARD_LENGTHS),
    "forward-h0": _rows(HEADS, FORWARD_LENGTHS, initial_state=True),
    "published": _rows(HEADS, FORWARD_LENGTHS, gate="published"),
    "published-h0": _rows(HEADS, FORWARD_LENGTHS, **_ANCHOR),
    "backward": _rows(BACKWARD_HEADS, _BACKWARD_LENGTHS, direction="bwd", initial_state=True),
    # sequences and heads that fill the GPU, or nearly: what the uncut forward is for
    "filled": _rows(
        ((16, 16), (16, 32), (16, 48), (16, 64)),
        (*_BATCHES, "4096+4096", "16384+16384"),
        **_ANCHOR,
    ),
    # one or two sequences and few heads: what cutting them into segments is for
    "segments": (
        *_rows(((2, 8), (4, 16), (8, 24), (8, 32), (16, 48)), _SEGMENTS, **_ANCHOR),
        *_rows(((2, 4), (4, 8), (4, 16)), _SEGMENTS, direction="bwd", **_ANCHOR),
    ),
    "short": (
        *_rows(((4, 16), (16, 32), (16, 64)), map(short_responses, (128, 256, 512))),
        *_rows(((4, 8), (16, 32)), [short_responses(256)], direction="bwd"),
    ),
    # batches that a server decodes, a token at a time or a few that were guessed ahead
    "decode": _rows(
        ((2, 8), (4, 16), (16, 32), (16, 64)),
        [(tokens,) * count for count in (64, 128, 256) for tokens in (1, 2, 4)],
        initial_state=True,
        decode=True,
    ),
    # OLMo Hybrid's, FLA's default layer, and keys of half the values
    "sizes": (
        *(
            Gdn(heads, parse_lengths(lengths), direction, "model", True, K, V)
            for heads, K, V in (((30, 30), 96, 192), ((6, 6), 256, 512), ((16, 16), 128, 256))
            for lengths in ("8192x1", "8192x4")
            for direction in _WAYS
        ),
        Gdn((6, 6), (32768,), "fwd", "model", True, 256, 512),  # long enough to be cut
    ),
    "kernels": tuple(
        row
        for kernel in KERNELS
        for row in _rows(ANCHOR_HEADS, ("32768x1", "8192x1", "2048x1", "1024x8"), kernel=kernel)
    ),
    # never shortened: how long the path without a GPU takes at a real length
    "cpu": _rows([(16, 16)], ["4096x1"]),
}
