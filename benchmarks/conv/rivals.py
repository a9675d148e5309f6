"""The convolution: inputs, counted bytes, truth, and who computes it.

The floor of a row is a copy of the same bytes, so ours beside it is the share of a copy's speed.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from qla_kernels.conv import ops
from qla_kernels.dualkv import SharedLayout
from qla_kernels.hybrid import conv_tables

from ..harness.adapters import Call, Implementation, Outputs, backward_of
from ..harness.truth import Truth
from ..harness.workload import Work
from .workloads import GROUP, Convolution


class ConvInputs(NamedTuple):
    x: Tensor  # [T, channels]
    weight: Tensor  # [channels, width]
    bias: Tensor  # [channels]
    dy: Tensor | None  # [T, channels], backward only
    bounds: Tensor  # [nodes + 1] int32


def conv_inputs(
    workload: Convolution, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> ConvInputs:
    generator = torch.Generator(device).manual_seed(seed)
    T, C = workload.tokens, workload.channels

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths = [n for prompt, responses in workload.groups for n in (prompt, *responses)]
    return ConvInputs(
        x=normal(T, C),
        weight=normal(C, workload.width),
        bias=normal(C),
        dy=normal(T, C) if workload.direction == "bwd" else None,
        bounds=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
    )


def conv_work(workload: Convolution, element_size: int) -> Work:
    """Bytes of each tensor once: x and y; in the backward x, dy and dx. A copy moves as many."""
    tensors = 2 if workload.direction == "fwd" else 3
    elements = workload.tokens * workload.channels
    return Work(2.0 * workload.width * elements, tensors * elements * element_size)


def lines(workload: Convolution) -> Iterator[tuple[range, range]]:
    """Each node's tokens, and the tokens before its first that the convolution reads."""
    start = 0
    for tokens, responses in workload.groups:
        prompt = range(start, start + tokens)
        yield prompt, range(0)
        start = prompt.stop
        for length in responses:
            yield range(start, start + length), prompt[max(0, tokens - workload.width + 1) :]
            start += length


def conv_truth(workload: Convolution, inputs: ConvInputs) -> Truth:
    """torch's convolution of each node behind the tokens it reads; fp64 on a CPU, else fp32."""
    dtype = torch.float32 if inputs.x.is_cuda else torch.float64
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    x, weight, bias = leaves
    C, reach = workload.channels, workload.width - 1
    want, dy = [], inputs.dy
    grads = [torch.zeros_like(leaf) for leaf in leaves]
    for node, before in lines(workload):
        here = x[before.start : before.stop], x[node.start : node.stop]
        line = pad(torch.cat(here).T, (reach - len(before), 0))
        y = silu(conv1d(line[None], weight[:, None], bias, groups=C)[0].T)
        want.append(y.detach())
        if dy is not None:
            upstream = dy[node.start : node.stop].to(dtype)
            for total, grad in zip(grads, torch.autograd.grad(y, leaves, upstream), strict=True):
                total += grad
    found = outputs(torch.cat(want)) if dy is None else outputs(*grads)
    return Truth(found, (0,), 1)


def outputs(*tensors: Tensor) -> Outputs:
    """y, or dx, dweight and dbias, in groups of channels: [1, rows, groups, channels of each]."""
    names = ("y",) if len(tensors) == 1 else ("dx", "dw.weight", "dw.bias")
    rows = (x.T if name == "dw.weight" else x for name, x in zip(names, tensors, strict=True))
    return {
        name: x.reshape(1, -1, x.shape[-1] // GROUP, GROUP)
        for name, x in zip(names, rows, strict=True)
    }


def causal_conv1d(inputs: ConvInputs) -> Any:
    function = importlib.import_module("causal_conv1d").causal_conv1d_fn
    lengths = inputs.bounds.diff().long()
    owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return partial(function, seq_idx=owner.int()[None], activation="silu")


def in_torch(inputs: ConvInputs) -> Any:
    """torch's depthwise convolution, then its silu: for one sequence."""
    T, reach = len(inputs.x), inputs.weight.shape[1] - 1
    return lambda x, w, b: silu(conv1d(x, w[:, None], b, padding=reach, groups=len(w))[..., :T])


def ours(workload: Convolution, inputs: ConvInputs) -> Call:
    """The operator under the public function, on tables that a model makes once for all layers."""
    x, weight, bias, dy, bounds = inputs
    tables = [bounds]
    if workload.shares:
        layout = SharedLayout.from_lengths(workload.groups, device=x.device)
        tables = conv_tables.prepare(layout, workload.width)
    call = x[None], weight, bias, tables, True
    if dy is None:
        return Call(lambda: ops.conv_fwd(*call), lambda raw: outputs(raw[0]))
    return Call(lambda: ops.conv_bwd(dy[None], *call), lambda raw: outputs(raw[0][0], *raw[1:]))


class Library(Implementation):
    """A function y [1, channels, T] of x [1, channels, T], weight and bias; backward by autograd.

    `of` returns it for some inputs. None can share prompts.
    """

    packs = True
    of = staticmethod(causal_conv1d)

    def inapplicable(self, workload: Convolution) -> str | None:
        if len(workload.groups) > 1 and not self.packs:
            return "it has no packed sequences"
        return "it has no shared prompts" if workload.shares else None

    def prepare(self, workload: Convolution, inputs: ConvInputs) -> Call:
        convolve, dy = self.of(inputs), inputs.dy

        def rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.as_tensor(convolve(x.T[None], weight, bias))

        if dy is None:
            return Call(lambda: rows(*inputs[:3]), lambda raw: outputs(raw[0].T))
        return Call(backward_of(rows, inputs[:3], dy.T[None]), lambda raw: outputs(*raw))


def known(family: str) -> list[Implementation]:
    own = {"name": "ours", "label": "ours", "distribution": "qla-kernels", "prepare": ours}
    theirs = {"label": "causal-conv1d", "distribution": "causal-conv1d"}
    torchs = {"label": "torch conv1d", "distribution": "torch", "packs": False, "of": in_torch}
    return [
        Implementation(module="qla_kernels.conv", needs_cuda=False, **own),
        Library(name="causal_conv1d", module="causal_conv1d", **theirs),
        Library(name="torch", module="torch", needs_cuda=False, **torchs),
    ]
