"""Launches the kernels that every attention family uses."""

import torch
from torch import Tensor

from qla_kernels.attn.kernels import delta as kernel
from qla_kernels.runtime import jit
from qla_kernels.tile.constants import LOG2E

TMA_ROW = 4  # fp32 numbers in 16 bytes; rows of `stats` are multiples of that


def row_stats(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, *, base2: bool) -> Tensor:
    """Returns a backward's statistics of each query row, lse2 and delta: [B, H, 2, T'] fp32.

    T' is T rounded up to a multiple of 4. Padding rows, and rows whose lse is -inf, get lse2 =
    +inf, so that their P is 0.

    Args:
        o, do: [B, T, H, D] of one dtype, D 64, 128 or 256; unit last stride, other strides
            multiples of 16 bytes.
        lse: [B, H, T] fp32, any strides; in base 2 if `base2`, else natural.
        dlse: [B, H, T] fp32, any strides: the gradient of the natural lse; None stands for 0.
        base2: whether `lse` is in base 2.
    """
    B, T, H, D = o.shape
    out = lse.new_empty(B, H, 2, -(-T // TMA_ROW) * TMA_ROW)
    pieces = (D // kernel.SPAN, kernel.SPAN)
    if out.numel():
        variant = kernel.Variant(str(o.dtype).removeprefix("torch."), wide=D > 128)
        jit.compile(kernel, variant)(
            torch.unflatten(o, -1, pieces),
            torch.unflatten(do, -1, pieces),
            lse,
            lse if dlse is None else dlse,
            out,
            1.0 if base2 else LOG2E,
            int(dlse is not None),
        )
    return out
