"""How warps share the channels of a token where the first of them are heads to normalise."""

from typing import NamedTuple

from qla_kernels.conv.shapes import LANES, PIECE, TILE

STEP, MOST = 16, TILE  # sizes of heads that one warp takes
WIDE_STEP = 2 * STEP  # and that two warps take, up to 2 * MOST
SIZES = f"a multiple of {STEP} up to {MOST}, or of {WIDE_STEP} up to {2 * MOST}"


class Heads(NamedTuple):
    """How the warps of a CTA share heads to normalise, as kernels take it.

    A piece is PIECE channels of a token, which one lane of a warp holds. A head of more than TILE
    channels is shared by two neighbouring warps, which walk over the same tokens; the other warps
    of such a launch also work in pairs.
    """

    pieces: int  # number of pieces to normalise; they are the first of a token
    tiles: int  # number of warps that hold these pieces
    lanes: int  # number of lanes of each of these warps that hold a piece
    reach: int  # number of lanes of a warp that share a head, less 1; a power of two less 1
    wide: int  # 1 if two warps share a head, else 0


def takes(size: int) -> bool:
    """Returns whether kernels run heads of this size."""
    return size > 0 and (
        (size <= MOST and size % STEP == 0) or (size <= 2 * MOST and size % WIDE_STEP == 0)
    )


def heads_of(count: int, size: int) -> Heads:
    """Returns how warps share `count` heads of `size` channels; both are 0 if there are none.

    Heads that need a power of two of lanes lie side by side in a warp. Any other head has a warp to
    itself, whose last lanes are idle.
    """
    if not count * size:
        return Heads(0, 0, LANES, LANES - 1, 0)
    wide = int(size > TILE)
    own = size // PIECE >> wide
    shared = own & (own - 1) == 0
    lanes, pieces = LANES if shared else own, count * size // PIECE
    return Heads(pieces, -(-pieces // lanes), lanes, (own if shared else LANES) - 1, wide)


def tile_ctas(channels: int, heads: Heads) -> int:
    """Returns how many CTAs share the channels of a token: one for each tile, or for two if `wide`.

    A tile is the channels of one warp.
    """
    others = -(-(channels // PIECE - heads.pieces) // LANES)
    return heads.tiles + others + heads.wide >> heads.wide
