"""A pool's slot as one row of numbers: the page that an engine keeps for a sequence."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Slots
from qla_kernels.gdn.shapes import TAIL_PLACES

PART_STEP = 16  # bytes, to whose multiples parts of a page are aligned, as copies by TMA ask for


class Page(NamedTuple):
    """What a slot holds for these heads, one part behind the other, in the order of Slots."""

    num_heads: int
    num_value_heads: int
    K: int
    V: int
    dtype: torch.dtype  # of k and v

    def parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        H, HV, K, V, dtype = self
        tokens, count = TAIL_PLACES, (torch.int32, (1,))
        gates = torch.float32, (tokens, HV)
        return [
            (torch.float32, (HV, K, V)), (dtype, (tokens, H, K)), (dtype, (tokens, HV, V)),
            gates, gates, count, count,
        ]  # fmt: skip

    def part_bytes(self) -> list[int]:
        """Bytes of each part, with those up to the next one."""
        sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in self.parts())
        return [-(-size // PART_STEP) * PART_STEP for size in sizes]

    def slots(self, pages: Tensor) -> Slots:
        """Returns views of pages [slots, sum(part_bytes) / 4] fp32, any distance apart."""
        found, first = [], 0
        for (dtype, shape), size in zip(self.parts(), self.part_bytes(), strict=True):
            part = pages[:, first // 4 : (first + size) // 4].view(dtype)
            x = part[:, : math.prod(shape)].view(-1, *shape)
            found.append(x if len(shape) > 1 else x[:, 0])
            first += size
        return Slots(*found)
