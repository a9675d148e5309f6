"""A pool's slot as one row of numbers: the page that an engine keeps for a sequence."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Slots, slot_parts

PART_STEP = 16  # bytes, to whose multiples parts of a page are aligned, as copies by TMA ask for


class Page(NamedTuple):
    """What a slot holds for these heads, one part behind the other, in the order of Slots."""

    num_heads: int
    num_value_heads: int
    K: int
    V: int
    dtype: torch.dtype  # of k and v

    def part_bytes(self) -> list[int]:
        """Bytes of each part, with those up to the next one."""
        parts = slot_parts(*self, torch.float32)
        sizes = (dtype.itemsize * math.prod(shape) for shape, dtype in parts)
        return [-(-size // PART_STEP) * PART_STEP for size in sizes]

    def slots(self, pages: Tensor) -> Slots:
        """Returns views of pages [slots, sum(part_bytes) / 4] fp32, any distance apart."""
        found, first, parts = [], 0, slot_parts(*self, torch.float32)
        for (shape, dtype), size in zip(parts, self.part_bytes(), strict=True):
            part = pages[:, first // 4 : (first + size) // 4].view(dtype)
            found.append(part[:, : math.prod(shape)].view(-1, *shape))
            first += size
        return Slots(*found)
