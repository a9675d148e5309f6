"""A block of a hybrid model in training, and its parts, on groups that share prompts.

A step of decoding is in step.py.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

from ..attention.workloads import SharedPrompts, same
from ..harness.workload import Direction, Heads
from .step import STEPS, DecodeStep

Half = Literal["linear", "full", "mlp"]  # of a layer: what mixes tokens, or what does not

PARTS: dict[str, tuple[Half, ...]] = {
    "block": ("linear", "mlp", "linear", "mlp", "linear", "mlp", "full", "mlp"),
    "mixers": ("linear", "linear", "linear", "full"),
    "linear": ("linear",),
    "full": ("full",),
    "mlp": ("mlp",),
}


@dataclass(frozen=True)
class HybridPart(SharedPrompts):
    """Forward and backward of halves of layers, of Qwen3.5's kind, at the sizes of Qwen3-Next.

    `heads` and `head_dim` are those of attention. The MLP is dense.
    """

    part: str = "block"
    direction: Direction = "both"
    heads: Heads = (2, 16)
    head_dim: int = 256
    hidden: int = 2048
    intermediate: int = 6144
    linear_heads: Heads = (16, 32)
    linear_dim: int = 128
    rotated: int = 64  # numbers of a query or key head that turn with the position

    family = "hybrid"
    width: ClassVar = 4  # of the convolution
    gated: ClassVar = True  # the queries of attention
    theta: ClassVar = 1e7  # of the rotations, as published with the models

    @property
    def kind(self) -> str:
        return self.part

    @property
    def name(self) -> str:
        return f"hybrid-{self.part}-{self.label}"

    @property
    def heads_label(self) -> str:
        (a, b), (c, d) = self.linear_heads, self.heads
        return {"linear": f"{a}x{b}", "full": f"{c}x{d}", "mlp": "none"}.get(
            self.part, f"{a}x{b}, {c}x{d}"
        )

    @property
    def halves(self) -> tuple[Half, ...]:
        return PARTS[self.part]

    @property
    def linear_columns(self) -> tuple[int, int, int]:
        """Of q, k and v of a linear layer; its convolution has all of them."""
        keys, values = (count * self.linear_dim for count in self.linear_heads)
        return keys, keys, values

    @property
    def whole_tokens(self) -> int:
        """Of all sequences in full."""
        return sum(len(prompt) + len(response) for prompt, response in self.sequences())

    def reduced(self, factor: int) -> "HybridPart":
        """A small model, prompts and responses `factor` times shorter: without a GPU."""
        shorter = cast("HybridPart", super().reduced(factor))
        return replace(
            shorter, hidden=64, intermediate=96, heads=(1, 4), head_dim=32, rotated=8,
            linear_heads=(1, 2), linear_dim=16,
        )  # fmt: skip


SHAPES = {f"{n}x{p}+{r}": same(n, p, r) for n, p, r in (
    (8, 16384, 2048), (16, 8192, 1024), (28, 16384, 2048), (64, 2048, 512),
)}  # fmt: skip


def _part(part: str) -> tuple[HybridPart, ...]:
    return tuple(HybridPart(label, groups, part=part) for label, groups in SHAPES.items())


HYBRID: dict[str, tuple[HybridPart | DecodeStep, ...]] = {
    "block": _part("block"),
    "parts": tuple(w for part in PARTS if part != "block" for w in _part(part)),
    "step": STEPS,
}
