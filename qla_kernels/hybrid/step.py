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

    Runs `causal_conv1d_update` on mixed_qkv, then `packed_decode_gated_delta_rule` on the result,
    in two launches. The results have the same bits as calls of these two functions. With z, the
    second launch already loads its states while the first one runs. Not differentiable.

    Args:
        mixed_qkv: [N, 2 H K + HV V], the output of the projection: H queries, H keys and HV values
            of each sequence. This tensor is not changed.
        conv_state: the pool [slots, 2 H K + HV V, width - 1 or more] of the last tokens of each
            sequence, as in `causal_conv1d_update`.
        conv_weight: the weight of the convolution, [2 H K + HV V, width].
        conv_bias, conv_activation: bias and activation, as in `causal_conv1d_update`.
        initial_state: the pool of states, as in `packed_decode_gated_delta_rule`.
        state_indices: [N], the slot of each sequence in both pools. For a sequence of padding,
            neither pool is changed and the results are 0.

    Other arguments, results and errors are those of `packed_decode_gated_delta_rule`.
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
