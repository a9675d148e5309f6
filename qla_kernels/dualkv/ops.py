"""The operators: their signatures, and what runs CPU tensors, which is the reference.

    dualkv_fwd, dualkv_bwd   attention of packed tokens, and its gradients

`tables` describe the batch: for CPU tensors the layout's nodes alone, for CUDA tensors the result
of `SharedLayout.prepare`. Row i of q is token i + q_shift. CUDA
tensors go to launch.py. No result shares memory with an argument.

Autograd is in autograd.py. For selective activation checkpointing name the operator:
`torch.ops.qla_kernels.dualkv_fwd.default`.
"""

import math
from typing import Annotated, NamedTuple

from torch import Tensor

from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import SymInt, op

LAUNCHES = "qla_kernels.dualkv.launch"


class SharedForward(NamedTuple):
    """Results of dualkv_fwd."""

    o: Annotated[Tensor, "like q"]
    lse2: Annotated[Tensor, "[H, Tq] wide q"]  # base 2


class SharedBackward(NamedTuple):
    """Results of dualkv_bwd, all contiguous."""

    dq: Annotated[Tensor, "like q"]
    dk: Annotated[Tensor, "like k"]
    dv: Annotated[Tensor, "like v"]


@op(LAUNCHES)
def dualkv_fwd(
    q: Annotated[Tensor, "[Tq, H, D]"],
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    scale: float,
    q_shift: SymInt,
) -> SharedForward:
    """Returns o and the base-2 lse of q's rows, from the reference."""
    (nodes,) = tables
    done = reference().dualkv.by_nodes(q, k, v, nodes, scale, q_shift)
    return SharedForward(done.o, done.lse.contiguous() / math.log(2))


@op(LAUNCHES)
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
    q_shift: SymInt,
    deterministic: bool,  # it always is
) -> SharedBackward:
    """Returns dq, dk and dv, contiguous, from the reference; always deterministic."""
    (nodes,) = tables
    grads = reference().dualkv.by_nodes_backward(
        do, q, k, v, o, lse2 * math.log(2), dlse, nodes, scale, q_shift
    )
    return SharedBackward(*(x.contiguous() for x in grads))
