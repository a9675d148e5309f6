"""Shapes of the causal convolution: packs, and prompts that responses share."""

from dataclasses import dataclass, replace

from ..attention.workloads import Group, Grouped, both_ways
from ..harness.workload import Direction

GROUP = 128  # channels that are judged together


@dataclass(frozen=True)
class Convolution(Grouped):
    channels: int = 8192  # of Qwen3-Next: 2 x 16 x 128 for q and k, 32 x 128 for v
    width: int = 4
    direction: Direction = "fwd"

    family = "conv"

    @property
    def name(self) -> str:
        return f"conv-{self.direction}-{self.channels}-{self.label}"

    @property
    def heads_label(self) -> str:
        return f"{self.channels}"

    @property
    def what(self) -> str:
        return "a tree" if self.shares else "a pack"

    @property
    def shares(self) -> bool:
        return any(responses for _, responses in self.groups)

    def reduced(self, factor: int) -> "Convolution":
        """Prompts and responses `factor` times shorter, and few channels: without a GPU."""
        return self if factor == 1 else replace(self, channels=256, **self.shorter(factor))


PACKS: dict[str, tuple[Group, ...]] = {
    "32768x1": ((32768, ()),),
    "4096x8": ((4096, ()),) * 8,
    "512x64": ((512, ()),) * 64,
    "64x512": ((64, ()),) * 512,
}
TREES: dict[str, tuple[Group, ...]] = {
    "16384+8x2048": ((16384, (2048,) * 8),),
    "2048+64x512": ((2048, (512,) * 64),),
    "1024+2000x16": ((1024, (16,) * 2000),),
}

CONV: dict[str, tuple[Convolution, ...]] = {
    "packs": both_ways(Convolution(label, groups) for label, groups in PACKS.items()),
    "trees": both_ways(Convolution(label, groups) for label, groups in TREES.items()),
    "channels": both_ways(
        Convolution("4096x8", PACKS["4096x8"], channels) for channels in (2048, 6144, 10240)
    ),
}
