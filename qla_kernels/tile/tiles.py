"""Allocates a schedule's tiles of shared memory in one call."""

from typing import Any

import qla_kernels.tile.language as T
from qla_kernels.tile.language import make_full_bank_swizzled_layout
from qla_kernels.tile.record import Record, named
from qla_kernels.tile.schedule import Schedule


def tiles(plan: Schedule) -> Any:
    """Returns a record with each tile of `plan.tiles`; a tile q is `s_q` in generated code."""
    buffers = {
        name: named(f"s_{name}", T.alloc_shared(tile.shape, tile.dtype))
        for name, tile in plan.tiles.items()
    }
    swizzled = [buffers[name] for name, tile in plan.tiles.items() if tile.swizzled]
    if swizzled:
        T.annotate_layout({tile: make_full_bank_swizzled_layout(tile) for tile in swizzled})
    return Record(**buffers)
