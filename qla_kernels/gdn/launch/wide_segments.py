"""Computes the state that enters each segment at K = 256, from the maps of the segments before it.

`segments.cut` cuts; a segment is warm for a head if a window of chunks at its end determines the
state that leaves it, and cold if its map is needed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import wide_map as wide_map_kernel
from qla_kernels.gdn.kernels import wide_scan as wide_scan_kernel
from qla_kernels.gdn.kernels import wide_windows as wide_windows_kernel
from qla_kernels.gdn.launch.segments import Segments
from qla_kernels.gdn.launch.tensors import no_state, tokens
from qla_kernels.gdn.times import map_tile
from qla_kernels.runtime import jit
from qla_kernels.runtime.sm90 import dtype_name
from qla_kernels.tile.constants import CHUNK


class WideMaps(NamedTuple):
    """The affine maps of the segments at K = 256, as `segments.Maps` are of others."""

    left: Tensor  # [capacity, HV, V, K] fp32: row p + 1 has b of segment p, transposed
    M: Tensor  # [capacity, HV, K, K] fp32: M^T of segments that are cold and no sequence's first
    windows: Tensor  # [capacity, HV] int32 of `wide_windows`


def wide_windows(
    k: Tensor, g_cum: Tensor, beta: Tensor, segments: Segments, warm_log_bound: float
) -> Tensor:
    """Returns the chunks at each segment's end that determine its end state, [capacity, HV] int32.

    It is 0 for cold heads, and for a sequence's last segment.
    """
    (B, T), HV = k.shape[:2], g_cum.shape[-1]
    windows = g_cum.new_empty(segments.capacity, HV, dtype=torch.int32)
    g_cum, beta = g_cum.view(B * T, HV), beta.view(B * T, HV)
    is_16 = beta.dtype != torch.float32
    jit.compile(wide_windows_kernel, wide_windows_kernel.Variant(dtype_name(k.dtype), k.shape[-1]))(
        tokens(k),
        g_cum,
        g_cum if is_16 else beta,
        beta if is_16 else k.new_empty(0, HV),
        segments.bounds,
        segments.ends_of,
        windows,
        warm_log_bound,
        int(is_16),
    )
    return windows


def wide_maps(
    k: Tensor,
    v: Tensor,
    A: Tensor,
    gates: Tensor,
    first_chunk: Tensor,
    h0: Tensor | None,
    segments: Segments,
    windows: Tensor,
) -> WideMaps:
    """Returns the map of each segment but a sequence's last one; other rows are not written.

    Args:
        k, v, A, h0: as for `segments.maps`.
        gates: from `solve_score`.
        first_chunk: [capacity + 1], the number of each segment's first chunk in `gates`.
    """
    (B, T, HV, V), K = v.shape, k.shape[-1]
    starts, maps = (gates.new_empty(segments.capacity, HV, columns, K) for columns in (V, K))
    tile_v = map_tile(V)
    variant = wide_map_kernel.Variant(dtype_name(k.dtype), K, tile_v)
    jit.compile(wide_map_kernel, variant)(
        tokens(k),
        tokens(v, tile_v),
        A.view(B * T, HV, CHUNK),
        gates,
        first_chunk,
        segments.bounds,
        segments.starts_of,
        segments.ends_of,
        segments.heads,
        windows,
        no_state(gates.view(-1, HV), K, V) if h0 is None else h0,
        starts.mT,
        maps.mT,
        int(h0 is not None),
    )
    return WideMaps(starts, maps, windows)


def wide_scan(found: WideMaps, h0: Tensor | None, first_segment: Tensor) -> Tensor:
    """Folds the maps into the state that enters each segment. Overwrites found.left.

    Returns:
        [capacity, HV, K, V] fp32, a view of found.left; rows of no segment are not written.
    """
    starts, maps, windows = found
    V, K = starts.shape[2:]
    jit.compile(wide_scan_kernel, wide_scan_kernel.Variant(K))(
        first_segment,
        no_state(starts[0, :, 0, 0], K, V) if h0 is None else h0,
        starts,
        torch.unflatten(maps, -1, (-1, wide_scan_kernel.FOLD_ROWS)),
        windows,
        int(h0 is not None),
    )
    return starts.mT
