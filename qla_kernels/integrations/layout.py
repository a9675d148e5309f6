"""`readable`: tensors as our kernels read them, where another library decides their strides."""

from torch import Tensor


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, each as a contiguous copy if its last stride is not 1.

    A convolution returns such tensors: tokens, not channels, are adjacent. Our public functions
    refuse them, so that their caller copies; here the caller is another library.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
