"""Tensors as our kernels read them, where another library decides how they lie."""

from torch import Tensor


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same; copies of those that lie by channel, as a convolution leaves them.

    Our functions refuse these, for their caller to copy; here the caller is someone else's code.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
