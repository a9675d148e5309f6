"""`GatedRMSNorm`: both operators as one differentiable function; `normalise`, which calls it.

Autocast does not change dtypes here: it has no rule for either operator. The gradients are not
differentiable in turn; differentiating them raises Unsupported.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.norm import ops
from qla_kernels.norm.validate import OP
from qla_kernels.runtime.derivatives import refuse_second_derivative, wants_gradients


def normalise(
    x: Tensor, gate: Tensor, weight: Tensor, tables: list[Tensor], *options: float
) -> Tensor:
    """Runs a call whose arguments have been checked; `options` are the last ones of operators."""
    if not wants_gradients((x, gate, weight)):  # autograd takes time
        return ops.gated_norm_fwd.replayed(x, gate, weight, tables, *options)
    y: Tensor = GatedRMSNorm.apply(  # type: ignore[no-untyped-call]
        x, gate, weight, options, *tables
    )
    return y


class GatedRMSNorm(torch.autograd.Function):
    """Runs gated_norm_fwd, and gated_norm_bwd in the backward. Saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        options: tuple[float, ...],
        *tables: Tensor,
    ) -> Tensor:
        ctx.options, ctx.unpacked = options, None
        ctx.save_for_backward(x, gate, weight, *tables)
        return ops.gated_norm_fwd.replayed(x, gate, weight, list(tables), *options)

    @staticmethod
    @refuse_second_derivative(OP)
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, *tables = ctx.unpacked or ctx.saved_tensors
        ctx.unpacked = None
        done = ops.gated_norm_bwd.replayed(dy, x, gate, weight, tables, *ctx.options)
        return *done, None, *[None] * len(tables)


_NODE: Any = GatedRMSNorm._backward_cls


class _Packed(NamedTuple):
    """What other hooks made of a saved tensor."""

    value: Any


def without_saving(y: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns project(y), where y is a result of `normalise` in any shape of contiguous memory.

    What `project` saves of y for its backward is not kept: it is computed again from the tensors
    that the norm saves. Other saved tensors go to hooks of torch.autograd.graph that are already
    active, such as those of activation checkpointing. Without gradients, and in compiled code,
    where the compiler decides what to keep, this only calls `project`.
    """
    if torch.compiler.is_compiling() or not y.numel():
        return project(y)
    node: Any = y.grad_fn
    while node is not None and not isinstance(node, _NODE):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        return project(y)
    place = y.data_ptr(), y.numel(), y.dtype
    others = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(x: Tensor) -> Any:
        if x.is_contiguous() and place == (x.data_ptr(), x.numel(), x.dtype):
            return x.shape
        return x.detach() if others is None else _Packed(others[0](x))

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, torch.Size):
            # kept for the norm's backward: activation checkpointing hands them out only once
            node.unpacked = x, gate, weight, *tables = node.saved_tensors
            return ops.gated_norm_fwd.replayed(x, gate, weight, tables, *node.options).view(kept)
        return kept if isinstance(kept, Tensor) else others[1](kept.value)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return project(y)
