"""The operators on CPU tensors: the reference, with the operators' arguments and results.

Autocast is off inside: the caller's precision is the precision of every product.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.dualkv.ops import Backward, Forward, head_pack


@torch.no_grad()
def dualkv_fwd(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, q_shift: int
) -> Forward:
    (nodes,) = tables
    with torch.autocast("cpu", enabled=False):
        done = reference().dualkv.by_nodes(q, k, v, nodes, scale, q_shift)
    lse2 = rearrange(done.lse, "(s p) t -> s t p", p=head_pack(q.shape[1], k.shape[1]))
    return Forward(done.o, lse2.contiguous() / math.log(2))


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
) -> Backward:
    (nodes,) = tables
    lse = rearrange(lse2, "s t p -> (s p) t") * math.log(2)
    with torch.autocast("cpu", enabled=False):
        grads = reference().dualkv.by_nodes_backward(
            do, q, k, v, o, lse, dlse, nodes, scale, q_shift
        )
    return Backward(*(x.contiguous() for x in grads))
