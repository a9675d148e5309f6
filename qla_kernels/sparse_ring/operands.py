"""Brings tensors and tables of a call into the shapes and strides that kernels take."""

import torch
from torch import Tensor

from qla_kernels.runtime.device_tables import kept, numbers
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.plan import Visit
from qla_kernels.sparse_ring.shapes import BLOCK, TILE
from qla_kernels.sparse_ring.shard import Columns

INT32 = 2**31 - 1
KEPT = 1024  # entries of each cache of small tables


def rows(x: Tensor) -> Tensor:
    """Returns x, or a view of it whose strides are valid in a TMA descriptor and fit into 32 bits.

    In torch the stride of a dimension of one element may be any number, so it is replaced. Raises
    Unsupported if the stride of a longer dimension takes more than 32 bits.
    """
    shape, strides, size = x.shape, x.stride(), x.shape[-1]
    if strides[-1] == 1 and all(0 < s <= INT32 and s % size == 0 for s in strides[:-1]):
        return x  # no view: making one takes as long as the rest of this function
    if any(n > 1 and s > INT32 for n, s in zip(shape, strides, strict=True)):
        got = f"a tensor has shape {tuple(shape)} and strides {tuple(strides)}"
        fix = "pass fewer sequences a call"
        raise Unsupported(need("sparse_attention", got, f"strides of at most {INT32}", fix))
    mended = [s if n > 1 else size for n, s in zip(shape[:-1], strides, strict=False)]
    return x.as_strided(shape, (*mended, 1))


def chunks(x: Tensor) -> Tensor:
    """Returns x [slots, B, L, heads, D] as [slots B, L, heads, D].

    A buffer of several slots is contiguous, because this package allocated it.
    """
    return rows(x[0] if len(x) == 1 else x.flatten(0, 1))


def per_head(x: Tensor) -> Tensor:
    """Returns x [B, H, n] as [B H, n]; if n is 0, an uninitialised [B H, 1] that is never read.

    A TMA descriptor needs at least one column.
    """
    return x.flatten(0, 1) if x.shape[-1] else x.new_empty(x.shape[0] * x.shape[1], 1)


def columns_of(columns: Columns | None, q: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns the columns' keys and values, [B H, max_v, 1, D], and True if the launch has any.

    Without columns the tensors are placeholders that the launch does not read.
    """
    B, _, H, D = q.shape
    if columns is None or not columns.k.numel():
        placeholder = _placeholder(q.device, q.dtype, (B * H, 1, 1, D))
        return placeholder, placeholder, False
    k, v = (x.view(B * H, -1, 1, D) for x in columns)
    return k, v, True


def or_placeholder(x: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x, of q's shape, as [B L, H, D]; if x is None, a placeholder of the given dtype.

    The launch neither reads nor writes the placeholder.
    """
    H, D = q.shape[2:]
    return x.view(-1, H, D) if x is not None else _placeholder(q.device, dtype, (1, H, D))


@kept(KEPT)
def _placeholder(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@kept(KEPT)
def visits_on(device: torch.device, B: int, visits: tuple[Visit, ...]) -> Tensor:
    """Returns the visits as int32 [visits, 5].

    A row is: first batch row of the slot in `chunks`, bucket, first block, end block, local block
    of the first.
    """
    fields = [[x.slot * B, x.bucket, x.first, x.end, x.row0] for x in visits]
    return numbers(fields, device)


@kept(KEPT)
def first_blocks_on(device: torch.device, layout: Layout, rank: int, T: int) -> Tensor:
    """Returns int32 [tiles]: for each tile of a rank's shard its first block in the sequence."""
    row = torch.arange(0, T // layout.world, TILE, device=device)
    return (layout.position(rank, row, T) // BLOCK).int()


@kept(KEPT)
def first_blocks_of(device: torch.device, layout: Layout, ranks: tuple[int, ...], T: int) -> Tensor:
    """Returns `first_blocks_on` for several ranks, int32 [ranks, tiles]."""
    return torch.stack([first_blocks_on(device, layout, rank, T) for rank in ranks])
