"""Gradients of a chunk from wgmma accumulators, as CUDA: see tiles.cuh for what each does.

Fragments and local arrays are given as they are, shared memory as the first element to work on. All
128 threads of a warpgroup call; each function returns the operation, which TileLang's builder then
places where the function was called.
"""

from pathlib import Path
from typing import Any

import tilelang.language as T

from qla_kernels.gdn.kernels.chain.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.tile.constants import CHUNK

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
TILE = CHUNK * 64  # elements of a tile of 64 columns


def put_tile(r_x: Any, tile: Any) -> Any:
    """r_x, rounded."""
    return _call("put_tile", r_x.data, _write(tile, TILE))


def put_tiles(r_x: Any, r_y: Any, tiles: Any) -> Any:
    """r_x and r_y, rounded, one behind the other."""
    return _call("put_tiles", r_x.data, r_y.data, _write(tiles, 2 * TILE))


def tile_dot(r_dot: Any, a: Any, b: Any, elements: int, part: Any) -> Any:
    """<a, b> of part number `part`, `elements` long: a summand in each thread."""
    tiles = _read(a, elements), _read(b, elements)
    return _call(f"tile_dot<{elements}>", r_dot.data, *tiles, part)


def put_number(r_x: Any, factor: Any, out: Any) -> Any:
    """factor times the sum of r_x over the threads: one number a warp."""
    return _call("put_number", r_x.data, factor, _write(out, 4))


def scale_rows(r_x: Any, row: Any) -> Any:
    """row x in place."""
    return _call("scale_rows", r_x.data, _read(row, CHUNK))


def correct_values(r_u: Any, v: Any, e: Any, beta: Any) -> Any:
    """W = v - e U in place of U, and beta W in place of v."""
    return _call("correct_values", r_u.data, _write(v, TILE), _read(e, CHUNK), _read(beta, CHUNK))


def finish_values(r_y: Any, r_w: Any, y: Any, dv: Any, beta: Any, out: Any) -> Any:
    """Y, dV = beta Y, and <Y, W> of each row."""
    tiles = _write(y, TILE), _write(dv, TILE)
    return _call(
        "finish_values", r_y.data, r_w.data, *tiles, _read(beta, CHUNK), _write(out, CHUNK)
    )


def add_scaled(r_sum: Any, r_x: Any, row: Any, panel: Any, dot: Any) -> Any:
    """y = row x is added to r_sum; <y, panel> of each row."""
    rows = _read(row, CHUNK), _read(panel, TILE), _write(dot, CHUNK)
    return _call("add_scaled", r_sum.data, r_x.data, *rows)


def decay_scores(r_x: Any, gates: Any, diagonal: Any) -> Any:
    """G o r_x in place: below the diagonal and, if `diagonal`, on it; 0 above. `gates`: gamma and
    the falls.
    """
    return _call("decay_scores", r_x.data, _read(gates, 2 * CHUNK), diagonal)


def add_scores(r_dp0: Any, r_f: Any, r_x: Any, system: Any, scale: Any, beta: Any) -> Any:
    """y = scale x is added to r_dp0 or, for the system, y = -beta x to r_f."""
    registers = r_dp0.data, r_f.data, r_x.data
    return _call("add_scores", *registers, system, scale, _read(beta, CHUNK))


def sum_scores(
    r_x: Any, r_other: Any, system: Any, scale: Any, beta: Any, rows: Any, plain: Any, columns: Any
) -> Any:
    """Below the diagonal, row and column sums of y o other, y as above; row sums of x o other."""
    out = _write(rows, CHUNK), _write(plain, CHUNK), _write(columns, 4 * CHUNK)
    return _call("sum_scores", r_x.data, r_other.data, system, scale, _read(beta, CHUNK), *out)


def store_rows(tile: Any, x: Any, size: int, first: Any, step: Any, rows: Any) -> Any:
    """A tile's rows to global memory: `rows` of them, first, first + step, .. of those that lie
    `size` elements apart from x on."""
    return _call(f"store_rows<{size}>", _read(tile, TILE), _write(x, 64), first, step, rows)


def _call(name: str, *arguments: Any) -> Any:
    return T.call_extern("handle", f"qla::{name}", *arguments)


def _read(at: Any, count: int) -> Any:
    return T.access_ptr(at, "r", count)


def _write(at: Any, count: int) -> Any:
    return T.access_ptr(at, "w", count)
