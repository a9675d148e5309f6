"""The operators torch sees: schemas, shapes of the results, and where CPU tensors go.

    dualkv_fwd, dualkv_bwd   attention of packed tokens, and its gradients

`tables` describe the batch: for CPU tensors, the layout's nodes alone. Row i of q is token
i + q_shift. CPU tensors go to cpu.py, whose functions are named like the operators and imported
when one first meets a tensor. CUDA tensors have no kernels yet: `validate.refusal` says so before
an operator is called. No result shares memory with an argument.

Autograd lives above, in autograd.py. For selective activation checkpointing name the operator:
`torch.ops.qla_kernels.dualkv_fwd.default`.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCHEMAS = {
    "dualkv_fwd": """(
        Tensor q, Tensor k, Tensor v, Tensor[] tables, float scale, SymInt q_shift
    ) -> (Tensor o, Tensor lse2)""",
    "dualkv_bwd": """(
        Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, Tensor? dlse,
        Tensor[] tables, float scale, SymInt q_shift, bool deterministic
    ) -> (Tensor dq, Tensor dk, Tensor dv)""",
}


class Forward(NamedTuple):
    """Results of dualkv_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [Tq, H, D] in q's dtype
    lse2: Tensor  # [H / pack, Tq, pack] base 2, fp32: the heads of a query tile's rows together


class Backward(NamedTuple):
    """Results of dualkv_bwd, each like its input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def head_pack(num_heads: int, kv_heads: int) -> int:
    """How many query heads of one key head a tile takes: a power of two up to 8."""
    group = num_heads // kv_heads
    return next(pack for pack in (8, 4, 2, 1) if group % pack == 0)


def _on_cpu(op: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return getattr(importlib.import_module("qla_kernels.dualkv.cpu"), op)(*args)

    return run


def _fake_dualkv_fwd(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, q_shift: int
) -> Forward:
    Tq, H, _ = q.shape
    pack, wide = head_pack(H, k.shape[1]), torch.promote_types(q.dtype, torch.float32)
    return Forward(q.new_empty(q.shape), q.new_empty(H // pack, Tq, pack, dtype=wide))


def _fake_dualkv_bwd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Backward:
    return Backward(*(x.new_empty(x.shape) for x in (q, k, v)))  # empty_like would keep strides


_FAKES: dict[str, Callable[..., Any]] = {
    "dualkv_fwd": _fake_dualkv_fwd,
    "dualkv_bwd": _fake_dualkv_bwd,
}

# The strides of a call are accepted or refused when it is traced: Inductor must keep them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

LIBRARY: Any = torch.library.Library("qla_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]
for _op, _schema in SCHEMAS.items():
    LIBRARY.define(_op + _schema, tags=_TAGS)
    LIBRARY.impl(_op, _on_cpu(_op), "CPU")
    torch.library.register_fake(f"qla_kernels::{_op}", _FAKES[_op], lib=LIBRARY)

dualkv_fwd = torch.ops.qla_kernels.dualkv_fwd.default
dualkv_bwd = torch.ops.qla_kernels.dualkv_bwd.default
