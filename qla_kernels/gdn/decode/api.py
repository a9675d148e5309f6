"""The public function for decoding: the gated delta rule token by token, forward only.

Argument names, order and defaults equal those of FLA 0.6.0; state_indices, null_slot and out are
additional arguments.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import (
    OP,
    Decoded,
    Slots,
    gdn_recurrent,
    gdn_recurrent_slots,
    recorded_gdn_recurrent,
)
from qla_kernels.gdn.decode.validate import (
    RECORDED,
    check_pool,
    expect_out,
    per_head,
    recurrent_refusal,
)
from qla_kernels.gdn.keywords import checked_flags, refuse_unknown, scale_of, take_layout
from qla_kernels.gdn.validate import Gate, check_activations, check_tensors
from qla_kernels.runtime.arguments import check_null_slot, flag
from qla_kernels.runtime.derivatives import wants_gradients
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.sm90 import expect_tensors, require

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
    null_slot: int = -1,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule token by token, for decoding.

    The same function as `chunk_gated_delta_rule`, computed in fp32, or fp64 if q is fp64, without
    rounding between tokens. On a GPU each state is read once and written once.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], natural log of each token's decay; None for no decay.
        gk, gv: must be None; decays per row or column of the state are not implemented.
        beta: [B, T, HV], or [B, T, HV, V] for each column of V; 1 if None.
        scale: factor of q; K ** -0.5 if None.
        initial_state: [N, HV, K, V], a state for each sequence; 0 if None. On a GPU a copy is made
            if the dtype is not fp32, or if the kernel cannot read the strides or the address. With
            state_indices, initial_state is a state cache [slots, HV, K, V], which is updated in
            place and never copied: on a GPU in fp32, or in bf16 if q is bf16, on a CPU in any float
            dtype.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first, without rounding.
        use_gate_in_kernel, A_log, dt_bias: g holds the input of the gate; use
            -exp(A_log) * softplus(g + dt_bias), with A_log and dt_bias (0 if None) of shape [HV].
        use_beta_sigmoid_in_kernel: beta holds logits; use sigmoid(beta).
        allow_neg_eigval: with the sigmoid, use 2 * sigmoid(beta).
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device, the bounds of packed sequences; B is 1.
            Tokens past the last sequence are not read, and their results are 0.
        state_indices: [N] int32 or int64 on q's device. Sequence n starts from slot
            state_indices[n] of the cache, and its final state overwrites that slot. Two sequences
            must not share a slot. A negative index marks padding: the results of that sequence are
            0, and no slot is changed. An index past the cache raises ValueError on a CPU and under
            QLA_CHECK=1; otherwise a GPU treats it as padding. The same checks reject int64 values
            that do not fit in int32; otherwise a GPU reads their low 32 bits.
        null_slot: -1, or 0 if slot 0 is reserved for padding: index 0 then marks padding too.
        out: with state_indices, a contiguous tensor like v; o is written to `out`, and `out` is
            returned.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] in fp32 (fp64 where q is
        fp64), or None. With state_indices the second result is the cache, or None.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit together, but this version cannot run them. A backward
            through the result raises Unsupported too.
        TypeError: a keyword is unknown.
    """
    arguments = (
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, state_indices, null_slot, out, *kwargs, *kwargs.values(),
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else DECODING.find(*arguments)
    if type(lookup) is tuple:
        if len(lookup) == 2:
            return lookup
        return lookup[0] if out is None else out, initial_state if output_final_state else None
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
    check_tensors(OP, q, k, v, g, per_head(beta, v), h0, cu_seqlens, None, v_first)
    check_activations(OP, v, gate, options)
    states = None if state_indices is None else initial_state
    if state_indices is not None:
        if initial_state is None:
            fix = "pass the pool of states"
            raise ValueError(need(OP, "state_indices without initial_state", "both", fix))
        check_pool(OP, q, v, initial_state, state_indices, cu_seqlens, v_first)
    check_null_slot(OP, null_slot)
    if out is not None:
        if state_indices is None:
            fix = "drop out, or pass the pool and state_indices"
            raise ValueError(need(OP, "out without state_indices", "both", fix))
        expect_out(OP, out, v)
    require(recurrent_refusal(q, k, v, gk=gk, gv=gv, pool=states))
    scale = scale_of(OP, scale, q)
    call = Call(q, k, v, g, beta, scale, h0, cu_seqlens, None, *gate.parameters())
    recorded = wants_gradients((*call, initial_state))
    if states is None or state_indices is None:
        if recorded:
            decoded = recorded_gdn_recurrent(call, options)
        elif lookup is RECORD:
            decoded = Decoded(*DECODING.record(arguments, gdn_recurrent, call, options))
        else:
            decoded = gdn_recurrent(call, options)
        return decoded.o, decoded.final_state
    if recorded:
        raise Unsupported(need(OP, *RECORDED))

    given = call, Slots(states, state_indices, out, null_slot), options
    results = DECODING.record(arguments, _in_pool, *given) if lookup is RECORD else _in_pool(*given)
    return (results[0] if out is None else out), states if options.output_final_state else None


def _in_pool(call: Call, slots: Slots, options: Options) -> tuple[Tensor, ...]:
    """Returns o, or nothing if it was written to `out`."""
    pool = slots.with_room(call.v)
    gdn_recurrent_slots(call, pool, options)
    return (pool.o,) if slots.o is None else ()


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
