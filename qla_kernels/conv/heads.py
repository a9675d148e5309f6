"""How warps share the channels of a token where the first of them are heads to normalise."""

from typing import NamedTuple

from qla_kernels.conv.shapes import LANES, PIECE, TILE

STEP, MOST = 16, TILE  # sizes of heads that one warp takes
WIDE_STEP = 2 * STEP  # and that two warps take, up to 2 * MOST
SIZES = f"a multiple of {STEP} up to {MOST}, or of {WIDE_STEP} up to {2 * MOST}"


class Heads(NamedTuple):
    """The numbers that kernels take. A piece is PIECE channels, those of a lane.

    A head of more than TILE channels has two neighbouring warps of a CTA, which walk the same
    tokens. Other warps of that launch also go in pairs.
    """

    pieces: int  # to normalise, the first ones of a token
    tiles: int  # warps that take them
    lanes: int  # of each such warp that have a piece
    reach: int  # lanes of a head in a warp, less 1; a power of two less 1
    wide: int  # 1 if a head has two warps, else 0


def takes(size: int) -> bool:
    """Returns whether kernels run heads of this size."""
    return size > 0 and (
        (size <= MOST and size % STEP == 0) or (size <= 2 * MOST and size % WIDE_STEP == 0)
    )


def heads_of(count: int, size: int) -> Heads:
    """Returns how warps share `count` heads of `size` channels; 0 and 0 for none.

    Heads whose lanes are a power of two lie side by side in a warp. Each other one has its own
    warp, whose last lanes are idle.
    """
    if not count * size:
        return Heads(0, 0, LANES, LANES - 1, 0)
    wide = int(size > TILE)
    own = size // PIECE >> wide
    shared = own & (own - 1) == 0
    lanes, pieces = LANES if shared else own, count * size // PIECE
    return Heads(pieces, -(-pieces // lanes), lanes, (own if shared else LANES) - 1, wide)


def tile_ctas(channels: int, heads: Heads) -> int:
    """Returns the CTAs that share the channels of a run: each takes one tile, or two if `wide`."""
    others = -(-(channels // PIECE - heads.pieces) // LANES)
    return heads.tiles + others + heads.wide >> heads.wide
