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
    """Returns whether a kernel can read states with the strides of `state`.

    A thread reads 4 numbers at once, so the last stride must be 1, and the others multiples of 4.
    The address is not checked.
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
    """Raises ValueError unless `pool` has states like those of q and v, and indices are [N]."""
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
    """Returns the RMSNorm and output gate that follow a decoding step, or None if none follow.

    Raises ValueError if the arguments do not fit together, or do not fit v [N, 1, HV, V].

    Args:
        op: the function that the error names.
        z: [N, HV, V], the gate; None, with weight None, if there is no norm.
        weight: [V], the weight of the RMSNorm.
        eps: added to the mean square.
        activation: "silu", "swish" or "sigmoid", of the gate.
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
    """Returns why a GPU cannot run a decoding step with this RMSNorm and output gate, or None.

    The call must have passed `recurrent_refusal`.

    Args:
        op: the name of the function, which begins the returned text.
        v: the values of the step, [N, 1, HV, V].
        K: the size of a key.
        norm: the norm, from `checked_norm`.
        capability: answer as if v were on a GPU of this compute capability: (9, 0).
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
    """Returns the reason why `fused_recurrent_gated_delta_rule` cannot run a call, or None.

    Args:
        q, k, v, gk, gv: as in `fused_recurrent_gated_delta_rule`, with shapes that fit together.
        pool: initial_state if the call has state_indices, else None.
        capability: answer as if the tensors were on a GPU of this compute capability: (9, 0).
        op: the name of the function, which begins the returned text.
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
    """Returns the reason why a call cannot overwrite states in place, or None if it can.

    Args:
        op: the name of the function, which begins the returned text.
        what: what the text calls the states: "the pool of states".
        pool: the states; on a GPU their dtype and strides must suit the kernel.
        q: the queries of the call, whose dtype decides whether states may be bf16.
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
