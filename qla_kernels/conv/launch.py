"""The operators of ops.py on CUDA tensors: makes views and launches kernels.

    conv_fwd     launches fwd
    conv_bwd     launches bwd, for a prefix tree join_parts, and weight_sums
    conv_update  launches update
    conv_prefill launches prefill

Nothing here reads a tensor's values, so the host does not wait for the GPU.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.conv.heads import heads_of, tile_ctas
from qla_kernels.conv.heuristics import run_tokens
from qla_kernels.conv.kernels import bwd as bwd_kernel
from qla_kernels.conv.kernels import fwd as fwd_kernel
from qla_kernels.conv.kernels import join_parts as join_parts_kernel
from qla_kernels.conv.kernels import prefill as prefill_kernel
from qla_kernels.conv.kernels import update as update_kernel
from qla_kernels.conv.kernels import weight_sums as weight_sums_kernel
from qla_kernels.conv.ops import ConvBackward, ConvTables
from qla_kernels.conv.shapes import PIECE, RUNS
from qla_kernels.conv.validate import FAR, OP, PREFILL_OP, UPDATE_OP, flattens, token_step
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.native.recording import overwritten
from qla_kernels.runtime.sm90 import FLOATS, dtype_name, low_words, readable, require_aligned


@torch.no_grad()
def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: list[Tensor],
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> Tensor:
    """Computes the convolution; returns y [B, T, C], contiguous, in x's dtype. See ops.py."""
    require_aligned(OP, x=x)
    y = x.new_empty(x.shape)
    if not y.numel():
        return y
    with device.of(x):
        variant = fwd_kernel.Variant(dtype_name(x.dtype), weight.shape[1])
        shares = _shares(x, fwd_kernel.schedule(variant).ctas_per_sm, norm_heads, norm_size)
        nodes, parameters = _nodes(x, weight.shape[1], tables), _parameters(weight, bias)
        jit.compile(fwd_kernel, variant)(
            _rows(x),
            *parameters.tensors,
            nodes.bounds,
            nodes.halo,
            _rows(y),
            *nodes.numbers,
            *shares.numbers,
            *parameters.numbers,
            0.0 if silu else 1.0,
        )
    return y


@torch.no_grad()
def conv_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: list[Tensor],
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
    dy2: Tensor | None = None,
    dy3: Tensor | None = None,
) -> ConvBackward:
    """Computes the gradients dx, dweight and dbias, contiguous, in the dtypes of their inputs."""
    require_aligned(OP, x=x)
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    dbias = None if bias is None else bias.new_empty(bias.shape)
    if not dx.numel():
        return ConvBackward(dx, dweight.zero_(), None if dbias is None else dbias.zero_())
    C, W = weight.shape
    with device.of(x):
        gradients = _gradients(dy, dy2, dy3)
        variant = bwd_kernel.Variant(dtype_name(x.dtype), W)
        shares = _shares(x, bwd_kernel.schedule(variant).ctas_per_sm, norm_heads, norm_size)
        nodes, parameters = _nodes(x, W, tables), _parameters(weight, bias)
        sums = x.new_empty(shares.blocks, W + 1, C // PIECE, PIECE, dtype=torch.float32)
        parts = sums.view(-1, C // PIECE, PIECE)  # placeholder
        tree = ConvTables(*tables) if len(tables) > 1 and tables[3].shape[0] else None
        if tree is not None:  # otherwise no token has parts
            num_parts = tree.shared.shape[0] + tree.readers.shape[0]
            parts = x.new_empty(num_parts, C // PIECE, PIECE, dtype=torch.float32)
        jit.compile(bwd_kernel, variant)(
            *gradients.tensors,
            _rows(x),
            *parameters.tensors,
            nodes.bounds,
            nodes.halo,
            nodes.rows,
            _rows(dx),
            parts,
            sums,
            *gradients.begins,
            *nodes.numbers,
            *shares.numbers,
            *parameters.numbers,
            0.0 if silu else 1.0,
        )
        if tree is not None:
            join = join_parts_kernel.Variant(variant.dtype)
            jit.compile(join_parts_kernel, join)(
                parts, tree.shared, tree.first, tree.readers, _rows(dx)
            )
        of_dweight = dweight.view(torch.uint8).flatten()
        jit.compile(weight_sums_kernel, weight_sums_kernel.Variant(W))(
            sums.view(-1, W + 1, C),
            of_dweight,
            of_dweight if dbias is None else dbias.view(torch.uint8),
            *parameters.numbers[:2],
            W if dbias is None else W + 1,
        )
    return ConvBackward(dx, dweight, dbias)


@torch.no_grad()
def conv_update(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    null_slot: int,
    silu: bool,
    y: Tensor,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> None:
    """Convolves one token of each of N sequences; writes y [N, C] and updates the pool.

    `rows` is the pool [slots, C, W - 1 or more] of the last tokens; only the slots of `indices`
    change.
    """
    require_aligned(UPDATE_OP, x=x, out=y)
    if y.numel():
        with device.of(x):
            W, (_, C) = weight.shape[1], x.shape
            parameters = _parameters(_at_pieces(weight), None if bias is None else _at_pieces(bias))
            nothing = y.view(-1)[:2].view(torch.int32)
            jit.compile(update_kernel, update_kernel.Variant(dtype_name(x.dtype), W))(
                x.as_strided(x.shape, (x.stride(0) if len(x) > 1 else C, 1)),
                *parameters.tensors,
                rows[..., : W - 1],
                nothing if indices is None else low_words(indices),
                y,
                int(indices is not None),
                null_slot,
                _adjacent(rows),
                *heads_of(norm_heads, norm_size),
                *parameters.numbers,
                0.0 if silu else 1.0,
            )
    overwritten(rows, y)  # the dispatcher says so, but may be bypassed


@torch.no_grad()
def conv_prefill(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bounds: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor | None,
    kept: Tensor | None,
    null_slot: int,
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> Tensor:
    """Convolves packed sequences that go on from a pool; returns y [T, C] and updates the pool.

    `rows` is the pool [slots, C, W - 1 or more] of the last tokens. The tables are [N], but for
    bounds [N + 1].
    """
    require_aligned(PREFILL_OP, x=x)
    y = x.new_empty(x.shape)
    if y.numel() and len(starts):
        with device.of(x):
            x, W = x[None], weight.shape[1]
            variant = prefill_kernel.Variant(dtype_name(x.dtype), W)
            places = prefill_kernel.schedule(variant).ctas_per_sm
            shares = _shares(x, places, norm_heads, norm_size)
            parameters = _parameters(weight, bias)
            keeps = (starts, starts) if offsets is None or kept is None else (offsets, kept)
            jit.compile(prefill_kernel, variant)(
                _rows(x),
                *parameters.tensors,
                low_words(bounds),
                rows[..., : W - 1],
                *map(low_words, (starts, ends, *keeps)),
                _rows(y[None]),
                int(offsets is not None),
                null_slot,
                _adjacent(rows),
                *shares.numbers,
                *parameters.numbers,
                0.0 if silu else 1.0,
            )
    else:
        y.zero_()
    overwritten(rows)  # the dispatcher says so, but may be bypassed
    return y


def _adjacent(rows: Tensor) -> int:
    """Returns 1 if a kernel can read PIECE channels of a slot at a time, otherwise 0."""
    begin = rows.data_ptr() % (PIECE * rows.element_size())
    return int(
        rows.stride(1) == 1 and not (begin or rows.stride(0) % PIECE or rows.stride(2) % PIECE)
    )


def _at_pieces(x: Tensor) -> Tensor:
    """Returns x, or a copy if a kernel cannot read PIECE numbers of 16 bits at its address."""
    return x.clone() if x.data_ptr() % (2 * PIECE) else x


class _Nodes(NamedTuple):
    """Which tokens are of which sequence, as the kernels take it.

    A node is a sequence, or a run of tokens of a prefix tree. A table that the call does not have
    is a placeholder, which kernels do not read.
    """

    bounds: Tensor
    halo: Tensor
    rows: Tensor
    numbers: tuple[int, int, int]  # length, num_nodes, in_tree


class _Parameters(NamedTuple):
    """Weight and bias as the kernels take them: bytes, and numbers that say their dtypes."""

    tensors: tuple[Tensor, Tensor]  # weight and bias; without a bias the weight twice
    numbers: tuple[int, int, int]  # weight_dtype, bias_dtype, has_bias


class _Shares(NamedTuple):
    """How the CTAs of a launch divide tokens and channels among them.

    Each warp walks over a run of consecutive tokens, for a tile of channels. A block is the runs of
    one CTA.
    """

    blocks: int  # number of blocks
    numbers: tuple[int, ...]  # tokens of a run, tiles of channels, and the fields of Heads


class _Gradients(NamedTuple):
    """The gradient of y in up to three tensors, each for some of the channels."""

    tensors: tuple[Tensor, Tensor, Tensor]  # from `_rows`; one that is absent is the first again
    begins: tuple[int, int]  # where the second and the third begin, in pieces of channels


def _nodes(x: Tensor, width: int, tables: list[Tensor]) -> _Nodes:
    B, T, _ = x.shape
    nothing = x[0, 0, :8].view(torch.int32)
    halo, rows = nothing[: width - 1].view(1, -1), nothing[:2].view(1, -1)
    if not tables:
        return _Nodes(nothing, halo, rows, (T, B, 0))
    bounds = low_words(tables[0])
    if len(tables) == 1:
        return _Nodes(bounds, halo, rows, (0, bounds.shape[0] - 1, 0))
    tree = ConvTables(*tables)
    return _Nodes(bounds, tree.halo, tree.rows, (0, bounds.shape[0] - 1, 1))


def _parameters(weight: Tensor, bias: Tensor | None) -> _Parameters:
    of_weight = weight.contiguous().view(torch.uint8).flatten()
    of_bias = of_weight if bias is None else bias.contiguous().view(torch.uint8)
    bias_dtype = FLOATS[weight.dtype if bias is None else bias.dtype]
    return _Parameters(
        (of_weight, of_bias), (FLOATS[weight.dtype], bias_dtype, int(bias is not None))
    )


def _rows(x: Tensor) -> Tensor:
    """Returns x [B, T, C] as a view [B T, C / PIECE, PIECE]; its tokens flatten."""
    B, T, C = x.shape
    return x.as_strided((B * T, C // PIECE, PIECE), (token_step(x), PIECE, 1))


def _gradients(*gradients: Tensor | None) -> _Gradients:
    """Returns dy, dy2 and dy3 as the kernel takes them; the first is not None."""
    present = [dy for dy in gradients if dy is not None]
    rows = [_rows(readable(dy) if _is_near(dy) else dy.contiguous()) for dy in present]
    ends = list(accumulate(x.shape[1] for x in rows))
    first, second, third = [*rows, rows[0], rows[0]][:3]
    return _Gradients((first, second, third), (ends[0], ends[:2][-1]))


def _is_near(x: Tensor) -> bool:
    """Returns whether a kernel can read x [B, T, C] as rows of tokens, without a copy.

    The tokens must lie a constant distance apart, of less than FAR bytes.
    """
    return flattens(x) and token_step(x) * x.element_size() < FAR


def _shares(x: Tensor, ctas_per_sm: int, norm_heads: int, norm_size: int) -> _Shares:
    """Returns how CTAs divide x [B, T, C]; an SM holds ctas_per_sm CTAs of the kernel."""
    B, T, C = x.shape
    heads = heads_of(norm_heads, norm_size)
    tiles, runs = tile_ctas(C, heads), RUNS >> heads.wide
    run = run_tokens(B * T, tiles, runs, ctas_per_sm * device.sm_count(x.device))
    return _Shares(-(-B * T // (run * runs)), (run, tiles, *heads))
