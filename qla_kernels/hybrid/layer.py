"""The public function `gated_delta_net`: a layer between its input and output projections."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.conv import validate as conv
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.gdn import chunk_gated_delta_rule
from qla_kernels.hybrid import conv_tables
from qla_kernels.hybrid.delta import shared_prefix_gated_delta_rule
from qla_kernels.hybrid.layouts import check_layout
from qla_kernels.hybrid.recompute import Convolution, recomputed_rule
from qla_kernels.norm import validate as norm
from qla_kernels.norm.autograd import normalise
from qla_kernels.runtime.arguments import (
    GATE_ACTIVATIONS,
    check_activation,
    check_epsilon,
    flag,
    integer,
)
from qla_kernels.runtime.derivatives import wants_gradients
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import Signature
from qla_kernels.runtime.sm90 import expect_tensors, require

OP = "gated_delta_net"
CALL = Signature(
    "mixed_qkv [B, T, channels]; z [B, T, HV, V] as mixed_qkv; a [B, T, HV]; b [B, T, HV];"
    "A_log [HV]; norm_weight [V]",
    mixed_qkv="pass [B, T, 2 H K + HV V], with a dimension of the batch",
    z="split its last dimension into heads",
)


def gated_delta_net(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    *,
    key_heads: int,
    z: Tensor,
    norm_weight: Tensor,
    norm_eps: float = 1e-6,
    z_activation: str = "silu",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    layout: SharedLayout | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes a gated-delta-net layer between its input projections and its output projection.

        q, k, v = causal_conv1d(mixed_qkv), q and k divided by their L2 norms
        g = -exp(A_log) * softplus(a + dt_bias)
        o = chunk_gated_delta_rule(q, k, v, g, sigmoid(b))
        y = gated_rms_norm(o, z)

    The result equals that of these three functions, but there are fewer launches: the kernel of the
    convolution also divides q and k by their norms, and its backward reads the gradients of q, k
    and v from three tensors, without a concatenation. Differentiable once, in every tensor. Saves
    mixed_qkv, q, k, v, o and z for the backward, and what the gated delta rule saves.

    Args:
        mixed_qkv: [B, T, 2 * H * K + HV * V]: H queries, H keys and HV values of each token.
        a, b: [B, T, HV], the inputs of the gate and of beta's sigmoid.
        A_log, dt_bias: [HV]; dt_bias may be None.
        conv_weight: [2 * H * K + HV * V, width], width from 2 to 4.
        conv_bias: [2 * H * K + HV * V]; 0 if None.
        conv_activation: None, "silu" or "swish" (the same as silu).
        key_heads: H.
        z: [B, T, HV, V] in mixed_qkv's dtype, the input of the output gate; z may be a slice of a
            projection.
        norm_weight: [V], the weight of the RMSNorm.
        norm_eps: added to the mean of o^2.
        z_activation: of the output gate: "silu", "swish" or "sigmoid".
        scale: factor of q; K ** -0.5 if None.
        initial_state: [N, HV, K, V], the state from which the gated delta rule starts each of N
            sequences; 0 if None. The convolution always starts a sequence from zeros.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: False leaves q and k as they are.
        allow_neg_eigval: beta is 2 * sigmoid(b).
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1], the bounds of N packed sequences; B must then be 1. None: each batch
            row is a sequence, and N is B.
        cu_seqlens_cpu: the same bounds on the CPU; optional. With them the host knows the lengths
            of sequences when it cuts long ones into segments, which run in parallel on a GPU.
        layout: the `layout` of a `SharedBatch`, if the packed sequences store shared prefixes once;
            see `shared_prefix_gated_delta_rule`. Not with cu_seqlens or initial_state.
        recompute: True saves memory: q, k and v are not saved, and the backward runs the
            convolution again. Ignored in a compiled graph.

    Returns:
        y [B, T, HV, V] in mixed_qkv's dtype, and the final states [N, HV, K, V] in fp32 (fp64 where
        mixed_qkv is fp64), or None.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them.
    """
    CALL.check(OP, mixed_qkv, z, a, b, A_log, norm_weight)
    expect_tensors(OP, conv_weight=conv_weight)
    H, K, HV, V = _sizes(mixed_qkv, z, key_heads)
    normed = flag(OP, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    tables = _sequences(mixed_qkv, conv_weight, initial_state, cu_seqlens, layout)
    heads = (2 * H, K) if normed else None
    check_epsilon(OP, "norm_eps", norm_eps)
    check_activation(OP, "z_activation", z_activation, GATE_ACTIVATIONS)
    rows = mixed_qkv.mT  # as torch's convolutions take them
    conv.check_tensors(OP, rows, conv_weight, conv_bias, conv_activation, cu_seqlens)
    require(conv.refusal(rows, conv_weight, conv_bias, heads, op=OP))
    require(norm.refusal(z, z, norm_weight, op=OP, names=("z", "z")))
    convolution = Convolution(
        mixed_qkv,
        conv_weight,
        conv_bias,
        conv_activation is not None,
        (2 * H, K) if normed else (0, 0),
        (H, K, HV, V),
        tables,
    )
    inputs = mixed_qkv, a, b, A_log, dt_bias, conv_weight, conv_bias, initial_state
    again = flag(OP, "recompute", recompute) and wants_gradients(inputs)
    options: dict[str, Any] = {
        "scale": scale, "output_final_state": output_final_state, "state_v_first": state_v_first,
        "allow_neg_eigval": allow_neg_eigval, "A_log": A_log, "dt_bias": dt_bias,
    }  # fmt: skip
    if again and not torch.compiler.is_compiling():
        o, final = recomputed_rule(
            OP, convolution, a, b, initial_state, cu_seqlens, cu_seqlens_cpu, layout, **options
        )
    else:
        q, k, v = convolution.sections()
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        if layout is not None:
            o, final = shared_prefix_gated_delta_rule(q, k, v, a, b, layout, **options)
        else:
            options |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
            o, final = chunk_gated_delta_rule(q, k, v, a, b, initial_state=initial_state, **options)
    ends = [] if cu_seqlens is None else [cu_seqlens]
    return normalise(o, z, norm_weight, ends, norm_eps, z_activation != "sigmoid"), final


def _sizes(mixed_qkv: Tensor, z: Tensor, key_heads: int) -> tuple[int, int, int, int]:
    """Returns H, K, HV and V. Raises ValueError unless the channels are those of H key heads."""
    H, C, (HV, V) = integer(OP, "key_heads", key_heads), mixed_qkv.shape[2], z.shape[2:]
    if H < 1 or HV % H:
        got, needs = f"key_heads={H} with {HV} value heads", "a divisor of the value heads"
        raise ValueError(need(OP, got, needs, "pass the number of key heads"))
    if C <= HV * V or (C - HV * V) % (2 * H):
        got = f"mixed_qkv has {C} channels, {HV * V} of them values"
        needs = f"2 K for each of {H} key heads besides"
        raise ValueError(need(OP, got, needs, "pass queries, keys and values, in this order"))
    return H, (C - HV * V) // (2 * H), HV, V


def _sequences(
    mixed_qkv: Tensor,
    conv_weight: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: SharedLayout | None,
) -> list[Tensor]:
    """Returns the tables that tell the convolution which tokens are of which sequence.

    See `tables` in qla_kernels/conv/ops.py. Raises ValueError unless cu_seqlens or layout fits the
    tokens of mixed_qkv.
    """
    if layout is not None:
        for name, x in (("cu_seqlens", cu_seqlens), ("initial_state", initial_state)):
            if x is not None:
                fix = "leave it out: the layout says where sequences begin, from a state of 0"
                raise ValueError(need(OP, f"{name} beside layout", "one of the two", fix))
        check_layout(OP, "mixed_qkv", mixed_qkv, layout)
        return list(conv_tables.prepare(layout, conv_weight.shape[-1]))
    if cu_seqlens is None:
        return []
    return [cu_seqlens]
