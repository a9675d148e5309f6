"""Types of tensors whose strides are known when a kernel is launched."""

from typing import Any

import qla_kernels.tile.language as T


def strided(name: str, axes: str, shape: tuple[Any, ...], dtype: str) -> Any:
    """Returns the type of a tensor with any stride along each of the axes.

    The stride along axis `token` of q is the variable `q_token`; TileLang orders a kernel's
    arguments by these names. An axis that is a number has that stride. Numbers lie packed along
    dimensions behind the last axis.

    Args:
        axes: names of the first dimensions, which blanks separate.
    """
    names = axes.split()
    if len(names) > len(shape):
        raise ValueError(
            f"tensor {name}: {len(names)} axes ({axes}); need at most one for each of its "
            f"{len(shape)} dimensions"
        )
    strides: list[Any] = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size if len(strides) == 1 else size * strides[0])
    for i, axis in enumerate(names):
        strides[i] = int(axis) if axis.isdigit() else T.dynamic(f"{name}_{axis}")
    return T.StridedTensor(shape, tuple(strides), dtype)
