"""An `Entry`: what a launch of one variant needs, as data.

`host_function.py` reads entries from TIR when kernels are built, and `pack.py` writes them for the
launcher. Numbers are expressions in postfix order: `["num_heads", "group", "*", 64, "*"]`.
"""

from collections.abc import Iterator
from typing import TypedDict

Expression = list[int | str]

OPERATORS = ("+", "-", "*", "//", ">>")
SIZE, STRIDE = "size", "stride"


class TensorEntry(TypedDict):
    name: str
    dtype: str
    sizes: list[Expression]
    strides: list[Expression]


class MapEntry(TypedDict):
    """The arguments of cuTensorMapEncodeTiled."""

    tensor: int
    dtype: int
    dims: list[Expression]
    strides: list[Expression]  # in bytes, without that of the innermost dimension
    box: list[int]
    steps: list[int]
    interleave: int
    swizzle: int
    l2: int
    fill: int


class Entry(TypedDict):
    """What a launch of one variant needs."""

    function: str
    tensors: list[TensorEntry]
    scalars: list[tuple[str, str]]  # name, dtype
    order: list[bool]  # of the launch's arguments: whether it is a tensor
    symbols: list[tuple[str, int, str, int]]  # name, and where it is read: tensor, SIZE, axis
    maps: list[MapEntry]
    arguments: list[tuple[str, Expression]]  # pointer, map, int32 or float32, and which or what
    launch: list[Expression]  # grid x, y, z, block x, y, z, bytes of dynamic shared memory
    dependent: bool  # programmatic dependent launch


def symbols_of(expression: Expression) -> Iterator[str]:
    return (x for x in expression if isinstance(x, str) and x not in OPERATORS)
