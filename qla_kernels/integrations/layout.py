"""`readable`: copies tensors of another library if our kernels cannot read their strides."""

from torch import Tensor


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, each copied to a contiguous tensor if its last stride is not 1.

    For calls from other libraries, such as after torch's convolution, whose results have such
    strides: this package's kernels cannot read them, and the caller cannot change them.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v
