"""Shapes of the causal convolution: packs, and prompts that responses share."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..attention.workloads import Group
from ..harness.workload import Direction, Workload

GROUP = 128  # channels that are judged together


@dataclass(frozen=True)
class Convolution(Workload):
    """Packed groups of a prompt and its responses; a group without responses is a sequence."""

    label: str
    groups: tuple[Group, ...]
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
    def layout(self) -> str:
        return self.label

    @property
    def what(self) -> str:
        return "a tree" if self.shares else "a pack"

    @property
    def shares(self) -> bool:
        return any(responses for _, responses in self.groups)

    @property
    def tokens(self) -> int:
        return sum(prompt + sum(responses) for prompt, responses in self.groups)

    def reduced(self, factor: int) -> "Convolution":
        """Prompts and responses `factor` times shorter, and few channels: without a GPU."""
        if factor == 1:
            return self
        shorter = tuple(
            (max(1, prompt // factor), tuple(max(1, n // factor) for n in responses))
            for prompt, responses in self.groups
        )
        return replace(self, label=f"{self.label}/{factor}", groups=shorter, channels=256)


def _both(workloads: Iterable[Convolution]) -> tuple[Convolution, ...]:
    """All forward, then all backward."""
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    given = list(workloads)
    return tuple(replace(workload, direction=d) for d in directions for workload in given)


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
    "packs": _both(Convolution(label, groups) for label, groups in PACKS.items()),
    "trees": _both(Convolution(label, groups) for label, groups in TREES.items()),
    "channels": _both(
        Convolution("4096x8", PACKS["4096x8"], channels) for channels in (2048, 6144, 10240)
    ),
}
