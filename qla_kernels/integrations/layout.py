"""`readable`: makes strides of another library's tensors readable for our kernels."""

from torch import Tensor


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v; a tensor whose last stride is not 1 is copied to a contiguous tensor.

    Convolutions return such tensors. Our public functions refuse them and leave the copy to the
    caller; here the caller is another library.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
