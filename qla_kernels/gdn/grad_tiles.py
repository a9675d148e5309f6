"""Gradients of a chunk from wgmma accumulators, as CUDA: see grad_tiles.cuh for what each does.

Fragments and local arrays are given as they are, shared memory as the first element to work on. All
128 threads of a warpgroup call; each function returns the operation, which TileLang's builder then
places where the function was called.
"""

from pathlib import Path
from typing import Any

import tilelang.language as T

from qla_kernels.gdn.gated_tiles import SOURCE as GATED_TILES
from qla_kernels.tile.math import CHUNK

SOURCE = GATED_TILES + Path(__file__).with_suffix(".cuh").read_text()
TILE = CHUNK * 64  # elements of a tile of 64 columns


def put_tile(r_x: Any, tile: Any) -> Any:
    """r_x, rounded."""
    return _call("put_tile", r_x.data, _write(tile, TILE))


def put_tiles(r_x: Any, r_y: Any, tiles: Any) -> Any:
    """r_x and r_y, rounded, one behind the other."""
    return _call("put_tiles", r_x.data, r_y.data, _write(tiles, 2 * TILE))


def put_tile_dot(a: Any, b: Any, elements: int, part: Any, factor: Any, out: Any) -> Any:
    """factor <a, b> of part number `part`, `elements` long: one number a warp."""
    tiles = _read(a, elements), _read(b, elements)
    return _call(f"put_tile_dot<{elements}>", *tiles, part, factor, _write(out, 4))


def correct_values(r_u: Any, v: Any, e: Any, beta: Any) -> Any:
    """W = v - e U in place of U, and beta W in place of v."""
    return _call("correct_values", r_u.data, _write(v, TILE), _read(e, CHUNK), _read(beta, CHUNK))


def finish_values(r_y: Any, r_w: Any, y: Any, dv: Any, beta: Any, out: Any) -> Any:
    """Y, dV = beta Y, and <Y, W> of each row."""
    tiles = _write(y, TILE), _write(dv, TILE)
    return _call(
        "finish_values", r_y.data, r_w.data, *tiles, _read(beta, CHUNK), _write(out, CHUNK)
    )


def add_scaled(r_0: Any, r_1: Any, r_x: Any, which: Any, row: Any, panel: Any, dot: Any) -> Any:
    """y = row x is added to r_0 or, where `which` is not 0, to r_1; <y, panel> of each row."""
    rows = _read(row, CHUNK), _read(panel, TILE), _write(dot, CHUNK)
    return _call("add_scaled", r_0.data, r_1.data, r_x.data, which, *rows)


def decay_scores(r_x: Any, gamma: Any, diagonal: Any) -> Any:
    """G o r_x in place: below the diagonal and, if `diagonal`, on it; 0 above."""
    return _call("decay_scores", r_x.data, _read(gamma, CHUNK), diagonal)


def scores_backward(
    r_dp0: Any, r_f: Any, r_x: Any, r_other: Any, system: Any, scale: Any, beta: Any,
    rows: Any, plain: Any, columns: Any,
) -> Any:  # fmt: skip
    """y = scale x is added to r_dp0 or, for the system, y = -beta x to r_f. Below the diagonal, row
    and column sums of y o other; row sums of x o other."""
    registers = r_dp0.data, r_f.data, r_x.data, r_other.data
    out = _write(rows, CHUNK), _write(plain, CHUNK), _write(columns, 4 * CHUNK)
    return _call("scores_backward", *registers, system, scale, _read(beta, CHUNK), *out)


def store_rows(r_x: Any, r_y: Any, x: Any, y: Any, stride: Any, rows: Any) -> Any:
    """The first `rows` rows of both to global memory, `stride` elements apart, rounded."""
    out = _write(x, 64), _write(y, 64)
    return _call("store_rows", r_x.data, r_y.data, *out, stride, rows)


def _call(name: str, *arguments: Any) -> Any:
    return T.call_extern("handle", f"qla::{name}", *arguments)


def _read(at: Any, count: int) -> Any:
    return T.access_ptr(at, "r", count)


def _write(at: Any, count: int) -> Any:
    return T.access_ptr(at, "w", count)
