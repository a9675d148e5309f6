"""The operators on CPU tensors: calls the reference with the operators' arguments and results.

Autocast is disabled inside, so that it does not lower the precision of the reference's products.
"""

import math

import torch
from torch import Tensor

from qla_kernels.dualkv.ops import SharedBackward, SharedForward
from qla_kernels.runtime.cpu import reference


@torch.no_grad()
def dualkv_fwd(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, q_shift: int
) -> SharedForward:
    """Returns o and the base-2 lse of q's rows, from the reference."""
    (nodes,) = tables
    with torch.autocast("cpu", enabled=False):
        done = reference().dualkv.by_nodes(q, k, v, nodes, scale, q_shift)
    return SharedForward(done.o, done.lse.contiguous() / math.log(2))


@torch.no_grad()
def dualkv_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    dlse: Tensor | None,
    tables: list[Tensor],
    scale: float,
    q_shift: int,
    deterministic: bool,  # it always is
) -> SharedBackward:
    """Returns dq, dk and dv, contiguous, from the reference; always deterministic."""
    (nodes,) = tables
    with torch.autocast("cpu", enabled=False):
        grads = reference().dualkv.by_nodes_backward(
            do, q, k, v, o, lse2 * math.log(2), dlse, nodes, scale, q_shift
        )
    return SharedBackward(*(x.contiguous() for x in grads))
