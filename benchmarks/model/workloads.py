"""Layers as transformers and flash-linear-attention have them, in a step of training.

Four layers of a hybrid model, three of them gated delta nets, or FLA's layer alone.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..gdn.workloads import Sequences
from ..harness.workload import Heads, Lengths


class Sizes(NamedTuple):
    hidden: int
    intermediate: int  # 0: no MLP, as in FLA's layer
    attention: tuple[int, int, int]  # key-value heads, query heads, their size; 0: no such layer
    linear: tuple[int, int, int, int]  # key heads, value heads, K, V


QWEN, OLMO, FLA = "Qwen3.5-9B", "OLMo-Hybrid-7B", "FLA"
SIZES = {
    QWEN: Sizes(4096, 12288, (4, 16, 256), (16, 32, 128, 128)),
    OLMO: Sizes(3840, 11008, (30, 30, 128), (30, 30, 96, 192)),
    FLA: Sizes(2048, 0, (0, 0, 0), (6, 6, 256, 512)),
}
SMALL = {  # without a GPU
    QWEN: Sizes(64, 96, (1, 4, 32), (1, 2, 16, 16)),
    OLMO: Sizes(64, 96, (2, 2, 32), (2, 2, 24, 48)),
    FLA: Sizes(64, 0, (0, 0, 0), (2, 2, 16, 32)),
}
LINEAR, FULL = 3, 1  # layers of a block


@dataclass(frozen=True)
class ModelStep(Sequences):
    """Forward and backward of layers, in 16 bits.

    Each row of the batch is a sequence, or all are packed into one row. `region` is a gated delta
    net alone, from behind its projections to before the last: convolution, gates, rule and norm.
    """

    model: str
    lengths: Lengths  # equal
    small: bool = False
    packed: bool = False
    region: bool = False

    family = "model"
    direction = "both"

    @property
    def kind(self) -> str:
        return "fla_layer" if self.model == FLA else "region" if self.region else "layers"

    @property
    def name(self) -> str:
        part, pack = "region" if self.region else "model", "-pack" * self.packed
        return f"{part}-{self.model}-{self.layout}{pack}"

    @property
    def sizes(self) -> Sizes:
        return (SMALL if self.small else SIZES)[self.model]

    @property
    def heads(self) -> Heads:  # type: ignore[override]
        return self.sizes.linear[:2]

    @property
    def what(self) -> str:
        if self.model == FLA:
            return "FLA's layer"
        return f"{'the mixer of' if self.region else '4 layers of'} {self.model}"

    def reduced(self, factor: int) -> "ModelStep":
        """Shorter, and of a small model: without a GPU."""
        length = max(1, self.lengths[0] // factor)
        return replace(self, lengths=(length,) * len(self.lengths), small=True)


LENGTHS: tuple[Lengths, ...] = ((8192,), (2048,) * 4)
PACK: Lengths = (512,) * 16
MODEL = {
    "training": (
        *(ModelStep(model, lengths) for model in (QWEN, OLMO) for lengths in LENGTHS),
        *(ModelStep(model, PACK, packed=True) for model in (QWEN, OLMO)),
    ),
    "region": (
        ModelStep(QWEN, (8192,), region=True),
        ModelStep(QWEN, PACK, packed=True, region=True),
    ),
    "fla": (ModelStep(FLA, (8192,)), ModelStep(FLA, (2048,) * 4)),
}
