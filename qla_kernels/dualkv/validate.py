"""Checks of a call: `refusal`, and the checks that every implementation shares.

    check_tensors   raises ValueError if the call is malformed, on every device
    refusal         returns the text of an Unsupported if a well-formed call cannot be run

Both decide from shapes, dtypes, devices, strides, tangents and `scale`; they read no contents of
q, k and v. `check_contents` reads the layout's values; it runs only under QLA_CHECK=1.
"""

from typing import Any

from torch import Tensor

from qla_kernels.dualkv.plan import SharedLayout, check_nodes, check_tout
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.runtime import device
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import FLOATS, Signature
from qla_kernels.runtime.sm90 import (
    DTYPES,
    Reason,
    dtype_name,
    one_of,
    refused_anywhere,
    refused_device,
    refused_head_size,
    refused_strides,
)

OP = "shared_prefix_attention"

ROWS = "pass one row for each packed token, x[0] of a batch of 1, and one head size"
CALL = Signature(
    "q [Tq, H+, D+]; k [T, Hk+, D]; v [T, Hk, D]; layout [T]", "T Tq", q=ROWS, k=ROWS, v=ROWS
)
NUMBERS = (int, float)
ELSEWHERE = "use torch's flex_attention with the mask k <= q < layout.tout[k]"


def refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    capability: tuple[int, int] | None = None,
    op: str = OP,
) -> str | None:
    """Returns the reason why this version cannot run `shared_prefix_attention`, or None if it can.

    The reason is an error text: what was passed, what is needed instead, and a remedy. It is the
    same with and without gradients.

    Args:
        q: [T, H, D].
        k, v: [T, Hk, D].
        scale: factor of the scores; None for the default.
        capability: None answers for the device of the tensors; (9, 0) as if they were on a GPU of
            this compute capability.
        op: the name of the function, with which the text begins.
    """
    reason = _reason(q, k, v, scale)
    if reason is None and (q.is_cuda or capability is not None):
        reason = _refused_on_cuda(q, k, v, capability or device.capability(q.device))
    return None if reason is None else need(op, *reason)


def _reason(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Reason | None:
    """Returns the reason, on any device, for dtypes, scale or device that are not supported."""
    if not q.dtype == k.dtype == v.dtype:
        names = [dtype_name(x.dtype) for x in (q, k, v)]
        got = f"q is {names[0]}, k is {names[1]}, v is {names[2]}"
        return got, "one dtype", f"cast k and v to {names[0]}"
    if q.dtype not in FLOATS:
        fix = f"cast them to one of these, such as {dtype_name(DTYPES[0])}"
        return f"q, k and v are {dtype_name(q.dtype)}", one_of(FLOATS), fix
    if scale is not None and (wrong := unfit_factor("scale", scale)) is not None:
        return wrong, "a positive number", "scale q instead, or leave it out"
    return refused_anywhere(q.device, f"move them, or {ELSEWHERE}")


def unfit_factor(name: str, x: Any) -> str | None:
    """Returns None if x is a positive, finite factor, such as a scale; else the reason why not.

    x may be a number, or a tensor of one element. A tensor that requires a gradient is refused,
    because no gradient is computed for it. `name` is the argument's name, for the reason.
    """
    if isinstance(x, Tensor):
        if x.requires_grad:
            return f"{name} is a tensor that requires a gradient, and would get none"
        if x.numel() != 1:
            return f"{name} is a tensor of shape {tuple(x.shape)}"
    elif not isinstance(x, NUMBERS) and not hasattr(x, "__float__"):
        return f"{name} is of type {type(x).__name__}"
    return None if 0 < x < float("inf") else f"{name}={x}"


def _refused_on_cuda(q: Tensor, k: Tensor, v: Tensor, capability: tuple[int, int]) -> Reason | None:
    reason = refused_device(capability, q.dtype, ELSEWHERE)
    reason = reason or refused_head_size(q.shape[-1], "D", "q, k and v", ELSEWHERE, HEAD_SIZES)
    for name, x in (("q", q), ("k", k), ("v", v)):
        reason = reason or refused_strides(name, x)
    return reason


def check_tensors(
    op: str, q: Tensor, k: Tensor, v: Tensor, layout: SharedLayout, q_shift: int = 0
) -> None:
    """Raises ValueError unless q, k, v and layout fit together in type, shape and device.

    q must be [T - q_shift, H, D], k and v [T, Hk, D], for a layout of T tokens, the first q_shift
    of which have no query. Strides are not checked. Raises Unsupported if q, k or v has a
    forward-mode tangent.
    """
    if not isinstance(layout, SharedLayout):
        got, fix = f"layout is of type {type(layout).__name__}", "pass batch.layout"
        raise ValueError(need(op, got, "a SharedLayout", fix))
    tokens = layout.num_tokens
    CALL.check(op, q, k, v, layout.tout, T=tokens, Tq=tokens - q_shift)
    H, Hk = q.shape[1], k.shape[1]
    if H % Hk:
        got = f"H={H}, Hk={Hk}"
        fix = "give k and v a number of heads that divides that of q"
        raise ValueError(need(op, got, "H a multiple of Hk", fix))


def check_contents(layout: SharedLayout) -> None:
    """Raises ValueError if the tensors of a layout, `nodes` and `tout`, contradict each other.

    A layout is a forest of shared prefixes. Each row of `nodes` is a run of tokens, such as a
    prompt, and its children are the continuations, such as responses. Nodes must be in depth-first
    order, with each packed token in exactly one node. tout[j] is the index after the last token
    that may attend to token j, and must equal the value in the row of token j's node. Waits for the
    GPU, so attention calls it under QLA_CHECK=1 only.
    """
    check_nodes(layout.nodes, layout.num_tokens)
    check_tout(layout.tout, layout.nodes)
