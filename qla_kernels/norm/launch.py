"""The operators of ops.py on CUDA tensors: makes views and launches kernels.

    gated_norm_fwd    launches fwd
    gated_norm_into   launches fwd
    gated_norm_bwd    launches bwd and weight_sums

Nothing here reads a tensor's values, so the host does not wait for the GPU.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.norm.heuristics import columns_of, num_blocks
from qla_kernels.norm.kernels import bwd as bwd_kernel
from qla_kernels.norm.kernels import fwd as fwd_kernel
from qla_kernels.norm.kernels import weight_sums as weight_sums_kernel
from qla_kernels.norm.ops import NormBackward
from qla_kernels.norm.shapes import PIECE
from qla_kernels.norm.validate import OP, flattens
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.native.recording import overwritten
from qla_kernels.runtime.sm90 import FLOATS, dtype_name, low_words, readable, require_aligned


@torch.no_grad()
def gated_norm_fwd(
    x: Tensor, gate: Tensor, weight: Tensor, tables: list[Tensor], eps: float, silu: bool
) -> Tensor:
    """Computes the norm and gate; returns y, contiguous, in x's dtype. See ops.py."""
    y = x.new_empty(x.shape)
    _forward(x, gate, weight, tables, eps, silu, y)
    return y


@torch.no_grad()
def gated_norm_into(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool, y: Tensor
) -> None:
    """Writes y, contiguous, which may be x: a thread has read its numbers before it writes them."""
    _forward(x, gate, weight, [], eps, silu, y)
    overwritten(y)  # the dispatcher says so, but may be bypassed


def _forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    tables: list[Tensor],
    eps: float,
    silu: bool,
    y: Tensor,
) -> None:
    require_aligned(OP, x=x, gate=gate)
    if not y.numel():
        return
    with device.of(x):
        call = _call(fwd_kernel, x, weight, tables, eps, silu)
        jit.compile(fwd_kernel, call.variant)(
            _rows(x), _rows(gate), *call.tensors, _flat(y), call.blocks, *call.numbers
        )


@torch.no_grad()
def gated_norm_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    tables: list[Tensor],
    eps: float,
    silu: bool,
) -> NormBackward:
    """Computes the gradients dx, dgate and dweight, contiguous, in the dtypes of their inputs."""
    require_aligned(OP, x=x, gate=gate)
    dx, dgate, dweight = (each.new_empty(each.shape) for each in (x, gate, weight))
    if not dx.numel():
        return NormBackward(dx, dgate, dweight.zero_())
    with device.of(x):
        dy = readable(dy) if flattens(dy) else dy.contiguous()
        call = _call(bwd_kernel, x, weight, tables, eps, silu)
        sums = x.new_empty(call.blocks, x.shape[-1], dtype=torch.float32)
        jit.compile(bwd_kernel, call.variant)(
            _rows(dy), _rows(x), _rows(gate), *call.tensors, _flat(dx), _flat(dgate), sums,
            *call.numbers,
        )  # fmt: skip
        jit.compile(weight_sums_kernel, weight_sums_kernel.VARIANTS[0])(
            sums[:, None], dweight.view(torch.uint8), FLOATS[weight.dtype]
        )
    return NormBackward(dx, dgate, dweight)


class _Call(NamedTuple):
    """The arguments that forward and backward kernels have in common."""

    variant: Any
    blocks: int  # number of CTAs
    tensors: tuple[Tensor, Tensor]  # the weight as bytes, and the end of the last sequence [1]
    numbers: tuple[int, int, int, float, float]  # weight_dtype, packed, silu, 1 / V, eps


def _call(
    kernel: Any, x: Tensor, weight: Tensor, tables: list[Tensor], eps: float, silu: bool
) -> _Call:
    V = x.shape[-1]
    variant = kernel.Variant(dtype_name(x.dtype), columns_of(V))
    places = kernel.schedule(variant).ctas_per_sm * device.sm_count(x.device)
    end = low_words(tables[0])[-1:] if tables else _flat(x)[0, 0, :2].view(torch.int32)
    return _Call(
        variant,
        num_blocks(x.numel() // V, variant.V, places),
        (weight.contiguous().view(torch.uint8), end),
        (FLOATS[weight.dtype], len(tables), int(silu), 1 / V, eps),
    )


def _rows(x: Tensor) -> Tensor:
    """Returns x as a view [tokens, heads, V / PIECE, PIECE]; `flattens` must be true of x."""
    *sizes, V = x.shape
    *steps, _ = x.stride()
    heads, head = (sizes.pop(), steps.pop()) if len(sizes) > 1 else (1, V)
    head = head if heads > 1 else V  # the stride of a single head may be anything
    ordered = zip(sizes[::-1], steps[::-1], strict=True)
    token = next((step for n, step in ordered if n > 1), heads * V)
    tokens = x.numel() // (heads * V)
    return x.as_strided((tokens, heads, V // PIECE, PIECE), (token, head, PIECE, 1))


def _flat(x: Tensor) -> Tensor:
    """Returns a contiguous x as a view [rows, V / PIECE, PIECE]; of any x, the first row."""
    V = x.shape[-1]
    rows = x.numel() // V
    return x.as_strided((rows, V // PIECE, PIECE), (V, PIECE, 1))
