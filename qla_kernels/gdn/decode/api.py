"""The public function for decoding: the gated delta rule token by token, forward only.

It is for calls in which sequences grow by a few tokens. Names, order and defaults of its arguments
equal those of FLA 0.6.0's function; state_indices is an additional argument.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.arguments import flag
from qla_kernels.derivatives import refuse_forward_mode
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import (
    OP,
    Decoded,
    Pool,
    gdn_recurrent,
    gdn_recurrent_slots,
    recorded_gdn_recurrent,
)
from qla_kernels.gdn.keywords import checked_flags, refuse_unknown, scale_of, take_layout
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.gdn.validate import (
    ELSEWHERE,
    Gate,
    check_activations,
    check_tensors,
    expect_shape,
    expect_tensor,
    refusal,
    wants_gradients,
)
from qla_kernels.programs import RECORD, Programs
from qla_kernels.sm90 import dtype_name, expect_tensors, require

DECODING = Programs(OP, gradients=True)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule of `chunk_gated_delta_rule`, one token after the other.

    Computes in fp32, or in fp64 where q is fp64, and does not round between the steps. On a GPU a
    state is read once and written once.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], natural log of each token's decay; None for no decay.
        gk, gv: must be None; decays per row or column of the state are not implemented.
        beta: [B, T, HV], or [B, T, HV, V] for each column of V; 1 if None.
        scale: K ** -0.5 if None.
        initial_state: [N, HV, K, V], a state for each sequence; 0 if None. On a GPU it is copied
            first if it is not fp32, or if the kernel cannot read its strides or address. With
            state_indices it is the pool [slots, HV, K, V], which is updated in place and never
            copied.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first, without rounding.
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        use_beta_sigmoid_in_kernel: beta holds logits; use sigmoid(beta).
        allow_neg_eigval: with the sigmoid, use 2 sigmoid(beta).
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device; B is 1. Tokens past the last sequence are
            not read, and their results are 0.
        state_indices: [N] int32 or int64 on q's device. Sequence n starts from slot
            state_indices[n] of the pool, and its final state overwrites that slot. Two sequences
            must not share a slot. A negative index marks a sequence of padding: its results are 0,
            and no slot is changed. On a GPU the same holds for an index past the pool; on a CPU,
            and under QLA_CHECK=1, that is a ValueError.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in fp32 (fp64 where q is
        fp64), or None. With state_indices the second result is the pool, or None.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit together, but this version cannot run them; or a backward
            through the result is asked for.
        TypeError: a keyword is unknown.
    """
    given = (
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, state_indices, *kwargs, *kwargs.values(),
    )  # fmt: skip
    found = None if torch.compiler.is_compiling() else DECODING.find(*given)
    if type(found) is tuple:
        return _of_slots(found, initial_state, output_final_state) if len(found) == 1 else found
    options = Options(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=take_layout(OP, kwargs, state_v_first),
        output_final_state=output_final_state,
    )
    options = checked_flags(OP, options)
    refuse_unknown(OP, kwargs)
    gate = Gate(flag(OP, "use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias)
    if g is None and gate.use_gate_in_kernel:
        fix = "pass g, or no flag for no decay"
        raise ValueError(need(OP, "use_gate_in_kernel without g", "the gate's input", fix))
    expect_tensors(OP, q=q, k=k, v=v)
    g = v.new_zeros(()).expand(v.shape[:3]) if g is None else g
    beta = v.new_ones(()).expand(v.shape[:3]) if beta is None else beta
    h0, v_first = initial_state if state_indices is None else None, options.state_v_first
    check_tensors(OP, q, k, v, g, _per_head(beta, v), h0, cu_seqlens, None, v_first)
    check_activations(OP, v, gate, options)
    states = None
    if state_indices is not None:
        states = _checked_pool(q, v, initial_state, state_indices, cu_seqlens, v_first)
    require(recurrent_refusal(q, k, v, gk=gk, gv=gv, pool=states))
    scale = scale_of(OP, scale, q)
    call = Call(q, k, v, g, beta, scale, h0, cu_seqlens, None, *gate.parameters())
    refuse_forward_mode(OP, *call, initial_state)
    recorded = wants_gradients((*call, initial_state))
    if states is None or state_indices is None:
        if recorded:
            done = recorded_gdn_recurrent(call, options)
        elif found is RECORD:
            done = DECODING.record(given, lambda: Decoded(*gdn_recurrent(call, options)))
        else:
            done = gdn_recurrent(call, options)
        return done.o, done.final_state
    if recorded:
        got, fix = "state_indices while gradients are recorded", "call it under torch.no_grad()"
        raise Unsupported(need(OP, got, "no gradients: the pool is overwritten", fix))
    pool = Pool(states, state_indices)
    if found is RECORD:
        (o,) = DECODING.record(given, lambda: (_in_pool(call, pool, options),))
    else:
        o = _in_pool(call, pool, options)
    return o, states if options.output_final_state else None


def _in_pool(call: Call, pool: Pool, options: Options) -> Tensor:
    o: Tensor = gdn_recurrent_slots(call, pool, options)
    return o


def _of_slots(
    found: tuple[Tensor], pool: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the results of a replayed call with state_indices, which overwrote the pool."""
    assert pool is not None, "a call with state_indices has one"
    torch.autograd.graph.increment_version(pool)
    return found[0], pool if output_final_state else None


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def in_whole_pieces(state: Tensor) -> bool:
    """Returns True if the kernel can read a state with these strides; does not check its address.

    The last stride has to be 1 and the others multiples of STATE_PIECE.
    """
    steps = [s for n, s in zip(state.shape[:-1], state.stride()[:-1], strict=True) if n > 1]
    return state.stride(-1) == 1 and all(s % STATE_PIECE == 0 for s in steps)


def _per_head(beta: Tensor, v: Tensor) -> Tensor:
    """Returns beta as [B, T, HV]: the first column of one that is [B, T, HV, V], else beta itself.

    Raises ValueError if a beta of 4 dimensions does not have v's shape.
    """
    if not isinstance(beta, Tensor) or beta.dim() != 4:
        return beta
    expect_shape(OP, "beta", beta, tuple(v.shape), "[B, T, HV, V]")
    return beta[..., :1].squeeze(-1)


def _checked_pool(
    q: Tensor,
    v: Tensor,
    pool: Tensor | None,
    state_indices: Tensor,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> Tensor:
    if pool is None:
        fix = "pass the pool of states"
        raise ValueError(need(OP, "state_indices without initial_state", "both", fix))
    expect_tensors(OP, initial_state=pool)
    num_seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expect_tensor(OP, "state_indices", state_indices, (num_seqs,), "[N]", q.device)
    if state_indices.dtype not in (torch.int32, torch.int64):
        got = f"state_indices is {dtype_name(state_indices.dtype)}"
        raise ValueError(need(OP, got, "int32 or int64", "cast it"))
    K, (HV, V) = q.shape[-1], v.shape[2:]
    size, letters = (
        ((V, K), "[slots, HV, V, K]") if state_v_first else ((K, V), "[slots, HV, K, V]")
    )
    shape = (*pool.shape[:1], HV, *size)
    expect_tensor(OP, "initial_state", pool, shape, letters, q.device, floats=True)
    return pool


def recurrent_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    pool: Tensor | None = None,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Returns the reason why `fused_recurrent_gated_delta_rule` cannot run a call, or None.

    Args:
        pool: initial_state of a call with state_indices, else None.
        capability: answer for a GPU of this compute capability, whatever the tensors' device.
    """
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            return need(OP, f"got {name}", "None: one decay a head and token", ELSEWHERE)
    if reason := refusal(q, k, v, capability=capability, op=OP):
        return reason
    if pool is None:
        return None
    if any(n > 1 and s == 0 for n, s in zip(pool.shape, pool.stride(), strict=True)):
        got, needs = "states of the pool share memory", "a place for each: they are overwritten"
        return need(OP, got, needs, "pass it .contiguous()")
    if not (q.is_cuda or capability is not None):
        return None
    if pool.dtype != torch.float32 and not pool.dtype == q.dtype == torch.bfloat16:
        needs = "float32, or bfloat16 with q in bfloat16"
        return need(
            OP, f"the pool of states is {dtype_name(pool.dtype)}", needs, "keep it in float32"
        )
    if not in_whole_pieces(pool):
        got = f"the pool of states has strides {tuple(pool.stride())}"
        needs = f"a last stride of 1 and the rest multiples of {STATE_PIECE}"
        return need(OP, got, needs, "allocate it contiguous, or set state_v_first")
    return None
