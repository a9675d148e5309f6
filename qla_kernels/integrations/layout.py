"""`readable`: copies tensors of another library if our kernels cannot read their strides."""

from torch import Tensor


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, each copied to a contiguous tensor if its last stride is not 1.

    torch's convolutions return such tensors. Our public functions refuse them, so that a caller
    notices the copy; a caller in another library cannot act on that.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
