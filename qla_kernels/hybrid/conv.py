"""The public function `shared_prefix_conv1d`: the causal convolution with shared prompts."""

from torch import Tensor

from qla_kernels.conv.autograd import convolve
from qla_kernels.conv.shapes import WIDTHS
from qla_kernels.conv.validate import as_given, by_tokens, check_norm, check_tensors, refusal
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.hybrid.conv_tables import OP, prepare
from qla_kernels.hybrid.layouts import check_layout
from qla_kernels.runtime.arguments import integer
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import require


def shared_prefix_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: SharedLayout,
    activation: str | None = None,
    *,
    qk_l2norm: tuple[int, int] | None = None,
) -> Tensor:
    """Computes `causal_conv1d` over packed sequences that store shared prefixes once.

    A prompt is stored once, and its responses follow it. The convolution of the first tokens of
    each response reads the last tokens of its prompt. In general, sequences may share prefixes as a
    tree, and a token reads the W - 1 tokens before it in its own sequence, wherever they are
    stored. Results and gradients equal those of running each sequence alone; the gradient of a
    shared token is the sum over the sequences that contain it. Second derivatives and forward-mode
    tangents raise Unsupported.

    A GPU must be a Hopper; x is then bf16 or fp16, and weight and bias are bf16, fp16 or fp32. The
    channels of x must be a multiple of 8 and adjacent in memory, and the distance between tokens a
    multiple of 16 bytes. On a GPU the first call with a layout builds the kernels' index tables on
    the host. Call `prepare_conv1d` to build them earlier; torch.compile and CUDA graph captures
    require this.

    Args:
        x: [T, channels] packed tokens, or [1, channels, T].
        weight: [channels, W], W from 2 to 4.
        bias: [channels]; 0 if None.
        layout: which tokens form which sequence, on x's device: the `layout` of a `SharedBatch`, or
            SharedLayout.from_forest(..).
        activation: None, "silu" or "swish" (the same as silu).
        qk_l2norm: (heads, size): the first heads * size channels of y are heads of `size` channels,
            and each is divided by its L2 norm. None: no head is.

    Returns:
        y in x's shape and dtype; channels are adjacent in memory.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: the arguments fit, but this version cannot run them; see
            `qla_kernels.conv.refusal`.
    """
    check_tensors(OP, x, weight, bias, activation)
    norm = check_norm(OP, qk_l2norm, x.shape[1])
    rows = by_tokens(x)
    check_layout(OP, "x", rows, layout)
    require(refusal(x, weight, bias, norm, op=OP))
    tables = prepare(layout, weight.shape[1])
    return as_given(convolve(rows, weight, bias, activation is not None, tables, norm), x)


def prepare_conv1d(layout: SharedLayout, width: int) -> None:
    """Builds the index tables that `shared_prefix_conv1d` needs for a layout.

    Otherwise the first call with the layout builds them, which it cannot do in compiled code or
    while a CUDA graph is captured. Raises ValueError if the width is not supported.

    Args:
        layout: the layout of the calls, which will hold the tables.
        width: W of the weight [channels, W], from 2 to 4.
    """
    if integer(OP, "width", width) not in WIDTHS:
        needs = f"{WIDTHS[0]} to {WIDTHS[-1]}"
        raise ValueError(need(OP, f"width={width}", needs, "pass the width of the weight"))
    prepare(layout, width)
