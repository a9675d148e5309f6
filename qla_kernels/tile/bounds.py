"""Clamps numbers that kernels read from tables, so that accesses stay inside the tensors.

A kernel cannot verify the tables that it reads: a buffer of a CUDA graph may be stale, and an index
may come from any caller. Therefore each number that becomes an address or a trip count is clamped
once, where it is read, and all roles use the same clamped number. Wrong contents then give wrong
results, but no access outside a tensor, and no role that waits for another role forever. TMA stops
at a tensor's ends by itself.
"""

from typing import Any

import qla_kernels.tile.language as T


def clamped(x: Any, low: Any, high: Any) -> Any:
    """Returns x limited to low <= x <= high, and `low` if high < low."""
    return T.max(T.min(x, high), low)
