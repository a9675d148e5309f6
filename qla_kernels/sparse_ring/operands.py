"""How a call's tensors and tables look to the kernels."""

from functools import lru_cache

import torch
from torch import Tensor

from qla_kernels.sparse_ring.layouts import TILE, Layout
from qla_kernels.sparse_ring.patterns import BLOCK
from qla_kernels.sparse_ring.plan import Visit

KEPT = 1024  # small tables: those of a few shapes, each of a few launches


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def rows(x: Tensor) -> Tensor:
    """A dimension of one element may have any stride in torch, but not in a TMA descriptor."""
    size = x.shape[-1]
    strides = [s if n > 1 else size for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    return x.as_strided(x.shape, (*strides, 1))


def chunks(x: Tensor) -> Tensor:
    """[slots, B, L, heads, D] as [slots B, L, heads, D]: of several slots, a buffer of our own."""
    return rows(x.flatten(0, 1))


def per_head(x: Tensor) -> Tensor:
    """[B, H, n] as [B H, n]; at least one column, for a descriptor, of what is then never read."""
    return x.flatten(0, 1) if x.shape[-1] else x.new_empty(x.shape[0] * x.shape[1], 1)


@lru_cache(maxsize=KEPT)
def visits_on(device: torch.device, B: int, visits: tuple[Visit, ...]) -> Tensor:
    """int32 [visits, 5]: the slot's first row of `chunks`, bucket, first block, end, its place.

    Kept, so that it is copied to the device once, and a CUDA graph finds it there.
    """
    fields = [[x.slot * B, x.bucket, x.first, x.end, x.row0] for x in visits]
    return torch.tensor(fields, dtype=torch.int32, device=device)


@lru_cache(maxsize=KEPT)
def first_blocks_on(device: torch.device, layout: Layout, rank: int, T: int) -> Tensor:
    """int32 [tiles]: the block of the sequence that each tile of a rank's shard begins with."""
    row = torch.arange(0, T // layout.world, TILE, device=device)
    return (layout.position(torch.tensor(rank), row, T) // BLOCK).int()
