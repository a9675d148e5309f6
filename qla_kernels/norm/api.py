"""The public function `gated_rms_norm`: checks a call, then refuses or runs it."""

from torch import Tensor

from qla_kernels.norm.autograd import normalise
from qla_kernels.norm.validate import CALL, OP, refusal
from qla_kernels.runtime.arguments import GATE_ACTIVATIONS, check_activation, check_epsilon
from qla_kernels.runtime.signature import check_packed
from qla_kernels.runtime.sm90 import require


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Divides each head of x by its RMS, then multiplies by a weight and a gate; differentiable.

        y = x / sqrt(mean x^2 + eps) * weight * act(gate)

    Here act is the activation, and the mean is over the V columns of the head. Computes in fp32
    (fp64 if x is fp64) and rounds once. The modules `...RMSNormGated` of transformers, which round
    more often, and FLA's `FusedRMSNormGated` compute the same function. Saves x, gate and weight
    for the backward. Gradients are deterministic. Second derivatives and forward-mode tangents
    raise Unsupported.

    On a CPU, tensors may have any strides, in bf16, fp16, fp32 or fp64. A GPU must be a Hopper; x
    and gate are then bf16 or fp16, and weight is bf16, fp16 or fp32. V must be a multiple of 8 up
    to 512, the columns of a head adjacent in memory, and all other strides multiples of 16 bytes,
    as in a slice of a projection.

    Args:
        x: heads of V columns: [B, T, HV, V], [T, HV, V], or [N, V].
        gate: the input of act, with x's shape and dtype.
        weight: [V].
        eps: a float, added to the mean of x^2.
        activation: act of the gate: "silu", "swish" (the same as silu) or "sigmoid".
        cu_seqlens: [N + 1] int32 or int64 on x's device, the bounds of packed sequences; B is 1.
            Tokens past the last sequence are not read, and their results are 0. None: all tokens
            are read.

    Returns:
        y in x's shape and dtype, contiguous.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.norm.refusal`.
    """
    CALL.check(OP, x, gate, weight, cu_seqlens)
    check_epsilon(OP, "eps", eps)
    check_activation(OP, "activation", activation, GATE_ACTIVATIONS)
    if cu_seqlens is not None:
        check_packed(OP, x.shape[0] if x.dim() == 4 else 1)
    require(refusal(x, gate, weight))
    tables = [] if cu_seqlens is None else [cu_seqlens]
    return normalise(x, gate, weight, tables, eps, activation != "sigmoid")
