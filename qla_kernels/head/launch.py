"""The operators of ops.py on CUDA tensors: matrix products by cuBLAS, and our kernels between them.

Logits are computed in blocks of TOKENS rows and COLUMNS columns, so that at most 528 MiB of fp32
logits are in memory at a time:

    head_fwd    for each block: logits by cuBLAS, then row_sums
    head_bwd    for each block: logits by cuBLAS, their gradients by row_grads, and the products of
                these with weight and hidden by cuBLAS

The outer loop is over columns, the vocabulary. If all rows fit into one block, each row of dweight
is one product, whose sum over all tokens stays in fp32 accumulators. dhidden is summed over blocks
in fp32. LoRA's factors are further columns of hidden and of the weight.

Nothing here reads a tensor's values, so the host does not wait for the GPU.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.head.kernels import row_grads as grads_kernel
from qla_kernels.head.kernels import row_sums as sums_kernel
from qla_kernels.head.ops import HeadBackward, HeadForward, Wanted
from qla_kernels.head.shapes import BIAS, COLUMNS, FIRST, LAST, PIECE, TOKENS
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import dtype_name

ALIGNED = 8  # columns of 16 bits in 16 bytes; cuBLAS is several times slower on others


class Curve(NamedTuple):
    """The numbers with which the kernels apply temperature and softcap to logits.

    A logit z becomes x = softcap tanh(z / softcap) / temperature, or z / temperature without a cap.
    """

    top2: float  # the largest x, or without a cap the factor of z; times log2 e, for base 2
    curve: float  # 2 log2 e / softcap, or 0 without a cap
    slope: float  # 1 / temperature: the derivative of x at z = 0
    bend: float  # top2^-2, or 0 without a cap: the derivative is slope (1 - bend x^2), x in base 2


class Product(NamedTuple):
    """The matrices whose product is the logits, and a buffer for one block of logits."""

    left: Tensor  # [N, D or more] hidden, and LoRA's `low` as further columns
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    up: Tensor | None  # [V, r] LoRA's second factor
    curve: Curve
    logits: Tensor  # [TOKENS or fewer, COLUMNS / PIECE, PIECE] the buffer

    def right(self, columns: slice) -> Tensor:
        """Returns the right matrix of a block: these rows of the weight, and of `up` beside them.

        It has as many columns as `left`, and left's dtype.
        """
        weight = self.weight[columns].to(self.left.dtype)
        return weight if self.up is None else _beside(weight, self.up[columns])

    def block(self, rows: slice, right: Tensor) -> Tensor:
        """Computes the logits of a block into the buffer; returns the rows that it wrote."""
        out = self.logits[: rows.stop - rows.start]
        multiply(self.left[rows], right.mT, out.flatten(1)[:, : right.shape[0]])
        return out

    def bias_of(self, columns: slice) -> Tensor:
        """Returns the bias of these columns in fp32, or a placeholder if there is no bias."""
        return self.logits.view(-1)[:1] if self.bias is None else self.bias[columns].float()


@torch.no_grad()
def head_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    first: Tensor,
    temperature: float,
    softcap: float,
) -> HeadForward:
    """Computes log-probabilities, the log-sum-exp in base 2, and entropies, in fp32; see ops.py.

    The log-probability of a target outside of the vocabulary is NaN.
    """
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    with device.of(hidden), torch.autocast(hidden.device.type, enabled=False):
        logprobs = hidden.new_full(targets.shape, math.nan, dtype=torch.float32)
        lse2, entropy = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
        if not num_rows:
            return HeadForward(logprobs, lse2, entropy)
        state = hidden.new_empty(num_rows, sums_kernel.STATE, dtype=torch.float32)
        product = _product(hidden, weight, bias, low, up, temperature, softcap)
        kernel = jit.compile(sums_kernel, sums_kernel.Variant("float32"))
        for columns in _parts(vocabulary, COLUMNS):
            right, of_columns = product.right(columns), product.bias_of(columns)
            flags = FIRST * (columns.start == 0) + LAST * (columns.stop == vocabulary)
            flags += BIAS * (bias is not None)
            for rows in _parts(num_rows, TOKENS):
                kernel(
                    product.block(rows, right), of_columns, targets, _firsts(first, rows),
                    state[rows], logprobs, lse2[rows], entropy[rows], right.shape[0], columns.start,
                    flags, product.curve.top2, product.curve.curve,
                )  # fmt: skip
    return HeadForward(logprobs, lse2, entropy)


@torch.no_grad()
def head_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    first: Tensor,
    lse2: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float,
    wanted: list[bool],
) -> HeadBackward:
    """Computes the gradients that are `wanted`, contiguous, in the dtypes of their inputs."""
    want = Wanted(*wanted)
    num_rows, D = hidden.shape
    vocabulary = weight.shape[0]
    with device.of(hidden), torch.autocast(hidden.device.type, enabled=False):
        dweight = weight.new_empty(weight.shape) if want.weight else None
        dbias = bias.new_empty(bias.shape) if bias is not None and want.bias else None
        dup = up.new_empty(up.shape) if up is not None and want.up else None
        of_weights = [x for x in (dweight, dbias, dup) if x is not None]
        if not num_rows:
            nothing = [x.new_zeros(x.shape) for x in (hidden, low) if x is not None]
            dhidden, dlow = nothing if len(nothing) == 2 else (*nothing, None)
            for x in of_weights:
                x.zero_()
            return HeadBackward(dhidden, dweight, dbias, dlow, dup)
        product = _product(hidden, weight, bias, low, up, temperature, softcap)
        dz = hidden.new_empty(product.logits.shape)
        dleft = None
        if want.hidden or want.low:
            dleft = product.left.new_empty(product.left.shape, dtype=torch.float32)
        kernel = jit.compile(grads_kernel, grads_kernel.Variant(dtype_name(hidden.dtype)))
        for columns in _parts(vocabulary, COLUMNS):
            right, of_columns = product.right(columns), product.bias_of(columns)
            num_columns, flags = right.shape[0], BIAS * (bias is not None)
            sums = [_sum_of(x[columns], num_rows) for x in of_weights]
            for rows in _parts(num_rows, TOKENS):
                logits = product.block(rows, right)
                kernel(
                    logits, of_columns, targets, _firsts(first, rows), lse2[rows], entropy[rows],
                    dlogprobs, dentropy, dz[: logits.shape[0]], num_columns, columns.start, flags,
                    *product.curve,
                )  # fmt: skip
                grads, more = dz[: logits.shape[0]].flatten(1)[:, :num_columns], rows.start > 0
                if dleft is not None:
                    multiply(grads, right, dleft[rows], columns.start > 0)
                outputs = iter(sums)
                if dweight is not None:
                    multiply(grads.mT, hidden[rows], next(outputs), more)
                if dbias is not None:
                    _add(grads.sum(0, dtype=torch.float32), next(outputs), more)
                if dup is not None and low is not None:
                    multiply(grads.mT, low[rows].to(grads.dtype), next(outputs), more)
            for x, total in zip(of_weights, sums, strict=True):
                if total.dtype != x.dtype:
                    x[columns] = total
        dhidden = dlow = None
        if dleft is not None and want.hidden:
            dhidden = dleft[:, :D].to(hidden.dtype, memory_format=torch.contiguous_format)
        if dleft is not None and low is not None and want.low:
            dlow = dleft[:, D : D + low.shape[1]].to(low.dtype).contiguous()
    return HeadBackward(dhidden, dweight, dbias, dlow, dup)


def multiply(a: Tensor, b: Tensor, out: Tensor, more: bool = False) -> None:
    """Writes the matrix product a b to `out`, or adds it to `out` if `more` is True.

    Sums are fp32 and are rounded once, to out's dtype.
    """
    if not a.is_cuda:  # in the emulator
        _add(a.float() @ b.float(), out, more)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if more else torch.mm(a, b, out=out)
    elif more:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add(x: Tensor, out: Tensor, more: bool) -> None:
    out.copy_(out + x if more else x)


def _product(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: float,
    softcap: float,
) -> Product:
    left = hidden if low is None else _beside(hidden, low)
    rows = min(TOKENS, hidden.shape[0])
    logits = hidden.new_empty(rows, COLUMNS // PIECE, PIECE, dtype=torch.float32)
    return Product(left, weight, bias, up, curve_of(temperature, softcap), logits)


def curve_of(temperature: float, softcap: float) -> Curve:
    """Returns the numbers with which kernels apply a temperature and a softcap; 0 is no softcap."""
    log2e = math.log2(math.e)
    if not softcap:
        return Curve(log2e / temperature, 0.0, 1 / temperature, 0.0)
    top2 = softcap * log2e / temperature
    return Curve(top2, 2 * log2e / softcap, 1 / temperature, top2**-2)


def _beside(x: Tensor, y: Tensor) -> Tensor:
    """Returns the columns of x, then those of y, then zeros up to a multiple of ALIGNED columns."""
    columns = x.shape[1] + y.shape[1]
    nothing = x.new_zeros(x.shape[0], -columns % ALIGNED)
    return torch.cat([x, y.to(x.dtype), nothing], 1)


def _sum_of(x: Tensor, num_rows: int) -> Tensor:
    """Returns the tensor in which a gradient is summed over blocks of rows.

    That is x, its final place, if there is one block or if x is fp32; otherwise a new fp32 tensor.
    """
    in_one_go = num_rows <= TOKENS
    return x if in_one_go or x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)


def _firsts(first: Tensor, rows: slice) -> Tensor:
    return first[rows.start : rows.stop + 1]


def _parts(size: int, most: int) -> Iterator[slice]:
    return (slice(i, min(i + most, size)) for i in range(0, size, most))
