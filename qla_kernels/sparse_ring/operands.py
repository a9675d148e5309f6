"""How a call's tensors and tables look to the kernels."""

from functools import lru_cache

import torch
from torch import Tensor

from qla_kernels.device_tables import kept, numbers
from qla_kernels.errors import Unsupported, need
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.plan import Visit
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.sparse_ring.shard import Columns

INT32 = 2**31 - 1
KEPT = 1024  # small tables: those of a few shapes, each of a few launches


def rows(x: Tensor) -> Tensor:
    """A dimension of one element may have any stride in torch, but not in a TMA descriptor, nor may
    it take more than the 32 bits that kernels have for it.
    """
    shape, strides, size = x.shape, x.stride(), x.shape[-1]
    if strides[-1] == 1 and all(0 < s <= INT32 and s % size == 0 for s in strides[:-1]):
        return x  # a view costs as much as the rest of this, and there are many
    if any(n > 1 and s > INT32 for n, s in zip(shape, strides, strict=True)):
        got, fix = f"strides {tuple(strides)} for a shape {tuple(shape)}", "pass fewer sequences"
        raise Unsupported(need("sparse attention", got, f"strides of at most {INT32}", fix))
    mended = [s if n > 1 else size for n, s in zip(shape[:-1], strides, strict=False)]
    return x.as_strided(shape, (*mended, 1))


def chunks(x: Tensor) -> Tensor:
    """[slots, B, L, heads, D] as [slots B, L, heads, D]: of several slots, a buffer of our own."""
    return rows(x[0] if len(x) == 1 else x.flatten(0, 1))


def per_head(x: Tensor) -> Tensor:
    """[B, H, n] as [B H, n]; at least one column, for a descriptor, of what is then never read."""
    return x.flatten(0, 1) if x.shape[-1] else x.new_empty(x.shape[0] * x.shape[1], 1)


def columns_of(columns: Columns | None, q: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Keys and values [B H, max_v, 1, D], and whether there are any for this launch."""
    B, _, H, D = q.shape
    if columns is None or not columns.k.numel():
        nothing = _nothing(q.device, q.dtype, (B * H, 1, 1, D))
        return nothing, nothing, False
    k, v = (x.view(B * H, -1, 1, D) for x in columns)
    return k, v, True


def or_nothing(x: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor:
    """[B L, H, D] of x, like q, or what a launch is given in its place and never touches."""
    H, D = q.shape[2:]
    return x.view(-1, H, D) if x is not None else _nothing(q.device, dtype, (1, H, D))


@lru_cache(maxsize=KEPT)
def _nothing(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@kept(KEPT)
def visits_on(device: torch.device, B: int, visits: tuple[Visit, ...]) -> Tensor:
    """int32 [visits, 5]: the slot's first row of `chunks`, bucket, first block, end, its place."""
    fields = [[x.slot * B, x.bucket, x.first, x.end, x.row0] for x in visits]
    return numbers(fields, device)


@kept(KEPT)
def first_blocks_on(device: torch.device, layout: Layout, rank: int, T: int) -> Tensor:
    """int32 [tiles]: the block of the sequence that each tile of a rank's shard begins with."""
    row = torch.arange(0, T // layout.world, TILE, device=device)
    return (layout.position(rank, row, T) // BLOCK).int()


@kept(KEPT)
def first_blocks_of(device: torch.device, layout: Layout, ranks: tuple[int, ...], T: int) -> Tensor:
    """int32 [ranks, tiles]."""
    return torch.stack([first_blocks_on(device, layout, rank, T) for rank in ranks])
