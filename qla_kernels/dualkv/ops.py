"""The operators as torch sees them: schemas, fake implementations and dispatch by device.

    dualkv_fwd, dualkv_bwd   attention of packed tokens, and its gradients

`tables` describe the batch: for CPU tensors the layout's nodes alone, for CUDA tensors the result
of `SharedLayout.prepare`. Row i of q is token i + q_shift. CPU tensors go to cpu.py and CUDA
tensors to launch.py; each has a function named like the operator, and is imported when an operator
first gets such a tensor. No result shares memory with an argument.

Autograd is in autograd.py. For selective activation checkpointing name the operator:
`torch.ops.qla_kernels.dualkv_fwd.default`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.op import define_direct
from qla_kernels.runtime.programs import Programs

SCHEMAS = {
    "dualkv_fwd": """(
        Tensor q, Tensor k, Tensor v, Tensor[] tables, float scale, SymInt q_shift
    ) -> (Tensor o, Tensor lse2)""",
    "dualkv_bwd": """(
        Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, Tensor? dlse,
        Tensor[] tables, float scale, SymInt q_shift, bool deterministic
    ) -> (Tensor dq, Tensor dk, Tensor dv)""",
}


class SharedForward(NamedTuple):
    """Results of dualkv_fwd. Where this says fp32, it is fp64 if q is fp64."""

    o: Tensor  # [Tq, H, D] in q's dtype
    lse2: Tensor  # [H, Tq] base 2, fp32

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class SharedBackward(NamedTuple):
    """Results of dualkv_bwd; each has the shape and dtype of its input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


def _fake_dualkv_fwd(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, q_shift: int
) -> SharedForward:
    Tq, H, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return SharedForward(q.new_empty(q.shape), q.new_empty(H, Tq, dtype=wide))


def _fake_dualkv_bwd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> SharedBackward:
    return SharedBackward(
        *(x.new_empty(x.shape) for x in (q, k, v))
    )  # empty_like would keep strides


HOMES = "qla_kernels.dualkv.launch", "qla_kernels.dualkv.cpu"  # for CUDA and CPU tensors

# As this package calls them
dualkv_fwd = define_direct("dualkv_fwd", SCHEMAS["dualkv_fwd"], _fake_dualkv_fwd, *HOMES)
dualkv_bwd = define_direct("dualkv_bwd", SCHEMAS["dualkv_bwd"], _fake_dualkv_bwd, *HOMES)

_FORWARDS, _BACKWARDS = Programs("dualkv_fwd"), Programs("dualkv_bwd")


def forward(*arguments: Any) -> SharedForward:
    """Runs dualkv_fwd, replayed if possible."""
    return _FORWARDS.run(
        lambda given: SharedForward(*dualkv_fwd(*given)), (arguments,), SharedForward
    )


def backward(*arguments: Any) -> SharedBackward:
    """Runs dualkv_bwd, replayed if possible."""
    return _BACKWARDS.run(
        lambda given: SharedBackward(*dualkv_bwd(*given)), (arguments,), SharedBackward
    )
