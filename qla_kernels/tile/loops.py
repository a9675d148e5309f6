"""Defines `rolled`, a loop that the compiler does not unroll."""

from typing import Any

import qla_kernels.tile.language as T


def rolled(*bounds: Any) -> Any:
    """Returns a loop like `T.serial` that nvcc does not unroll.

    It is meant for roles that mostly wait. There unrolling gains nothing. It costs registers, of
    which such a role has few, and instruction cache, which all roles share.
    """
    return T.unroll(*bounds, unroll_factor=1)
