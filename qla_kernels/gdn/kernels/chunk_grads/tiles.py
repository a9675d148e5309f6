"""Calls of the CUDA functions that make a chunk's gradients from wgmma accumulators: see tiles.cuh.

Arguments are fragments, local arrays, and the first element to use in shared memory. All 128
threads of a warpgroup make each call. Each function returns the operation, which TileLang's builder
places where the function was called.
"""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.tile.constants import CHUNK

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
TILE_ELEMENTS = CHUNK * 64  # elements of a tile with 64 columns


def put_tile(r_x: Any, tile: Any) -> Any:
    """Writes r_x, rounded, to a tile."""
    return _call("put_tile", r_x.data, _write(tile, TILE_ELEMENTS))


def put_tiles(r_x: Any, r_y: Any, tiles: Any) -> Any:
    """Writes r_x and r_y, rounded, to two consecutive tiles."""
    return _call("put_tiles", r_x.data, r_y.data, _write(tiles, 2 * TILE_ELEMENTS))


def tile_dot(r_dot: Any, a: Any, b: Any, elements: int, part: Any) -> Any:
    """Sets r_dot to this thread's summand of <a, b>, over part number `part` of `elements` each."""
    tiles = _read(a, elements), _read(b, elements)
    return _call(f"tile_dot<{elements}>", r_dot.data, *tiles, part)


def put_number(r_x: Any, factor: Any, out: Any) -> Any:
    """Writes factor times the sum of r_x over the threads of a warp: one number for each warp."""
    return _call("put_number", r_x.data, factor, _write(out, 4))


def scale_rows(r_x: Any, row: Any) -> Any:
    """Multiplies each row of r_x by its number in `row`, in place."""
    return _call("scale_rows", r_x.data, _read(row, CHUNK))


def correct_values(r_u: Any, v: Any, e: Any, beta: Any) -> Any:
    """Replaces U in r_u by W = v - e U, and v by beta W."""
    return _call(
        "correct_values", r_u.data, _write(v, TILE_ELEMENTS), _read(e, CHUNK), _read(beta, CHUNK)
    )


def finish_values(r_y: Any, r_w: Any, y: Any, dv: Any, beta: Any, out: Any) -> Any:
    """Writes Y, dV = beta Y, and <Y, W> of each row."""
    tiles = _write(y, TILE_ELEMENTS), _write(dv, TILE_ELEMENTS)
    return _call(
        "finish_values", r_y.data, r_w.data, *tiles, _read(beta, CHUNK), _write(out, CHUNK)
    )


def add_scaled(r_sum: Any, r_x: Any, row: Any, panel: Any, dot: Any) -> Any:
    """Adds y = row x to r_sum, and writes <y, panel> of each row to `dot`."""
    rows = _read(row, CHUNK), _read(panel, TILE_ELEMENTS), _write(dot, CHUNK)
    return _call("add_scaled", r_sum.data, r_x.data, *rows)


def decay_scores(r_x: Any, gates: Any, diagonal: Any) -> Any:
    """Replaces r_x by G o r_x below the diagonal and, if `diagonal`, on it; by 0 elsewhere.

    `gates` are the first three rows of a gate slot: gamma, beta, decay to block end.
    """
    return _call("decay_scores", r_x.data, _read(gates, 3 * CHUNK), diagonal)


def add_scores(r_dp0: Any, r_f: Any, r_x: Any, system: Any, scale: Any, beta: Any) -> Any:
    """Adds scale x to r_dp0 or, if `system`, -beta x to r_f."""
    registers = r_dp0.data, r_f.data, r_x.data
    return _call("add_scores", *registers, system, scale, _read(beta, CHUNK))


def sum_scores(
    r_x: Any, r_other: Any, system: Any, scale: Any, beta: Any, rows: Any, plain: Any, columns: Any
) -> Any:
    """Writes sums over the part below the diagonal.

    These are row and column sums of y o other, and row sums of x o other; y is scale x or, if
    `system`, -beta x, as in `add_scores`.
    """
    out = _write(rows, CHUNK), _write(plain, CHUNK), _write(columns, 4 * CHUNK)
    return _call("sum_scores", r_x.data, r_other.data, system, scale, _read(beta, CHUNK), *out)


def store_rows(tile: Any, x: Any, size: Any, column: Any, first: Any, step: Any, rows: Any) -> Any:
    """Writes `rows` rows of a tile to global memory, to rows first, first + step, ...

    Rows of global memory have `size` elements and lie end to end; x is element `column` of the
    first one. What a tile has past their end is not written.
    """
    at = _read(tile, TILE_ELEMENTS), _write(x, 64)
    return _call("store_rows", *at, size, size - column, first, step, rows)


def clear_piece(x: Any) -> Any:
    """Writes 0 to 8 elements of global memory, of rows of any number of pieces."""
    return _call("clear_piece", _write(x, 8))


def _call(name: str, *arguments: Any) -> Any:
    return T.call_extern("handle", f"qla::{name}", *arguments)


def _read(at: Any, count: int) -> Any:
    return T.access_ptr(at, "r", count)


def _write(at: Any, count: int) -> Any:
    return T.access_ptr(at, "w", count)
