"""Calls of wide_grads' own CUDA functions: see part_tiles.cuh.

It shares the others with chunk_grads: see chunk_grads/tiles.py. All 128 threads of a warpgroup make
each call.
"""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chunk_grads.tiles import SOURCE as GRAD_TILES
from qla_kernels.gdn.kernels.chunk_grads.tiles import TILE_ELEMENTS
from qla_kernels.tile.constants import CHUNK

SOURCE = GRAD_TILES + Path(__file__).with_suffix(".cuh").read_text()


def add_twice_scaled(
    r_sum: Any, r_x: Any, row: Any, other_row: Any, panel: Any, dot: Any, other_dot: Any
) -> Any:
    """Adds y = row x to r_sum; writes <y, panel> of each row to `dot`.

    `other_dot` receives the same with `other_row` in place of `row`.
    """
    return T.call_extern(
        "handle",
        "qla::add_twice_scaled",
        r_sum.data,
        r_x.data,
        T.access_ptr(row, "r", CHUNK),
        T.access_ptr(other_row, "r", CHUNK),
        T.access_ptr(panel, "r", TILE_ELEMENTS),
        T.access_ptr(dot, "w", CHUNK),
        T.access_ptr(other_dot, "w", CHUNK),
    )


def put_row_dots(y: Any, v: Any, dot: Any, half: Any) -> Any:
    """Writes <Y, v> of rows 32 half to 32 half + 31."""
    return T.call_extern(
        "handle",
        "qla::put_row_dots",
        T.access_ptr(y, "r", TILE_ELEMENTS),
        T.access_ptr(v, "r", TILE_ELEMENTS),
        T.access_ptr(dot, "w", CHUNK),
        half,
    )


def park(r_x: Any, tiles: Any) -> Any:
    """Puts r_x [64, 64] in fp32 into the memory of two tiles of 16 bits, for `take_back`."""
    tiles = T.access_ptr(tiles, "w", 2 * TILE_ELEMENTS)
    return T.call_extern("handle", "qla::park", r_x.data, tiles)


def take_back(r_x: Any, tiles: Any) -> Any:
    tiles = T.access_ptr(tiles, "r", 2 * TILE_ELEMENTS)
    return T.call_extern("handle", "qla::take_back", r_x.data, tiles)
