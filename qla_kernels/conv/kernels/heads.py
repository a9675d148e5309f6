"""Which channels a warp takes, and sums over the heads among them; see conv/heads.py.

Sums of up to four rows are added over a head's lanes together: in the first two steps of the
butterfly each lane passes on half of its sums and keeps the other half. So four take 6 shuffles to
add and 4 to give back, in place of 20.
"""

from pathlib import Path
from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.shapes import EPSILON, LANES
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import Named

HEADS_SOURCE = Path(__file__).with_suffix(".cuh").read_text()

SUMS = 4  # the most that are added together


class Warp(NamedTuple):
    """What the norm of a warp's heads needs."""

    s_pair: Any  # [warps, .., SUMS or more] fp32, sums of a warp for its neighbour
    pair: NamedBarrier  # at which a warp and its neighbour meet
    lanes: Any  # of the warp that are not idle, and the other fields of Heads
    reach: Any
    wide: Any


def pair_barriers(warps: int) -> dict[str, Named]:
    """Returns a schedule's named barriers: one for each two neighbouring warps."""
    return {"pair": Named(threads=2 * LANES, copies=warps // 2)}


def pair_bytes(warps: int) -> int:
    """Returns the bytes of s_pair."""
    return warps * SUMS * 4


def uniform(x: Any) -> Any:
    """Returns x, which all lanes of a warp have, as the compiler sees that they do.

    Loops that end at such numbers need no code for lanes that part, and keep them in registers of
    the warp. All lanes call this.
    """
    return T.shfl_sync(x, 0)


@T.macro
def find_piece(heads, tile, start: "T.Ref", piece: "T.Ref"):
    """Sets the first piece of a tile, and this lane's; without heads it may be past the last.

    In a tile of heads each lane without a piece repeats what another does: idle lanes what lane 0
    does, and places of heads past the last what the tile's first head does. They write the same
    numbers to the same places, which costs no branch.
    """
    lane = T.get_thread_binding() % LANES
    if tile < heads.tiles:
        start = tile * heads.lanes
        piece = start + T.if_then_else(lane < heads.lanes, lane, 0)
        if piece >= heads.pieces:
            piece = start + T.bitwise_and(lane, heads.reach)
    else:
        start = heads.pieces + (tile - heads.tiles) * LANES
        piece = start + lane


@T.macro
def find_place(
    heads, cta, tiles, pieces, block: "T.Ref", tile: "T.Ref", start: "T.Ref", piece: "T.Ref"
):
    """Sets a CTA's block of tokens and a warp's tile, and start and piece as find_piece does.

    A lane past the last piece repeats what the tile's first does. The tile has no channels if start
    is past the last piece.
    """
    lane, warp = T.get_thread_binding() % LANES, uniform(T.get_thread_binding() // LANES)
    block = T.truncdiv(cta, tiles)
    tile = T.shift_left(cta - block * tiles, heads.wide) + T.bitwise_and(warp, heads.wide)
    find_piece(heads, tile, start, piece)
    if piece >= pieces:
        piece -= lane


@T.macro
def add_over_head(r_sums, r_total, of):
    """Sets a lane's r_total[0] to the sum over its head of r_sums[lane % 4]: see heads.cuh.

    All lanes of a warp call this. Both warps of a wide head walk the same tokens, so they meet
    equally often.
    """
    count, lane = r_sums.shape[0], T.get_thread_binding() % LANES
    r_total[0] = T.call_extern(
        "float32",
        f"qla::head_sums<{count}>",
        T.access_ptr(r_sums[0], "r", count),
        of.lanes,
        of.reach,
    )
    if of.wide != 0:
        # `uniform`, so that the compiler does not keep what follows from it in registers
        warp = uniform(T.get_thread_binding() // LANES)
        if lane < SUMS:
            of.s_pair[warp, 0, lane] = r_total[0]
        of.pair.sync(warp // 2)
        r_total[0] += of.s_pair[warp ^ 1, 0, lane % SUMS]
        of.pair.sync(warp // 2)  # before the next sums are written


def of_four(x: Any, i: int) -> Any:
    """Returns the x of lane i among the four lanes around this one."""
    return T.call_extern("float32", "qla::of_four", x, i)


@T.macro
def normalise(r_y, of):
    """Divides each row of r_y [rows, PIECE] by the norm of its head."""
    rows = r_y.shape[0]
    r_sums = T.alloc_local((rows,), "float32")
    r_total = T.alloc_local((1,), "float32")
    scale = T.alloc_var("float32")
    for i in T.unroll(rows):
        r_sums[i] = 0
        for e in T.unroll(r_y.shape[1]):
            r_sums[i] += r_y[i, e] * r_y[i, e]
    add_over_head(r_sums, r_total, of)
    r_total[0] = T.rsqrt(r_total[0] + EPSILON)
    for i in T.unroll(rows):
        scale = of_four(r_total[0], i)
        for e in T.unroll(r_y.shape[1]):
            r_y[i, e] *= scale


@T.macro
def gradients_of_heads(r_y, r_slope, r_dy, row, of):
    """Replaces dy of normalised heads, row `row` of r_dy, by dz.

    With r = (sum y^2 + EPSILON)^-1/2: dz = (r dy - r^3 (sum dy y) y) slope; slope is dy/dz of the
    activation. r_y and r_slope are [PIECE].
    """
    r_sums = T.alloc_local((2,), "float32")
    r_total = T.alloc_local((1,), "float32")
    scale, dot = T.alloc_var("float32"), T.alloc_var("float32")
    r_sums[0] = 0
    r_sums[1] = 0
    for e in T.unroll(r_y.shape[0]):
        r_sums[0] += r_y[e] * r_y[e]
        r_sums[1] += r_dy[row, e] * r_y[e]
        r_y[e] *= r_slope[e]  # now, so that fewer numbers wait for the sums
        r_dy[row, e] *= r_slope[e]
    add_over_head(r_sums, r_total, of)
    scale = T.rsqrt(of_four(r_total[0], 0) + EPSILON)
    dot = of_four(r_total[0], 1) * scale * scale
    for e in T.unroll(r_y.shape[0]):
        r_dy[row, e] = scale * (r_dy[row, e] - r_y[e] * dot)
