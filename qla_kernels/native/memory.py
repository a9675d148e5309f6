"""Which ATen operators a program repeats as fills and copies, and with which numbers."""

import torch
from torch import Tensor

# Operators that fill and that copy, and the place of the value or the source in their arguments
FILLS = {"zero_": 0, "zeros": 0, "new_zeros": 0, "zeros_like": 0}
FILLS |= {"fill_": 1, "full": 1, "new_full": 2, "full_like": 1}
COPIES = {"copy_": 1, "clone": 0, "_to_copy": 0, "to": 0}


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
        return source.is_contiguous() and to.is_contiguous() and source.shape == to.shape
    narrowed = source.dtype == torch.int64 and to.dtype == torch.int32
    return narrowed and source.dim() == 1 and to.is_contiguous()


def copy_of(to: Tensor, source: Tensor) -> tuple[int, int, int, int]:
    """Returns width, height and the pitches of a copy, as cuMemcpy2D takes them."""
    if source.dtype == to.dtype:
        size = to.numel() * to.element_size()
        return size, 1, size, size
    wide = source.element_size() * (source.stride(0) if len(source) > 1 else 1)
    return to.element_size(), len(to), to.element_size(), wide  # the low words
