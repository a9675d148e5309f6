"""Keeping arithmetic in front of a wait for wgmma.

ptxas lifts a wait for a wgmma above arithmetic that does not need its result, and with it all hope
that the arithmetic runs while the tensor cores do: of a softmax's exponentials none stays. It moves
nothing across a side effect that depends on the data. So the arithmetic's result is compared with
one NaN of 2^32 bit patterns, one that no arithmetic gives, and where a lane had it the warp would
pass a fence, which does no harm. (After a trap, ptxas would put a wait of its own: C7517.)

The vote is essential: by a branch of each thread, ptxas would give up the asynchrony of wgmma in
some kernels (C7518). A comparison such as `sum < 0` is none: ptxas knows that exp2 is not negative.
"""

from typing import Any

import tilelang.language as T

SOURCE = r"""
namespace qla {
__device__ __forceinline__ void pin(float x) {
  if (__any_sync(~0u, __float_as_uint(x) == 0x7fedcba9u)) __threadfence_block();
}
}  // namespace qla
"""


def pin(x: Any) -> Any:
    """What x is computed from stays in front of what follows. A kernel imports `SOURCE`."""
    return T.call_extern("handle", "qla::pin", x)
