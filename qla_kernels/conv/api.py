"""The public function `causal_conv1d`: checks a call, then refuses or runs it."""

from torch import Tensor

from qla_kernels.conv.autograd import convolve
from qla_kernels.conv.validate import (
    OP,
    as_given,
    by_tokens,
    check_norm,
    check_tensors,
    refusal,
)
from qla_kernels.runtime.sm90 import require


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    qk_l2norm: tuple[int, int] | None = None,
) -> Tensor:
    """Computes a depthwise causal convolution over the tokens of each sequence; differentiable.

        y_t = act(bias + sum_j weight[:, W-1-j] x_{t-j})    j = 0 .. W-1

    Here act is the activation, and W is the width of the weight. Tokens before the first one of a
    sequence count as 0. Computes in fp32 (fp64 if x is fp64) and rounds once. Gradients are
    deterministic. Second derivatives and forward-mode tangents raise Unsupported.

    On a CPU, tensors may have any strides, in bf16, fp16, fp32 or fp64. A GPU must be a Hopper; x
    is then bf16 or fp16, and weight and bias are bf16, fp16 or fp32. The channels of x must be a
    multiple of 8 and adjacent in memory, and the distance between tokens a multiple of 16 bytes, as
    in a slice of a projection.

    Args:
        x: [T, channels], or [B, channels, T] as in torch's convolutions and causal-conv1d. On a
            GPU, x [B, channels, T] must be the transposed view of a tensor [B, T, channels].
        weight: [channels, W], W from 2 to 4: `conv.weight.squeeze(1)` of an nn.Conv1d.
        bias: [channels]; 0 if None.
        activation: None, "silu" or "swish" (the same as silu).
        cu_seqlens: [N + 1] int32 or int64 on x's device, the bounds of packed sequences; B is 1.
            Tokens past the last sequence are not read, and their results are 0. None: each batch
            row is a sequence; an x of two dimensions is one sequence.
        qk_l2norm: (heads, size): the first heads * size channels of y are heads of `size` channels,
            and each is divided by (sum y^2 + 1e-6)^1/2 before y is rounded. For H queries and H
            keys of K channels it is (2 * H, K); gated_delta_rule then takes q and k as they are. On
            a GPU `size` is a multiple of 16 up to 128, or of 32 up to 256.

    Returns:
        y in x's shape and dtype; channels are adjacent in memory.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.conv.refusal`.
    """
    check_tensors(OP, x, weight, bias, activation, cu_seqlens)
    norm = check_norm(OP, qk_l2norm, x.shape[1])
    require(refusal(x, weight, bias, norm))
    tables = [] if cu_seqlens is None else [cu_seqlens]
    silu = activation is not None
    return as_given(convolve(by_tokens(x), weight, bias, silu, tables, norm), x)
