"""`Page`: all tensors of a pool's slot in one row of bytes, such as a page of an engine's cache."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Slots, slot_parts

PART_STEP = 16  # alignment of the parts of a page, in bytes, for copies by TMA


class Page(NamedTuple):
    """The layout of a slot for these heads: the tensors of Slots, one after another."""

    num_heads: int
    num_value_heads: int
    K: int
    V: int
    dtype: torch.dtype  # of k and v

    def part_bytes(self) -> list[int]:
        """Returns the bytes of each part, rounded up to PART_STEP."""
        parts = slot_parts(*self, torch.float32)
        sizes = (dtype.itemsize * math.prod(shape) for shape, dtype in parts)
        return [-(-size // PART_STEP) * PART_STEP for size in sizes]

    def slots(self, pages: Tensor) -> Slots:
        """Returns views of pages [slots, sum(part_bytes) / 4] fp32; pages may have gaps between."""
        views, first, parts = [], 0, slot_parts(*self, torch.float32)
        for (shape, dtype), size in zip(parts, self.part_bytes(), strict=True):
            part = pages[:, first // 4 : (first + size) // 4].view(dtype)
            views.append(part[:, : math.prod(shape)].view(-1, *shape))
            first += size
        return Slots(*views)
