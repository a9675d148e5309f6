"""The kernels that every attention family launches."""

import math

import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.attn.kernels import delta as kernel

LOG2E = 1 / math.log(2)
TMA_ROW = 4  # fp32 numbers in the 16 bytes of which rows of `stats` consist


def row_stats(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, *, base2: bool) -> Tensor:
    """What a backward needs of each query row: [B, H, 2, T'] fp32, lse2 and delta.

    T' is T and up to 3 rows of padding, whose P is 0, as that of rows whose lse is -inf.

    Args:
        o, do: [B, T, H, D] of one dtype, D 64 or 128; unit last stride, others of whole 16 bytes.
        lse: [B, H, T] fp32, any strides; in base 2 if `base2`, else natural.
        dlse: the gradient of the natural lse, likewise; None for 0.
    """
    B, T, H, D = o.shape
    out = lse.new_empty(B, H, 2, -(-T // TMA_ROW) * TMA_ROW)
    pieces = (D // kernel.SPAN, kernel.SPAN)
    if out.numel():
        variant = kernel.Variant(str(o.dtype).removeprefix("torch."))
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
