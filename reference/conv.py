"""The causal convolution of each channel, over packed tokens whose sequences may share beginnings.

    z_t = b + sum_j w_j x[source(t, j)]    j = 0 .. W-1,  w_j = weight[:, W-1-j]        y = act(z)

`heads` is (count, size): the first count * size channels are heads of `size` channels, and each is
divided by (sum y^2 + 1e-6)^1/2 over its channels, after act and before y is rounded.

source(t, 0) is t, and source(t, j) the j-th token before t in its sequence; a term without such a
token is 0. act is silu, or nothing.

Packed tokens form *nodes*: node n is the run of tokens bounds[n] .. bounds[n+1] - 1, which belong
to the same sequences. A node may be empty. Inside a node source(t, j) is t - j. halo[n] names the
W-1 tokens before the node's first, the nearest last, or -1; they may lie in several nodes, all of
them earlier in the order. Without a halo every node is a sequence of its own.

Everywhere: x, y, dy [T, C]; weight [C, W]; bias [C] or None; bounds [nodes + 1]; halo
[nodes, W - 1]. Tokens past the last bound belong to no sequence: they are not read, and their
results are 0. fp64 inputs compute in fp64, all others in fp32.
"""

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn import functional

from .gdn import l2norm, l2norm_backward

NO_HEADS = (0, 0)


class ConvGradients(NamedTuple):
    """Results of `backward`, each in the dtype of its input."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None


def alone(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    heads: tuple[int, int] = NO_HEADS,
) -> Tensor:
    """The definition, for one sequence x [T, C]; differentiable by autograd."""
    C, W = weight.shape
    row, taps = rearrange(_wide(x), "t c -> 1 c t"), rearrange(weight.to(_wide(x)), "c w -> c 1 w")
    bias = None if bias is None else bias.to(row)
    z = functional.conv1d(functional.pad(row, (W - 1, 0)), taps, bias, groups=C)
    return _normalised(_activated(rearrange(z, "1 c t -> t c"), silu), heads).to(x.dtype)


def owners(bounds: Tensor) -> Tensor:
    """The node of each token of a sequence, [bounds[-1]]."""
    return torch.repeat_interleave(bounds.long().diff())


def sources(bounds: Tensor, width: int, halo: Tensor | None = None) -> Tensor:
    """source(t, j) of each token of a sequence, [bounds[-1], W], or -1 where there is none."""
    node = owners(bounds)
    place = torch.arange(node.shape[0], device=bounds.device) - bounds.long()[node]
    back = torch.arange(width, device=bounds.device)
    column = place[:, None] - back + width - 1  # of the line: the halo, then the node's tokens
    inside = column >= width - 1
    before = torch.full_like(column, -1)
    if halo is not None:
        before = halo.long()[node[:, None], column.clamp(max=width - 2)]
    token = bounds.long()[node, None] + column - (width - 1)
    return torch.where(inside, token, before)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    bounds: Tensor,
    halo: Tensor | None = None,
    heads: tuple[int, int] = NO_HEADS,
) -> Tensor:
    """y [T, C] in x's dtype."""
    rows = _taken(x, sources(bounds, weight.shape[1], halo))
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    live = _normalised(_activated(_sum(rows, weight, bias), silu), heads)
    y[: rows.shape[0]] = live.to(x.dtype)
    return y


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    heads: tuple[int, int] = NO_HEADS,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: x [N, C], state [N, C, W - 1], the tokens before it.

    Returns y [N, C] in x's dtype, and the state [N, C, W - 1] for the next token.
    """
    line = torch.cat([state.to(_wide(x)), _wide(x)[..., None]], -1)
    z = einsum(line, weight.to(line), "n c j, c j -> n c")
    z = z if bias is None else z + bias.to(z)
    return _normalised(_activated(z, silu), heads).to(x.dtype), line[..., 1:].to(state.dtype)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    bounds: Tensor,
    halo: Tensor | None = None,
    heads: tuple[int, int] = NO_HEADS,
) -> ConvGradients:
    """The gradients of a loss with gradient dy, written out by hand; z is computed again.

        dz_t = dy_t act'(z_t)      dw_j = sum_t dz_t x[source(t, j)]      db = sum_t dz_t
        line_n[i] = sum_j w_j dz[token i + j - (W-1) of node n]     i = 0 .. W-2 + tokens of node n

    The dy_t of heads is first made the gradient of y before the norm. A node's line has the
    gradients that its tokens give to its halo and to themselves. dx_t is the entry of t's own node,
    plus the entries of all nodes whose halo has t, in ascending order.
    """
    W = weight.shape[1]
    source = sources(bounds, W, halo)
    live, node = source.shape[0], owners(bounds)
    rows = _taken(x, source)
    z, taps = _sum(rows, weight, bias), _taps(weight, rows)
    dz = _before_norm(_activated(z, silu), dy[:live].to(z.dtype), heads)
    if silu:
        s = z.sigmoid()
        dz = dz * s * (1 + z * (1 - s))
    num_nodes = bounds.shape[0] - 1
    line0 = torch.arange(num_nodes, device=x.device) * (W - 1) + bounds.long()[:-1]
    lines = torch.zeros(num_nodes * (W - 1) + live, x.shape[1], dtype=z.dtype, device=x.device)
    place = torch.arange(live, device=x.device) - bounds.long()[node]
    for j in range(W):
        lines.index_add_(0, line0[node] + place + W - 1 - j, dz * taps[j])
    dx = torch.zeros(x.shape, dtype=z.dtype, device=x.device)
    dx[:live] = lines[line0[node] + place + W - 1]
    if halo is not None:
        entry = line0[:, None] + torch.arange(W - 1, device=x.device)
        given = halo >= 0
        dx.index_add_(0, halo[given].long(), lines[entry[given]])  # in ascending order of nodes
    dweight = einsum(dz, rows, "t c, t j c -> c j").flip(1)
    return ConvGradients(
        dx.to(x.dtype),
        dweight.to(weight.dtype),
        None if bias is None else dz.sum(0).to(bias.dtype),
    )


def _taken(x: Tensor, source: Tensor) -> Tensor:
    """x[source], [tokens, W, C], 0 where source is -1."""
    missing = (source < 0)[..., None]
    return _wide(x)[source.clamp(min=0)].masked_fill(missing, 0)


def _sum(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = einsum(rows, _taps(weight, rows), "t j c, j c -> t c")
    return z if bias is None else z + bias.to(z)


def _taps(weight: Tensor, like: Tensor) -> Tensor:
    """w_j, [W, C]."""
    return rearrange(weight.to(like).flip(1), "c j -> j c")


def _activated(z: Tensor, silu: bool) -> Tensor:
    return functional.silu(z) if silu else z


def _normalised(y: Tensor, heads: tuple[int, int]) -> Tensor:
    """y [tokens, C] with its first channels divided by their heads' norms."""
    if not heads[0]:
        return y
    first, rest = _split(y, heads)
    return torch.cat([rearrange(l2norm(first), "t h k -> t (h k)"), rest], -1)


def _before_norm(y: Tensor, dy: Tensor, heads: tuple[int, int]) -> Tensor:
    """The gradient of y, from that of _normalised(y, heads)."""
    if not heads[0]:
        return dy
    d_first, rest = _split(dy, heads)
    done = l2norm_backward(_split(y, heads)[0], d_first)
    return torch.cat([rearrange(done, "t h k -> t (h k)"), rest], -1)


def _split(y: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The heads of y [tokens, C], [tokens, count, size], and its other channels."""
    count, size = heads
    first = rearrange(y[:, : count * size], "t (h k) -> t h k", h=count)
    return first, y[:, count * size :]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
