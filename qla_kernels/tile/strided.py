"""Types of tensors whose strides are known when a kernel is launched."""

from typing import Any

import qla_kernels.tile.language as T


def strided(name: str, axes: str, shape: tuple[Any, ...], dtype: str) -> Any:
    """Returns the type of a tensor with any stride along each of the axes.

    The stride along axis `token` of q is the variable `q_token`; TileLang orders a kernel's
    arguments by these names. An axis that is a number has that stride. Numbers are adjacent along
    the last dimension if it has no axis.

    Args:
        axes: names of the dimensions, or of all but the last one, which blanks separate.
    """
    strides = [
        int(axis) if axis.isdigit() else T.dynamic(f"{name}_{axis}") for axis in axes.split()
    ]
    if len(shape) - len(strides) not in (0, 1):
        raise ValueError(
            f"tensor {name}: {len(strides)} axes ({axes}) of {len(shape)} dimensions; need a name "
            "for each dimension, or for all but the last"
        )
    return T.StridedTensor(shape, (*strides, 1)[: len(shape)], dtype)
