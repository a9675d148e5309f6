"""Makes the tables of equal shares for a launch of fused_fwd: kernels/share_table.py."""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn.kernels import share_table as share_table_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.kernels.chain.shares import PIECE_COLUMNS, SHARE_COLUMNS
from qla_kernels.runtime import jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.tile.constants import CHUNK

CUT_ALL = 1 << 30  # chunks of a sequence that there is not


class ShareTables(NamedTuple):
    """What CTAs of fused_fwd read of their shares, and hand from one to the next."""

    pieces: Tensor  # [items + CTAs, PIECE_COLUMNS] int32
    shares: Tensor  # [CTAs, SHARE_COLUMNS] int32
    shelves: Tensor  # [CTAs, state warpgroups, 64 K] fp32, uninitialised


def share_out(
    like: Tensor, bounds: Tensor, heads: tuple[int, int], tile_v: int, sizes: tuple[int, int],
    num_tokens: int, ctas: int, most_cut: int | None = None,
) -> ShareTables:  # fmt: skip
    """Cuts the chunks of all sequences, value heads and tiles of V into a share for each CTA.

    With most_cut, there are as many CTAs as items, if these are more than `ctas`. They have an item
    each if the longest sequence has more chunks than that; otherwise the first `ctas` have shares.

    Args:
        like: an fp32 tensor on the GPU.
        bounds: [N + 1] of the sequences, which lie among `num_tokens` tokens.
        heads: H and HV.
        tile_v: columns of V of a CTA.
        sizes: K of the kernel's variant, and V.
    """
    N, (H, HV), (K, V) = bounds.shape[0] - 1, heads, sizes
    tiles = V // tile_v
    items = N * HV * tiles
    rows = ctas if most_cut is None else max(ctas, items)
    pieces = bounds.new_empty(items + ctas, PIECE_COLUMNS)
    shares = bounds.new_empty(rows, SHARE_COLUMNS)
    shelves = like.new_empty(rows, tile_v // TILE, TILE * K)  # the kernel asks for one a CTA
    variant = share_table_kernel.Variant(dtype_name(bounds.dtype))
    most = num_tokens // CHUNK + N  # places of one value head and tile
    jit.compile(share_table_kernel, variant)(
        bounds, bounds.new_empty(N + 1), pieces, shares, num_tokens, H, HV, tiles, most, ctas,
        CUT_ALL if most_cut is None else most_cut,
    )  # fmt: skip
    return ShareTables(pieces, shares, shelves)
