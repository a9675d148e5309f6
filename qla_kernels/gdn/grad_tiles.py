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
PANEL = 64  # columns


def panels(size: int) -> tuple[int, ...]:
    """First columns of a tile's panels; as a tuple, or TileLang would make a loop of it."""
    return tuple(range(0, size, PANEL))


def put_tile(r_x: Any, tile: Any, columns: int) -> Any:
    """r_x, rounded."""
    return _call(f"put_tile<{columns // PANEL}>", r_x.data, _write(tile, CHUNK * columns))


def put_row_sums(dot: Any, out: Any) -> Any:
    return _call("put_row_sums", dot.data, _write(out, CHUNK))


def put_tile_dot(a: Any, b: Any, elements: int, factor: Any, out: Any) -> Any:
    """factor <a, b>, one part a warp."""
    tiles = _read(a, elements), _read(b, elements)
    return _call(f"put_tile_dot<{elements}>", *tiles, factor, _write(out, 4))


def correct_values(r_u: Any, v: Any, e: Any, beta: Any, V: int) -> Any:
    """W = v - e U in place of U, and beta W in place of v."""
    rows = _read(e, CHUNK), _read(beta, CHUNK)
    return _call(f"correct_values<{V // PANEL}>", r_u.data, _write(v, CHUNK * V), *rows)


def finish_values(r_y: Any, r_w: Any, y: Any, dv: Any, beta: Any, out: Any, V: int) -> Any:
    """Y, dV = beta Y, and <Y, W> of each row."""
    tiles = _write(y, CHUNK * V), _write(dv, CHUNK * V)
    rows = _read(beta, CHUNK), _write(out, CHUNK)
    return _call(f"finish_values<{V // PANEL}>", r_y.data, r_w.data, *tiles, *rows)


def add_scaled(r_sum: Any, c: int, r_x: Any, row: Any, sign: int, panel: Any, dot: Any) -> Any:
    """y = sign row x is added to the sum's panel at column c, <y, panel> to the dots."""
    scale, other = _read(row, CHUNK), _read(panel, CHUNK * PANEL)
    return _call(f"add_scaled<{c // PANEL}, {sign}>", r_sum.data, r_x.data, scale, other, dot.data)


def gated_scores(r_qk: Any, gates: Any, p: Any, scale: Any) -> Any:
    """P of gated_tiles.cuh."""
    return _call(
        "gated_scores", r_qk.data, _read(gates, 3 * CHUNK), _write(p, CHUNK * CHUNK), scale
    )


def scores_backward(r_dp: Any, gates: Any, qk: Any, scale: Any, dot: Any, columns: Any) -> Any:
    """dP0 in place of dP; the row sums of dP o P to the dots, its column sums to `columns`."""
    tiles = _read(gates, 3 * CHUNK), _read(qk, CHUNK * CHUNK)
    return _call("scores_backward", r_dp.data, *tiles, scale, dot.data, _write(columns, 4 * CHUNK))


def system_backward(r_e: Any, gates: Any, kk: Any, dot: Any, dbeta: Any, columns: Any) -> Any:
    """F in place of -E; the sums of F o K K^T like those of dP o P, and dbeta's share."""
    tiles = _read(gates, 3 * CHUNK), _read(kk, CHUNK * CHUNK)
    out = _write(dbeta, CHUNK), _write(columns, 4 * CHUNK)
    return _call("system_backward", r_e.data, *tiles, dot.data, *out)


def put_symmetric(r_f: Any, tile: Any) -> Any:
    """F + F^T, rounded."""
    return _call("put_symmetric", r_f.data, _write(tile, CHUNK * CHUNK))


def store_rows(r_x: Any, out: Any, K: int, stride: Any, rows: Any) -> Any:
    """The first `rows` rows to global memory, `stride` elements apart, rounded."""
    return _call(f"store_rows<{K // PANEL}>", r_x.data, _write(out, K), stride, rows)


def _call(name: str, *arguments: Any) -> Any:
    return T.call_extern("handle", f"qla::{name}", *arguments)


def _read(at: Any, count: int) -> Any:
    return T.access_ptr(at, "r", count)


def _write(at: Any, count: int) -> Any:
    return T.access_ptr(at, "w", count)
