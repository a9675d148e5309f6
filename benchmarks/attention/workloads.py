"""The attention shapes, named: shared prompts (dualkv), alone and in a decoder layer, and
vertical-slash masks (sparse_ring)."""

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from ..harness.workload import Direction, Heads, Lengths, Workload

WIDE = 256  # the head size of the set `wide`
Group = tuple[int, Lengths]  # a prompt's tokens, and each response's
Span = tuple[int, int]  # the bounds of random.randint
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Grouped(Workload):
    """Packed groups of responses, each with one prompt; one without responses is a sequence."""

    label: str
    groups: tuple[Group, ...]

    @property
    def layout(self) -> str:
        return self.label

    @property
    def tokens(self) -> int:
        return sum(prompt + sum(responses) for prompt, responses in self.groups)

    def shorter(self, factor: int) -> dict[str, Any]:
        """The fields of one whose prompts and responses are `factor` times shorter."""
        groups = tuple(
            (max(1, prompt // factor), tuple(max(1, n // factor) for n in responses))
            for prompt, responses in self.groups
        )
        return {"label": f"{self.label}/{factor}" if factor > 1 else self.label, "groups": groups}


@dataclass(frozen=True)
class SharedPrompts(Grouped):
    """Attention: a group without responses is plain causal."""

    direction: Direction = "fwd"
    heads: Heads = (8, 32)  # key-value heads, query heads
    head_dim: int = 128
    dtype: Dtype = "bfloat16"

    family = "dualkv"

    @property
    def name(self) -> str:
        kind = "-fp16" if self.dtype == "float16" else ""
        size = f"-d{self.head_dim}" if self.head_dim != 128 else ""
        return f"dualkv-{self.kind}-{self.heads_label}-{self.label}{size}{kind}"

    @property
    def what(self) -> str:
        return self.dtype

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        return sum(
            p * (p + 1) // 2 + sum(p * r + r * (r + 1) // 2 for r in responses)
            for p, responses in self.groups
        )

    def sequences(self) -> Iterator[tuple[range, range]]:
        """Packed tokens of each sequence's prompt and of its response, empty if it has none."""
        start = 0
        for tokens, responses in self.groups:
            prompt = range(start, start + tokens)
            end = prompt.stop
            for length in responses or (0,):
                yield prompt, range(end, end + length)
                end += length
            start = end

    def reduced(self, factor: int) -> "SharedPrompts":
        """Prompts and responses `factor` times shorter, for machines without a GPU."""
        return replace(self, dtype="float32", **self.shorter(factor))


def same(count: int, prompt: int, response: int) -> tuple[Group, ...]:
    return ((prompt, (response,) * count),)


def _random_groups(
    seed: int, num: int, count: int, prompt: Span, response: Span
) -> tuple[Group, ...]:
    """Per group its prompt's length, then its responses', from one stream of random numbers."""
    draw = random.Random(seed)
    return tuple(
        (draw.randint(*prompt), tuple(draw.randint(*response) for _ in range(count)))
        for _ in range(num)
    )


@dataclass(frozen=True)
class DecoderLayer(SharedPrompts):
    """A layer of Qwen3-8B, forward and backward: projections, norms, rotations, an MLP as well."""

    direction: Direction = "both"
    hidden: int = 4096
    intermediate: int = 12288

    kind = "layer"
    halves: ClassVar = ("full", "mlp")
    gated: ClassVar = False  # its queries
    theta: ClassVar = 1e6  # of the rotations, as published with the model

    @property
    def rotated(self) -> int:
        return self.head_dim


LONG_PROMPTS: dict[str, tuple[Group, ...]] = {
    "A": same(28, 4096, 2048),
    "B": same(28, 16384, 2048),
    "C": same(16, 32768, 2048),
    "D": same(32, 8192, 1024),
}
SHORT_BATCHES: dict[str, tuple[Group, ...]] = {
    "S1": _random_groups(1, 16, 8, (80, 300), (100, 500)),
    "S2": _random_groups(2, 8, 16, (100, 400), (64, 1024)),
    "S3": _random_groups(3, 4, 8, (200, 200), (100, 500)),
    "S4": _random_groups(4, 1, 8, (512, 512), (32, 512)),
    "S5": _random_groups(5, 32, 4, (300, 900), (8, 64)),
    "S6": _random_groups(6, 4, 16, (1500, 3000), (16, 256)),
    "S7": _random_groups(7, 1, 64, (2048, 2048), (16, 256)),
    "S8": _random_groups(42, 1, 32, (5059, 5059), (131, 2048)),
}
DENSE: dict[str, tuple[Group, ...]] = {
    "causal-4096x8": ((4096, ()),) * 8,
    "causal-16384x2": ((16384, ()),) * 2,
    "causal-1x65536": ((65536, ()),),
}
PUBLISHED: dict[str, tuple[Group, ...]] = {
    f"{n}x{p}+2048": same(n, p, 2048)
    for n, p in ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536))
}
# what many responses to one prompt cost: their number is all that changes
RESPONSES: dict[str, tuple[Group, ...]] = {
    f"{n}x4096+512": same(n, 4096, 512) for n in (1, 2, 4, 8, 16, 32, 64)
}


@dataclass(frozen=True)
class VerticalSlash(Workload):
    """Causal attention of one sequence under a mask of whole diagonals (64 wide) and of columns.

    Direction `index` is the choice of lines itself, whatever the mask: its budget is the default.
    """

    tokens: int
    density: float = 1.0  # share of the causal triangle; 1: all of it
    run: int = 1  # neighbouring diagonals that are active together
    column_share: float = 0.15  # of the density; the rest is diagonals
    direction: Literal["fwd", "bwd", "index"] = "fwd"
    heads: Heads = (8, 32)  # key-value heads, query heads
    head_dim: int = 128

    family = "sparse_ring"
    block = 64

    @property
    def name(self) -> str:
        size = f"-d{self.head_dim}" if self.head_dim != 128 else ""
        return f"sparse_ring-{self.direction}-{self.heads_label}-{self.layout}{size}"

    @property
    def dense(self) -> bool:
        return self.density == 1

    @property
    def layout(self) -> str:
        length = f"{self.tokens / 1024:g}k"
        if self.direction == "index":
            return length
        share = self.what.removesuffix(" dense")
        return f"{length}-dense" if self.dense else f"{length}-{share}-run{self.run}"

    @property
    def what(self) -> str:
        if self.direction == "index":
            return "an index"
        return "dense" if self.dense else f"{100 * self.density:.3g}% dense"

    def sequences(self) -> Iterator[tuple[range, range]]:
        """Without a mask it is one causal sequence, as those of SharedPrompts."""
        yield range(self.tokens), range(self.tokens, self.tokens)

    def mask(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(active diagonals, active columns), integers only: the same on every machine.

        Diagonals 0 and 1, and runs of diagonals, one at a random place of each equal cell of the
        rest. On average a diagonal is 1 / blocks of the triangle and a column 1 / tokens.
        """
        blocks = self.tokens // self.block
        if self.dense:
            return tuple(range(blocks)), ()
        draw = random.Random(f"0:{self.tokens}:{self.density}:{self.run}")
        slashes = self.density * (1 - self.column_share) * blocks - 2
        runs = max(0, min(round(slashes / self.run), (blocks - 2) // self.run))
        diagonals = {0, 1}
        for i in range(runs):
            low, high = (2 + (blocks - 2) * j // runs for j in (i, i + 1))
            first = draw.randint(low, max(low, high - self.run))
            diagonals.update(range(first, min(blocks, first + self.run)))
        num_columns = round(self.density * self.column_share * self.tokens)
        columns = draw.sample(range(self.tokens), num_columns)
        return tuple(sorted(diagonals)), tuple(sorted(columns))

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head; a column inside an active block counts once."""
        diagonals, columns = self.mask()
        n, blocks = self.block, self.tokens // self.block
        slashes = blocks * n * (n + 1) // 2 + sum((blocks - d) * n * n for d in diagonals if d)
        alone = 0  # rows of a column outside the active blocks it crosses
        for c in columns:
            below = bisect_left(diagonals, blocks - c // n) - 1  # active blocks under the diagonal
            alone += self.tokens - c - (n - c % n) - below * n
        return slashes + alone

    def reduced(self, factor: int) -> "VerticalSlash":
        """`factor` times fewer blocks, for machines without a GPU."""
        blocks = self.tokens // self.block
        return replace(self, tokens=self.block * max(2, blocks // factor))


W = TypeVar("W", bound=Workload)


def both_ways(workloads: Iterable[W]) -> tuple[W, ...]:
    """All forward, then all backward."""
    rows: list[Any] = list(workloads)
    return tuple(replace(row, direction=way) for way in ("fwd", "bwd") for row in rows)


def _prompts(
    shapes: dict[str, tuple[Group, ...]], dtype: Dtype = "bfloat16"
) -> tuple[SharedPrompts, ...]:
    return both_ways(SharedPrompts(label, groups, dtype=dtype) for label, groups in shapes.items())


# Attention layers of Qwen3-Next and Qwen3.5 have 16 query heads of 256, and 2 or 4 key heads.
WIDE_HEADS: tuple[Heads, ...] = ((2, 16), (4, 16))
WIDE_SHAPES: dict[str, tuple[Group, ...]] = {
    f"{n}x{p}+{r}": same(n, p, r)
    for n, p, r in ((28, 16384, 2048), (8, 16384, 2048), (64, 2048, 512))
}

DUALKV: dict[str, tuple[SharedPrompts, ...]] = {
    "long": _prompts(LONG_PROMPTS),
    "largest": _prompts({"28x32768+2048": same(28, 32768, 2048)}),
    "short": _prompts(SHORT_BATCHES),
    "responses": _prompts(RESPONSES),
    "wide": both_ways(
        SharedPrompts(label, groups, heads=heads, head_dim=WIDE)
        for heads in WIDE_HEADS
        for label, groups in WIDE_SHAPES.items()
    ),
    "dense": _prompts(DENSE),
    "published": _prompts(PUBLISHED, "float16"),
    "layer": (
        DecoderLayer("A", LONG_PROMPTS["A"]),
        *(DecoderLayer(label, SHORT_BATCHES[label]) for label in ("S1", "S8")),
    ),
}

LENGTHS = (32768, 65536, 131072, 262144)
RUNS = (1, 4, 16)
INDEX_HEADS: tuple[Heads, ...] = ((8, 32), (2, 16))

SPARSE_RING: dict[str, tuple[VerticalSlash, ...]] = {
    "anchor": (
        *both_ways(VerticalSlash(131072, 0.05, run) for run in RUNS),
        *both_ways([VerticalSlash(131072)]),
        VerticalSlash(131072, direction="index"),
    ),
    "grid": both_ways(  # lengths, densities and runs, each around one mask of 128K tokens
        VerticalSlash(*preset)
        for preset in (
            *((tokens, 0.05, 4) for tokens in LENGTHS),
            *((131072, density, 4) for density in (0.01, 0.02, 0.10, 0.20)),
            *((131072, 0.05, run) for run in RUNS if run != 4),
        )
    ),
    "dense": both_ways(VerticalSlash(tokens) for tokens in LENGTHS),
    "index": tuple(
        VerticalSlash(t, direction="index", heads=heads) for heads in INDEX_HEADS for t in LENGTHS
    ),
}
