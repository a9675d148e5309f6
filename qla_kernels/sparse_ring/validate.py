"""Checks the arguments of a call.

    check_*   raise ValueError if a call is malformed, on every device
    refusal   returns the text of an Unsupported if this version cannot run a well-formed call

They look at shapes, dtypes, strides and settings, not at the contents of q, k and v.
"""

import torch
from torch import Tensor

from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import integer, number
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import Signature
from qla_kernels.runtime.sm90 import (
    Reason,
    dtype_name,
    refused_anywhere,
    refused_device,
    refused_head_size,
    refused_strides,
)
from qla_kernels.sparse_ring.groups import RingGroups
from qla_kernels.sparse_ring.heuristics import SCHEDULES
from qla_kernels.sparse_ring.index import VSIndex, refused_lines
from qla_kernels.sparse_ring.layouts import Layout, StripedLayout, check_layout
from qla_kernels.sparse_ring.operands import INT32
from qla_kernels.sparse_ring.patterns import Dense, FixedVerticalSlash, Pattern, VerticalSlash
from qla_kernels.sparse_ring.shapes import TILE

OP, RING_OP, BUILD_OP = "sparse_attention", "sparse_ring_attention", "build_index"

ELSEWHERE = "use CPU tensors"
CALL = Signature(
    "q [B+, L, H+, D+]; k [B, L, Hk+, D]; v [B, L, Hk, D]",
    q="reshape q to [B, tokens, heads, size]",
    k="reshape or slice k",
    v="reshape or slice v",
)


def refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world: int = 1,
    scale: float | None = None,
    capability: tuple[int, int] | None = None,
    op: str = OP,
) -> str | None:
    """Returns the reason why this version cannot run `sparse_attention`, or None if it can.

    The answer is for forward and backward.

    Args:
        q, k, v: the tensors of one rank: q [B, L, H, D], k and v [B, L, Hk, D].
        world: number of ranks that share the sequence.
        scale: factor of the scores q k^T; D ** -0.5 if None.
        capability: answer as if the tensors were on a GPU of this compute capability, such as (9,
            0). None: answer for their own device.
        op: name of the function with which the returned text begins.
    """
    reason = _refused_everywhere(q, k, v, world, scale)
    if reason is None and (q.is_cuda or capability is not None):
        reason = _refused_on_cuda(q, k, v, world, capability or device.capability(q.device))
    return None if reason is None else need(op, *reason)


def _refused_everywhere(
    q: Tensor, k: Tensor, v: Tensor, world: int, scale: float | None
) -> Reason | None:
    """Returns the reason, on any device, for dtypes, scale or tokens that are not supported."""
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        names = [dtype_name(x.dtype) for x in (q, k, v)]
        got = f"q is {names[0]}, k is {names[1]}, v is {names[2]}"
        return got, "one float dtype", "cast them to one, such as bfloat16"
    if reason := refused_anywhere(q.device, "move q, k and v to one of these"):
        return reason
    if scale is not None and not 0 < scale < float("inf"):
        return f"scale={scale}", "a positive number", "scale q instead, or leave it out"
    L = q.shape[1]
    if L % TILE or L == 0:
        got = f"q has {L} tokens a rank"
        fix = "pad the sequence to layout.pad_len(tokens), and pass seqlen=tokens"
        return got, f"a positive multiple of {TILE}", fix
    for name, x in (("k", k), ("v", v)):
        if world > 1 and not x.is_contiguous():
            got = f"{name} has strides {tuple(x.stride())}"
            return got, "a contiguous tensor, which can be sent", f"pass {name}.contiguous()"
    return None


def _refused_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, world: int, capability: tuple[int, int]
) -> Reason | None:
    """Returns the reason why no kernel can run the call on a GPU, or None."""
    reason = refused_device(capability, q.dtype, ELSEWHERE)
    reason = reason or refused_head_size(q.shape[-1], "D", "q, k and v", ELSEWHERE)
    if reason is not None:
        return reason
    for name, x in (("q", q), ("k", k), ("v", v)):
        steps = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
        sequence = x.shape[1] * x.shape[2] * x.shape[3]  # batch stride of results and of buffers
        if max(steps, default=0) > INT32 or (sequence > INT32 and (world > 1 or x.shape[0] > 1)):
            return (
                f"{name} has shape {tuple(x.shape)} and strides {tuple(x.stride())}",
                f"at most {INT32} elements from one sequence, token or head to the next",
                "pass one sequence a call, copy a view, or split the heads",
            )
        if (reason := refused_strides(name, x)) is not None:
            return reason
    return None


def check_tensors(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q, k and v are tensors that fit together in shape and device.

    q must be [B, L, H, D], k and v [B, L, Hk, D], with H a multiple of Hk. The error names `op`.
    """
    CALL.check(op, q, k, v)
    H, Hk = q.shape[2], k.shape[2]
    if H % Hk:
        fix = "give k and v a number of heads that divides that of q"
        raise ValueError(need(op, f"H={H}, Hk={Hk}", "H a multiple of Hk", fix))


def defaults(
    op: str, q: Tensor, world: int, seqlen: int | None, scale: float | None
) -> tuple[int, int, float]:
    """Fills in the defaults of a call: returns (T, seqlen, scale).

    T is the number of tokens of the whole sequence with padding. If seqlen is None, T is returned
    for it, and if scale is None, D ** -0.5.

    Args:
        op: the function that the error names.
        q: [B, L, H, D], the queries of one rank, checked.
        world: number of ranks; T is world x L.
        seqlen: number of tokens of the whole sequence before the padding, or None.
        scale: factor of the scores q k^T, or None.

    Raises:
        ValueError: seqlen is not an int, or scale is not a number.
    """
    T = world * q.shape[1]
    if seqlen is None:
        seqlen = T
    elif not isinstance(seqlen, int | torch.SymInt):
        seqlen = integer(op, "seqlen", seqlen, "pass the number of tokens before the padding")
    if scale is None:
        scale = q.shape[3] ** -0.5
    elif not isinstance(scale, float):
        fix = "pass float(scale); multiply q by a scale that is learned"
        scale = number(op, "scale", scale, fix)
    return T, seqlen, scale


def check_lines(
    op: str, q: Tensor, T: int, seqlen: int, pattern: Pattern | None, index: VSIndex | None
) -> None:
    """Raises ValueError unless a call has a pattern or an index, and it fits q, T and seqlen.

    Args:
        op: the function that the error names.
        q: [B, L, H, D], the queries of one rank.
        T: number of tokens of the whole sequence, with padding.
        seqlen: number of tokens of the whole sequence before the padding; must be 1 to T.
        pattern: how the mask is chosen; None if the call has an index.
        index: the mask itself; None if the call has a pattern.
    """
    if (pattern is None) == (index is None):
        got = f"{'neither' if pattern is None else 'both'} of pattern and index were passed"
        fix = "pass pattern=VerticalSlash(), or index=build_index(q, k, pattern)"
        raise ValueError(need(op, got, "one of the two", fix))
    if not 1 <= seqlen <= T:
        needs, fix = (
            f"1 to {T}, the tokens of the sequence",
            "pass the number of tokens before the padding",
        )
        raise ValueError(need(op, f"seqlen is {seqlen}", needs, fix))
    B, H = q.shape[0], q.shape[2]
    if index is not None and not isinstance(index, VSIndex):
        got = f"index is of type {type(index).__name__}"
        raise ValueError(need(op, got, "a VSIndex", "pass build_index(q, k, pattern)"))
    if index is not None:
        index.check_form(op, B, H, T, q.device)
    if pattern is not None and not isinstance(pattern, VerticalSlash | FixedVerticalSlash | Dense):
        needs = "VerticalSlash, FixedVerticalSlash or Dense"
        got = f"pattern is of type {type(pattern).__name__}"
        raise ValueError(need(op, got, needs, "pass an instance, such as VerticalSlash()"))
    if isinstance(pattern, FixedVerticalSlash):
        reason = refused_lines(pattern, H, T)
        if reason is not None:
            raise ValueError(need(op, *reason))


def check_group(op: str, group: RingGroups | None) -> RingGroups:
    """Returns `group`; raises ValueError, which names `op`, if it is not a RingGroups.

    Only this rank raises: without a group it cannot tell other ranks that its argument is wrong.
    """
    if not isinstance(group, RingGroups):
        got = f"group is of type {type(group).__name__}"
        fix = "make one by RingGroups.create(group), and reuse it"
        raise ValueError(need(op, got, "RingGroups", fix))
    return group


def check_ring(
    op: str, layout: Layout | None, world: int, schedule: str, chunks_per_launch: int | None
) -> None:
    """Raises ValueError unless layout, schedule and chunks_per_launch fit a ring of `world` ranks.

    Args:
        op: the function that the error names.
        layout: which rank holds which tokens; must be a Layout for `world` ranks.
        world: number of ranks.
        schedule: "auto", "allgather", "ring", or, with a StripedLayout, "double_ring".
        chunks_per_launch: None, or the number of ranks' k and v that one launch reads, at least 1.
    """
    check_layout(op, layout, world)
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        got, needs = f"schedule is {schedule!r}", ", ".join(SCHEDULES)
        raise ValueError(need(op, got, f"one of {needs}", "leave it out for auto"))
    if schedule == "double_ring" and not isinstance(layout, StripedLayout):
        got = f"schedule is 'double_ring' and layout a {type(layout).__name__}"
        needs = "a StripedLayout, as other layouts leave most steps of a turn without work"
        raise ValueError(need(op, got, needs, "pass one, or use the schedule 'ring'"))
    if chunks_per_launch is not None:
        fix = "leave it out, or pass a number of chunks"
        if integer(op, "chunks_per_launch", chunks_per_launch, fix) < 1:
            got = f"chunks_per_launch is {chunks_per_launch}"
            raise ValueError(need(op, got, "at least 1", fix))
