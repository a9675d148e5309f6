"""Loops that the compiler leaves as they are written."""

from typing import Any

import tilelang.language as T


def rolled(*bounds: Any) -> Any:
    """`T.serial`, but nvcc does not unroll it.

    For roles that mostly wait: unrolling gains nothing there, and costs registers, of which such a
    role has few, and instruction cache, which all roles share.
    """
    return T.unroll(*bounds, unroll_factor=1)
