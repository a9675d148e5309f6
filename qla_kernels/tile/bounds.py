"""Keeping what a table says inside the tensors that it is about.

A kernel cannot ask who made a table that it reads: the buffer of a CUDA graph may be stale, and an
index may be anybody's. Each number that becomes an address or a trip count is clamped once, where
it is read, and all roles go on from the same clamped numbers: of wrong contents come wrong results
then, and no access outside a tensor, and no role that waits for one that does not come. TMA stops
at a tensor's ends by itself.
"""

from typing import Any

import tilelang.language as T


def clamped(x: Any, low: Any, high: Any) -> Any:
    """`low` where there is nothing between the two."""
    return T.max(T.min(x, high), low)
