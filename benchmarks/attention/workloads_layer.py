"""Decoder layers over shared prompts."""

from dataclasses import dataclass

from .workloads import LONG_PROMPTS, SHORT_BATCHES, Direction, SharedPrompts


@dataclass(frozen=True)
class DecoderLayer(SharedPrompts):
    """A layer of Qwen3-8B, forward and backward: projections, norms, rotations, an MLP as well."""

    direction: Direction = "both"
    hidden: int = 4096
    intermediate: int = 12288

    @property
    def kind(self) -> str:
        return "layer"

    @property
    def parameters(self) -> int:
        """Of the products; the norms' are few."""
        kv_heads, heads = self.heads
        of_attention = (2 * heads + 2 * kv_heads) * self.head_dim * self.hidden
        return of_attention + 3 * self.hidden * self.intermediate


LAYER = (
    DecoderLayer("A", LONG_PROMPTS["A"]),
    *(DecoderLayer(label, SHORT_BATCHES[label]) for label in ("S1", "S8")),
)
