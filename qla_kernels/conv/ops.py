"""The operators as torch sees them: schemas, fake implementations and dispatch by device.

    conv_fwd, conv_bwd   the convolution of packed tokens, and its gradients
    conv_update          one token of each sequence, on a pool of last tokens

In the first two x is [B, T, C]. `tables` describe the sequences:

    none                 each batch row is one
    [bounds]             B is 1; cu_seqlens, [N + 1] int32 or int64
    all of ConvTables    B is 1; nodes of a tree; cpu.py reads the first two alone

The first norm_heads * norm_size channels are heads that the convolution normalises. The gradient of
y may lie in three tensors: dy has that of the first channels, dy2 and dy3 those of the channels
behind it, [B, T, channels of it] each, a multiple of 8.

CPU tensors go to cpu.py and CUDA tensors to launch.py; each has a function named like the operator,
and is imported when an operator first gets such a tensor. No result shares memory with an argument.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.op import define_direct
from qla_kernels.runtime.programs import Programs

SCHEMAS = {
    "conv_fwd": """(
        Tensor x, Tensor weight, Tensor? bias, Tensor[] tables, bool silu, int norm_heads=0,
        int norm_size=0
    ) -> Tensor""",
    "conv_bwd": """(
        Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor[] tables, bool silu,
        int norm_heads=0, int norm_size=0, Tensor? dy2=None, Tensor? dy3=None
    ) -> (Tensor dx, Tensor dweight, Tensor? dbias)""",
    "conv_update": """(
        Tensor x, Tensor(a!) rows, Tensor weight, Tensor? bias, Tensor? indices, int null_slot,
        bool silu, Tensor(b!) y, int norm_heads=0, int norm_size=0
    ) -> ()""",
}


class ConvTables(NamedTuple):
    """Tables of a tree for one width W; int32, on x's device. Nodes are numbered in packed order.

    A gradient of a token that other nodes read is a sum of *parts*, rows of a workspace. First come
    the parts from the own nodes of such tokens, in the order of `shared`; then those that each node
    gives to the tokens of its halo.
    """

    bounds: Tensor  # [nodes + 1] first token of each node, then T
    halo: Tensor  # [nodes, W - 1] the tokens before a node's first, the nearest last; -1: none
    rows: Tensor  # [nodes, 2] KEPT: row of the first of the node's last min(W - 1, tokens) tokens;
    #               GIVEN: row of its halo's last token, behind those of the others. -1: none
    shared: Tensor  # [shared tokens] tokens that other nodes read, ascending
    first: Tensor  # [shared tokens + 1] entries of `readers` before each
    readers: Tensor  # rows of other nodes' parts of each shared token, ascending


class ConvForward(NamedTuple):
    """The result of conv_fwd."""

    y: Tensor  # [B, T, C] in x's dtype

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


class ConvBackward(NamedTuple):
    """Results of conv_bwd; each has the shape and dtype of its input."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None

    def flat(self) -> tuple[Tensor | None, ...]:
        return self


def _fake_conv_fwd(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> ConvBackward:
    dbias = None if bias is None else bias.new_empty(bias.shape)
    return ConvBackward(x.new_empty(x.shape), weight.new_empty(weight.shape), dbias)


def _fake_conv_update(*_: Any) -> None:
    return None


HOMES = "qla_kernels.conv.launch", "qla_kernels.conv.cpu"  # for CUDA and CPU tensors

# As this package calls them
conv_fwd = define_direct("conv_fwd", SCHEMAS["conv_fwd"], _fake_conv_fwd, *HOMES)
conv_bwd = define_direct("conv_bwd", SCHEMAS["conv_bwd"], _fake_conv_bwd, *HOMES)
conv_update = define_direct("conv_update", SCHEMAS["conv_update"], _fake_conv_update, *HOMES)

_FORWARDS, _BACKWARDS = Programs("conv_fwd"), Programs("conv_bwd")


def forward(*arguments: Any) -> Tensor:
    """Runs conv_fwd, replayed if possible."""
    return _FORWARDS.run(lambda given: ConvForward(conv_fwd(*given)), (arguments,), ConvForward).y


def backward(*arguments: Any) -> ConvBackward:
    """Runs conv_bwd, replayed if possible."""
    return _BACKWARDS.run(lambda given: ConvBackward(*conv_bwd(*given)), (arguments,), ConvBackward)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Returns whether grad mode is on and one of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
