"""`decode_gated_delta_net`: a gated-delta-net layer between its projections, for decoding."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv.ops import conv_update
from qla_kernels.conv.update import require_update
from qla_kernels.conv.validate import check_update
from qla_kernels.gdn.decode.packed import Step, checked_step, run_step
from qla_kernels.runtime.programs import RECORD, Programs

OP = "decode_gated_delta_net"
STEPS = Programs(OP)


@torch.no_grad()
def decode_gated_delta_net(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    state_indices: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
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
    """Decodes one token of each of N sequences in a gated-delta-net layer, between its projections.

    Runs the convolution (`causal_conv1d_update`), then the gated delta rule and the gated RMSNorm
    (`packed_decode_gated_delta_rule`), in two launches; the results have the same bits as calls of
    these two functions. Updates both caches in place. With z, the second launch already loads its
    states while the first one runs. Not differentiable.

    Args:
        mixed_qkv: [N, 2 * H * K + HV * V], the output of the projection: H queries, H keys and HV
            values of each sequence. This tensor is not changed.
        a, b: [N, HV], the inputs of the gate and of beta's sigmoid.
        A_log, dt_bias: [HV], the parameters of the gate; dt_bias may be None.
        initial_state: the state cache [slots, HV, V, K], or [slots, HV, K, V] without
            state_v_first; fp32, or bf16 with mixed_qkv in bf16.
        state_indices: [N], the slot of each sequence in both caches. Two sequences must not share a
            slot. A negative index marks padding: the result is 0, and neither cache is changed. An
            index past a cache raises ValueError on a CPU and under QLA_CHECK=1; otherwise a GPU
            treats it as padding.
        conv_state: the conv-state cache [slots, 2 * H * K + HV * V, width - 1 or more]: the
            last width - 1 inputs of the convolution of each sequence, the oldest first.
        conv_weight: the weight of the convolution, [2 * H * K + HV * V, width].
        conv_bias: [2 * H * K + HV * V]; 0 if None.
        conv_activation: None, "silu" or "swish" (the same as silu).
        scale: factor of q; K ** -0.5 if None.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm over K first.
        allow_neg_eigval: beta is 2 * sigmoid(b).
        null_slot: -1, or 0 if slot 0 is reserved for padding: index 0 then marks padding too.
        z: [N, HV, V] in mixed_qkv's dtype, the input of the output gate; None: neither norm nor
            gate.
        norm_weight: [V], the weight of the RMSNorm; required with z.
        norm_eps: a float, added to the mean of o^2.
        z_activation: of the output gate: "silu", "swish" or "sigmoid".
        out: a contiguous [N, 1, HV, V] in mixed_qkv's dtype; the result is written to `out`, and
            `out` is returned.

    Returns:
        [N, 1, HV, V]: the output of the gated delta rule, after norm and gate if z is passed.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: this version cannot run the call.
    """
    arguments = (
        mixed_qkv, a, b, A_log, dt_bias, initial_state, state_indices, conv_state, conv_weight,
        conv_bias, conv_activation, scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first,
        null_slot, z, norm_weight, norm_eps, z_activation, out,
    )  # fmt: skip
    lookup = None if torch.compiler.is_compiling() else STEPS.find(*arguments)
    if type(lookup) is tuple:
        return out if out is not None else lookup[0]
    rule = *arguments[:7], *arguments[11:]
    step = checked_step(OP, *rule)
    convolution = mixed_qkv, conv_state, conv_weight, conv_bias
    check_update(OP, *convolution, conv_activation, state_indices, null_slot, None)
    require_update(*convolution, state_indices, null_slot, None, OP)

    given = convolution, conv_activation is not None, step
    results = STEPS.record(arguments, _run, *given) if lookup is RECORD else _run(*given)
    return out if out is not None else results[0]


def _run(convolution: tuple[Any, ...], silu: bool, step: Step) -> tuple[Tensor, ...]:
    """Returns o, or y of the norm, or nothing if it was written to `out`."""
    x, slots = convolution[0], step.pool
    rows = x.new_empty(x.shape)
    conv_update(*convolution, slots.state_indices, slots.null_slot, silu, rows)
    return run_step(rows, step, ahead=True)
