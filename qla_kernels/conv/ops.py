"""The operators: their signatures, and what runs CPU tensors, which is the reference.

    conv_fwd, conv_bwd   the convolution of packed tokens, and its gradients
    conv_update          the convolution of one token of each sequence, with a pool of last tokens
    conv_prefill         that of packed sequences which go on from such a pool

In the first two x is [B, T, C]. The list `tables` says which tokens belong to which sequence:

    empty                each batch row is a sequence
    one tensor           B is 1; the tensor is cu_seqlens, [N + 1] int32 or int64
    a ConvTables         B is 1; the sequences form a prefix tree; on the CPU only two are read

The first norm_heads * norm_size channels are heads of norm_size channels, whose L2 norm becomes 1.
The gradient of y may be in up to three tensors: dy [B, T, n] is the gradient of the first n
channels, dy2 that of the next channels, and dy3 that of the last; each n is a multiple of 8.

CUDA tensors go to launch.py. No result shares memory with an argument.
"""

from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qla_kernels.conv.validate import SLOTS, UPDATE_OP
from qla_kernels.runtime.contents import check_places
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.op import Overwritten, op

LAUNCHES = "qla_kernels.conv.launch"


class ConvTables(NamedTuple):
    """Tables of a prefix tree for a weight of width W; int32, on x's device.

    A node is a run of tokens, such as a prompt or a response. The halo of a node is the W - 1
    tokens of its sequence before its first token; they are in other nodes. Nodes are numbered in
    packed order.

    The gradient of a token in a halo has a part from its own node and one from each node that reads
    the token. The parts are rows of a workspace, which are then added: first the parts from the own
    nodes, in the order of `shared`, then those of the halos, node by node.
    """

    bounds: Tensor  # [nodes + 1] first token of each node, then T
    halo: Tensor  # [nodes, W - 1] tokens before each node, in order; -1: the sequence has none
    rows: Tensor  # [nodes, 2] column KEPT: row of the part of the node's first shared token;
    #               column GIVEN: row of the part of the halo's last token. -1: none
    shared: Tensor  # [shared tokens] tokens that are in a halo, ascending
    first: Tensor  # [shared tokens + 1] where the entries of each one begin in `readers`
    readers: Tensor  # for each shared token, the rows of the parts from other nodes, ascending


class ConvBackward(NamedTuple):
    """Results of conv_bwd, all contiguous."""

    dx: Annotated[Tensor, "like x"]
    dweight: Annotated[Tensor, "like weight"]
    dbias: Annotated[Tensor | None, "like bias"]


@op(LAUNCHES)
def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: list[Tensor],
    silu: bool,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> Annotated[Tensor, "like x"]:
    """Returns y [B, T, C], contiguous."""
    heads, nodes = (norm_heads, norm_size), _nodes(x, tables)
    y: Tensor = reference().conv.forward(x.flatten(0, 1), weight, bias, silu, *nodes, heads=heads)
    return y.view(x.shape)


@op(LAUNCHES)
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
    """Returns the gradients; the same bits each time."""
    dy = torch.cat([part for part in (dy, dy2, dy3) if part is not None], 2)
    heads, nodes = (norm_heads, norm_size), _nodes(x, tables)
    done = reference().conv.backward(
        dy.flatten(0, 1), x.flatten(0, 1), weight, bias, silu, *nodes, heads=heads
    )
    return ConvBackward(done.dx.view(x.shape), done.dweight.contiguous(), done.dbias)


@op(LAUNCHES)
def conv_update(
    x: Tensor,
    rows: Overwritten,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    null_slot: int,
    silu: bool,
    y: Overwritten,
    norm_heads: int = 0,
    norm_size: int = 0,
) -> None:
    """Writes y [N, C], and the rows of the pool [slots, C, W - 1 or more] that are used."""
    slots = torch.arange(len(x)) if indices is None else indices.long()
    if indices is not None:
        check_places(UPDATE_OP, SLOTS, indices, rows.shape[0], null_slot)
    live = slots > null_slot
    last = rows[..., : weight.shape[1] - 1]
    heads = norm_heads, norm_size
    results, after = reference().conv.update(x[live], last[slots[live]], weight, bias, silu, heads)
    y.copy_(torch.zeros_like(y).index_put((live,), results))  # y may be x
    last[slots[live]] = after


@op(LAUNCHES)
def conv_prefill(
    x: Tensor,
    rows: Overwritten,
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
) -> Annotated[Tensor, "like x"]:
    """Returns y [T, C], and writes slots of the pool [slots, C, W - 1 or more]."""
    reach, y, later = weight.shape[1] - 1, torch.zeros(x.shape, dtype=x.dtype), []
    heads = norm_heads, norm_size
    for n, (first, end) in enumerate(pairwise(bounds.tolist())):
        if first == end:
            continue
        old = x.new_zeros(reach, x.shape[1])
        if (start := int(starts[n])) > null_slot:
            old = rows[start, :, :reach].T
        line = torch.cat([old, x[first:end]])
        whole = torch.tensor([0, len(line)])
        done = reference().conv.forward(line, weight, bias, silu, whole, heads=heads)
        y[first:end] = done[reach:]
        stops = [(int(ends[n]), end - first)]
        if offsets is not None and kept is not None and 0 < int(offsets[n]) <= end - first:
            stops.append((int(kept[n]), int(offsets[n])))
        later += [(slot, line[stop : stop + reach].T) for slot, stop in stops if slot > null_slot]
    for slot, last in later:
        rows[slot, :, :reach] = last
    return y


def _nodes(x: Tensor, tables: list[Tensor]) -> list[Tensor]:
    """Returns the bounds of nodes and, for a tree, their halo."""
    B, T, _ = x.shape
    return tables[:2] or [torch.arange(B + 1) * T]
