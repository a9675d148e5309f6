"""Keeps arithmetic in front of a wait for wgmma.

ptxas moves a wait for a wgmma above arithmetic that does not need its result. The arithmetic, such
as the exponentials of a softmax, then no longer runs while the tensor cores do. ptxas moves nothing
across a side effect that depends on the data, so `pin` adds one that never happens: it compares the
result of the arithmetic with one of the 2^32 bit patterns, a NaN that arithmetic does not produce,
and executes a fence if any lane of the warp has it. The fence would do no harm. (With a trap
instead of the fence, ptxas would insert a wait of its own: C7517.)

The comparison has to be a vote of the warp: with a branch in each thread, ptxas would make wgmma
synchronous in some kernels (C7518). A comparison such as `sum < 0` does not work either, because
ptxas knows that exp2 is not negative.
"""

from typing import Any

import qla_kernels.tile.language as T

SOURCE = r"""
namespace qla {
__device__ __forceinline__ void pin(float x) {
  if (__any_sync(~0u, __float_as_uint(x) == 0x7fedcba9u)) __threadfence_block();
}
}  // namespace qla
"""


def pin(x: Any) -> Any:
    """Keeps the arithmetic that computes x in front of a following wait for wgmma.

    The kernel has to import `SOURCE`.
    """
    return T.call_extern("handle", "qla::pin", x)
