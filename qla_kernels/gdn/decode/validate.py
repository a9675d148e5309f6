"""Checks that the public functions for decoding share.

check_*, expect_*   raise ValueError if the call is malformed, on every device
recurrent_refusal   returns the text of an Unsupported, or None
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.decode.ops import OP, Norm
from qla_kernels.gdn.shapes import NORM_SIZES, STATE_PIECE
from qla_kernels.gdn.validate import ELSEWHERE, refusal
from qla_kernels.runtime.arguments import GATE_ACTIVATIONS, check_activation, check_epsilon
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import Signature, layouts
from qla_kernels.runtime.sm90 import alternatives, dtype_name

OUT = Signature("v [B, T, HV, V]; out [B, T, HV, V] as v")
BETA = Signature("v [B, T, HV, V]; beta [B, T, HV, V] float")
NORM = Signature("mixed_qkv [N, 1, HV, V]; z [N, HV, V] as mixed_qkv; norm_weight [V] float")
# Sequences with states in a pool; q is there for the device, and its sizes are given.
POOLED = layouts(
    "q [B, T, H, K]; initial_state [slots, HV, {K, V}] float; state_indices [N] int",
    "N HV V",
    initial_state="pass the pool of states",
    state_indices="pass the slot of each sequence",
)
RECORDED = (  # a refusal of calls that overwrite a pool
    "state_indices while gradients are recorded",
    "no gradients: the pool is overwritten",
    "call it under torch.no_grad()",
)


def in_whole_pieces(state: Tensor) -> bool:
    """Returns whether a decoding kernel can read a state tensor with these strides.

    It can if the last stride is 1 and the others are multiples of 4, because a thread reads 4
    numbers at once. The address is not checked.
    """
    steps = [s for n, s in zip(state.shape[:-1], state.stride()[:-1], strict=True) if n > 1]
    return state.stride(-1) == 1 and all(s % STATE_PIECE == 0 for s in steps)


def per_head(beta: Tensor, v: Tensor) -> Tensor:
    """Returns beta as [B, T, HV], for checks that expect this shape.

    This is beta itself, or column 0 of a beta [B, T, HV, V], which has a number for each column of
    v. Raises ValueError if a beta of 4 dimensions does not have v's shape.
    """
    if not isinstance(beta, Tensor) or beta.dim() != 4:
        return beta
    BETA.check(OP, v, beta)
    return beta[..., :1].squeeze(-1)


def check_pool(
    op: str,
    q: Tensor,
    v: Tensor,
    pool: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> None:
    """Raises ValueError unless a state cache and the slots of N sequences fit a decoding call.

    Args:
        op: the name of the function, for the error.
        q, v: [B, T, H, K] and [B, T, HV, V], whose sizes the states must have.
        pool: the cache [slots, HV, K, V], or [slots, HV, V, K] if state_v_first.
        indices: the slot of each sequence, which must be [N] integers.
        cu_seqlens: [N + 1]; None: N is B.
        state_v_first: the layout of states.
    """
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    POOLED[state_v_first].check(op, q, pool, indices, N=N, HV=v.shape[2], V=v.shape[3])


def expect_out(op: str, out: Tensor, v: Tensor) -> None:
    """Raises ValueError unless `out` is contiguous and has v's shape, dtype and device.

    `out` is the tensor to which a call writes its result; the error names the function `op`.
    """
    OUT.check(op, v, out)
    if not out.is_contiguous():
        got = f"out has strides {tuple(out.stride())}"
        raise ValueError(need(op, got, "a contiguous one", "leave it out, and copy the result"))


def checked_norm(
    op: str, v: Tensor, z: Tensor | None, weight: Tensor | None, eps: Any, activation: object
) -> Norm | None:
    """Checks the arguments of the RMSNorm and output gate after a decoding step; returns a `Norm`.

    Returns None if there are none: z and weight are None. Raises ValueError if the arguments do not
    fit together, or do not fit v.

    Args:
        op: the name of the function, for the error.
        v: [N, 1, HV, V], the values of the step.
        z: [N, HV, V], the input of the gate.
        weight: [V], the weight of the RMSNorm.
        eps: added to the mean square.
        activation: of the gate: "silu", "swish" or "sigmoid".
    """
    check_activation(op, "z_activation", activation, GATE_ACTIVATIONS)
    check_epsilon(op, "norm_eps", eps)
    if z is None and weight is None:
        return None
    if z is None or weight is None:
        got = "norm_weight without z" if z is None else "z without norm_weight"
        raise ValueError(need(op, got, "both, or neither", "pass the gate and the norm's weight"))
    NORM.check(op, v, z, weight)
    return Norm(z, weight, eps, activation == "sigmoid")


def refused_norm(
    op: str, v: Tensor, K: int, norm: Norm | None, capability: tuple[int, int] | None = None
) -> str | None:
    """Returns why a GPU cannot run the RMSNorm and output gate after a decoding step, or None.

    Also None without a norm, and on a CPU. Other reasons are those of `recurrent_refusal`, which
    the caller must check first.

    Args:
        op: the name of the function, with which the text begins.
        v: [N, 1, HV, V], the values of the step.
        K: the size of a key.
        norm: the norm and gate, from `checked_norm`, or None.
        capability: None answers for v's device; (9, 0) as if v were on a GPU of this compute
            capability.
    """
    if norm is None or not (v.is_cuda or capability is not None):
        return None
    if v.shape[-1] != K or K not in NORM_SIZES:
        got, fix = f"head sizes K={K} and V={v.shape[-1]}", "leave z out, and norm the result"
        return need(op, got, f"K = V of {alternatives(NORM_SIZES)} on SM90", fix)
    if norm.z.stride(-1) != 1:
        got = f"z has strides {tuple(norm.z.stride())}"
        return need(op, got, "a last stride of 1", "pass z.contiguous()")
    return None


def recurrent_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    pool: Tensor | None = None,
    capability: tuple[int, int] | None = None,
    op: str = OP,
) -> str | None:
    """Returns why this version cannot run `fused_recurrent_gated_delta_rule`, or None if it can.

    The reason is an error text: what was passed, what is needed instead, and a remedy.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        gk, gv: decays per row or column of the state, which are refused unless they are None.
        pool: the state cache, for a call with state_indices, else None.
        capability: None answers for the device of the tensors; (9, 0) as if they were on a GPU of
            this compute capability.
        op: the name of the function, with which the text begins.
    """
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            # chunk_gated_delta_rule has beta where this function has gk
            fix = f"if it is beta, pass that by its name; else {ELSEWHERE}"
            return need(op, f"got {name}", "None: one decay a head and token", fix)
    if reason := refusal(q, k, v, capability=capability, op=op):
        return reason
    if pool is None:
        return None
    return refused_states(op, "the pool of states", pool, q, q.is_cuda or capability is not None)


def refused_states(op: str, what: str, pool: Tensor, q: Tensor, on_gpu: bool) -> str | None:
    """Returns why a kernel cannot write states into a given tensor in place, or None if it can.

    Reasons are states that share memory, and on a GPU their dtype and strides.

    Args:
        op: the name of the function, with which the text begins.
        what: what the text calls the tensor, such as "the pool of states".
        pool: the tensor, such as a state cache [slots, HV, K, V].
        q: the queries; bf16 states need bf16 queries.
        on_gpu: True if the call runs on a GPU.
    """
    if any(n > 1 and s == 0 for n, s in zip(pool.shape, pool.stride(), strict=True)):
        got, needs = "share memory", "a place for each: they are overwritten"
        return need(op, f"states of {_plain(what)} {got}", needs, "pass it .contiguous()")
    if not on_gpu:
        return None
    if pool.dtype != torch.float32 and not pool.dtype == q.dtype == torch.bfloat16:
        needs = "float32, or bfloat16 with q in bfloat16"
        return need(op, f"{what} is {dtype_name(pool.dtype)}", needs, "keep it in float32")
    if not in_whole_pieces(pool):
        needs = f"a last stride of 1 and the rest multiples of {STATE_PIECE}"
        got = f"{what} has strides {tuple(pool.stride())}"
        return need(op, got, needs, "allocate it contiguous, or set state_v_first")
    return None


def _plain(what: str) -> str:
    return what.removesuffix(" of states")
