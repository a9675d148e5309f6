"""Which fills and copies a program repeats, and with which numbers."""

import torch
from torch import Tensor

LEAST_ROW = 64  # bytes; copies of shorter rows are left to torch
MOST_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH


def word(value: float, dtype: torch.dtype) -> int | None:
    """Returns the 32 bits that memory is filled with for a value; None if they do not suffice."""
    if value == 0:
        return 0
    if dtype.itemsize != 4:
        return None
    return int(torch.full((), value, dtype=dtype, device="cpu").view(torch.int32)) & 0xFFFFFFFF


def can_copy(source: Tensor, to: Tensor) -> bool:
    """Returns whether `copy_of` describes the copy."""
    if source.dtype == to.dtype:
        return source.shape == to.shape and _rows(to, source) is not None
    narrowed = source.dtype == torch.int64 and to.dtype == torch.int32
    return narrowed and source.dim() == 1 and to.is_contiguous()


def copy_of(to: Tensor, source: Tensor) -> tuple[int, int, int, int]:
    """Returns width, height and the pitches of a copy, as cuMemcpy2D takes them."""
    if source.dtype == to.dtype:
        rows = _rows(to, source)
        assert rows is not None, "can_copy says so"
        return rows
    wide = source.element_size() * (source.stride(0) if len(source) > 1 else 1)
    return to.element_size(), len(to), to.element_size(), wide  # the low words


def _rows(to: Tensor, source: Tensor) -> tuple[int, int, int, int] | None:
    """Returns a copy of rows, each without gaps and in the same order in both; None if it is none.

    The sizes are equal. If neither has gaps between rows, there is one.
    """
    size = to.element_size()
    if to.is_contiguous() and source.is_contiguous():
        return to.numel() * size, 1, to.numel() * size, to.numel() * size
    axes = sorted(x for x in zip(to.stride(), source.stride(), to.shape, strict=True) if x[2] != 1)
    groups = [(1, 1, 1)]  # distances in both, and how many
    for a, b, n in axes:
        last_a, last_b, before = groups[-1]
        if a == last_a * before and b == last_b * before:
            groups[-1] = last_a, last_b, before * n
        else:
            groups.append((a, b, n))
    (_, _, numbers), *others = groups
    if len(others) > 1 or (others and numbers * size < LEAST_ROW):
        return None
    a, b, height = others[0] if others else (numbers, numbers, 1)
    if min(a, b) < numbers or max(a, b) * size > MOST_PITCH:
        return None
    return numbers * size, height, a * size, b * size
