"""A decoding step on a packed projection: one row holds q, k and v of a sequence's new token.

Inference engines have this layout after their convolution, with inputs of the gate and of beta.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import Norm, Slots, gdn_recurrent_norm, gdn_recurrent_slots
from qla_kernels.gdn.decode.validate import (
    check_pool,
    checked_norm,
    expect_out,
    recurrent_refusal,
    refused_norm,
)
from qla_kernels.gdn.keywords import scale_of
from qla_kernels.gdn.validate import Gate, check_activations, check_tensors
from qla_kernels.runtime.arguments import check_null_slot, flag
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.programs import RECORD, Programs
from qla_kernels.runtime.sm90 import expect_tensors, require

PACKED_OP = "packed_decode_gated_delta_rule"
PACKED = Programs(PACKED_OP)


@torch.no_grad()
def packed_decode_gated_delta_rule(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    null_slot: int = -1,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    z_activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Decodes one token of each of N sequences and updates their states in a cache, in one launch.

    Equals `fused_recurrent_gated_delta_rule` with use_gate_in_kernel and
    use_beta_sigmoid_in_kernel: g is -exp(A_log) * softplus(a + dt_bias), and beta is sigmoid(b).
    With z, o then goes through RMSNorm and the output gate:

        y = o / sqrt(mean o^2 + norm_eps) * norm_weight * act(z)        over a head's V columns

    y is rounded once, after the gate. Not differentiable.

    Args:
        mixed_qkv: [N, 2 * H * K + HV * V]: H queries, H keys and HV values of each sequence. The
            row stride is a multiple of 16 bytes. H follows from the other sizes.
        a, b: [N, HV], the inputs of the gate and of beta's sigmoid.
        A_log, dt_bias: [HV]; dt_bias may be None.
        initial_state: the state cache [slots, HV, V, K], or [slots, HV, K, V] without
            state_v_first; fp32, or bf16 with mixed_qkv in bf16; updated in place. The stride
            between slots is a multiple of 4 elements.
        state_indices: [N] int32 or int64, the slot of each sequence. Two sequences must not share a
            slot. A negative index marks padding: the result is 0, and no slot is changed. An index
            past the cache raises ValueError on a CPU and under QLA_CHECK=1; otherwise a GPU treats
            it as padding. The same checks reject int64 values that do not fit in int32; otherwise a
            GPU reads their low 32 bits.
        scale: factor of q; K ** -0.5 if None.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first, without rounding.
        allow_neg_eigval: beta is 2 * sigmoid(b).
        null_slot: -1, or 0 if slot 0 is reserved for padding: index 0 then marks padding too.
        z: [N, HV, V] in mixed_qkv's dtype, with adjacent columns; z may be a slice of a projection.
            On a GPU K and V must then be equal.
        norm_weight: [V], the weight of the RMSNorm; required with z.
        norm_eps: a float, added to the mean of o^2.
        z_activation: act of the output gate: "silu", "swish" (the same as silu) or "sigmoid".
        out: a contiguous [N, 1, HV, V] in mixed_qkv's dtype; the result is written to `out`, and
            `out` is returned.

    Returns:
        o, or y with z, [N, 1, HV, V].

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    arguments = (
        mixed_qkv, a, b, A_log, dt_bias, initial_state, state_indices, scale,
        use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot, z, norm_weight,
        norm_eps, z_activation, out,
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else PACKED.find(*arguments)
    if type(lookup) is tuple:
        return out if out is not None else lookup[0]
    given = mixed_qkv, checked_step(PACKED_OP, *arguments)
    results = PACKED.record(arguments, run_step, *given) if lookup is RECORD else run_step(*given)
    return out if out is not None else results[0]


class Step(NamedTuple):
    """A record: the checked arguments of `packed_decode_gated_delta_rule`, except mixed_qkv.

    Attributes:
        a, b: [N, HV], the inputs of the gate and of beta's sigmoid.
        A_log, dt_bias: [HV], the parameters of the gate; dt_bias is 0 if None.
        pool: the state cache, the slot of each sequence, and the tensor for the result, if any.
        norm: the RMSNorm and output gate that follow, or None.
        scale: factor of q.
        options: flags, such as whether q and k are divided by their norms.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    pool: Slots
    norm: Norm | None
    scale: float
    options: Options


def checked_step(
    op: str,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    null_slot: int,
    z: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    z_activation: str,
    out: Tensor | None,
) -> Step:
    """Checks the arguments of `packed_decode_gated_delta_rule`; returns them as a `Step`.

    mixed_qkv, with q, k and v, is checked but is not a part of the result. `op` is the name of the
    function, for the error.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    options = Options(
        flag(op, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=flag(op, "allow_neg_eigval", allow_neg_eigval),
        state_v_first=flag(op, "state_v_first", state_v_first),
    )
    q, k, v = split(op, mixed_qkv, initial_state, options.state_v_first)
    expect_tensors(op, a=a, b=b)
    g, beta = (x.unsqueeze(1) if x.dim() == 2 else x for x in (a, b))
    check_tensors(op, q, k, v, g, beta)
    check_activations(op, v, Gate(True, A_log, dt_bias), options)
    check_pool(op, q, v, initial_state, state_indices, None, options.state_v_first)
    check_null_slot(op, null_slot)
    norm = checked_norm(op, v, z, norm_weight, norm_eps, z_activation)
    if out is not None:
        expect_out(op, out, v)
    require(recurrent_refusal(q, k, v, pool=initial_state, op=op))
    require(refused_norm(op, v, q.shape[-1], norm))
    scale = scale_of(op, scale, q)
    refuse_forward_mode(op, mixed_qkv, a, b, A_log, dt_bias, initial_state, z, norm_weight, out)

    pool = Slots(initial_state, state_indices, out, null_slot)
    return Step(a, b, A_log, dt_bias, pool, norm, scale, options)


def run_step(rows: Tensor, step: Step, ahead: bool = False) -> tuple[Tensor, ...]:
    """Runs a checked call of `packed_decode_gated_delta_rule`.

    Args:
        rows: mixed_qkv of the call, [N, 2 * H * K + HV * V]: q, k and v of each sequence.
        step: the other arguments, from `checked_step`.
        ahead: True if the launch may load states while the launch before it still runs.

    Returns:
        A tuple with the result, which is empty if the result was written to the caller's `out`.
    """
    slots, norm, options = step.pool, step.norm, step.options
    q, k, v = split(PACKED_OP, rows, slots.states, options.state_v_first)
    gates = step.a.unsqueeze(1), step.b.unsqueeze(1)
    call = Call(q, k, v, *gates, step.scale, None, None, None, step.A_log, step.dt_bias)
    pool = slots.with_room(v)
    if norm is None:
        gdn_recurrent_slots(call, pool, options)
    else:
        gdn_recurrent_norm(call, pool, norm._replace(ahead=ahead), options)
    return (pool.o,) if slots.o is None else ()


def split(
    op: str, mixed_qkv: Tensor, states: Tensor, state_v_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits mixed_qkv [N, 2 * H * K + HV * V] into views q and k [N, 1, H, K] and v [N, 1, HV, V].

    HV, K and V are sizes of `states`, [slots, HV, K, V], or [slots, HV, V, K] if state_v_first.
    Raises ValueError if the sizes do not fit; the error names `op`.
    """
    expect_tensors(op, mixed_qkv=mixed_qkv, initial_state=states)
    if mixed_qkv.dim() != 2 or states.dim() != 4:
        got = f"mixed_qkv has shape {tuple(mixed_qkv.shape)}, the pool {tuple(states.shape)}"
        needs = "[N, 2 H K + HV V] and a pool of four dimensions"
        raise ValueError(need(op, got, needs, "reshape them"))
    (N, width), (HV, V, K) = mixed_qkv.shape, states.shape[1:]
    if not state_v_first:
        V, K = K, V
    keys = width - HV * V
    if K == 0 or keys <= 0 or keys % (2 * K):
        got = f"mixed_qkv has {width} columns"
        needs = f"2 H K + HV V with K={K}, HV={HV} and V={V}"
        raise ValueError(need(op, got, needs, "pass q, k and v of every head, in this order"))
    sizes = [keys // 2, keys // 2, HV * V]
    q, k, v = torch.split(mixed_qkv, sizes, 1)
    H = keys // (2 * K)
    return q.view(N, 1, H, K), k.view(N, 1, H, K), v.view(N, 1, HV, V)
