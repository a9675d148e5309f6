"""The convolution by us, by causal-conv1d and by torch.

The floor of a row is a copy of the same bytes, so ours beside it is the share of a copy's speed.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from ..harness.adapters import Call, Implementation, Outputs
from .problem import ConvInputs, outputs
from .workloads import Convolution


class OursConv(Implementation):
    """The operator under the public function, on tables that a model makes once for all layers."""

    name, label, distribution = "ours", "ours", "qla-kernels"
    module, needs_cuda = "qla_kernels.conv", False

    def prepare(self, workload: Convolution, inputs: ConvInputs) -> Call:
        ops = importlib.import_module(f"{self.module}.ops")
        x, weight, bias, dy, bounds = inputs
        tables = [bounds]
        if workload.shares:
            dualkv = importlib.import_module("qla_kernels.dualkv")
            prepare = importlib.import_module("qla_kernels.hybrid.conv_tables").prepare
            layout = dualkv.SharedLayout.from_lengths(workload.groups, device=x.device)
            tables = prepare(layout, workload.width)
        call = x[None], weight, bias, tables, True
        if dy is None:
            return Call(lambda: ops.conv_fwd(*call), lambda raw: outputs(raw[0]))
        return Call(
            lambda: ops.conv_bwd(dy[None], *call),
            lambda raw: outputs(raw[0][0], *raw[1:]),
        )


class _Recorded(Implementation):
    """A library's function, its backward through autograd. Neither can share prompts."""

    def inapplicable(self, workload: Convolution) -> str | None:
        return "it has no shared prompts" if workload.shares else None

    def convolution(self, inputs: ConvInputs) -> Any:
        """The call: y [1, channels, T] of x [1, channels, T], weight and bias."""
        raise NotImplementedError

    def prepare(self, workload: Convolution, inputs: ConvInputs) -> Call:
        convolve, dy = self.convolution(inputs), inputs.dy
        leaves = [x.detach().requires_grad_(dy is not None) for x in inputs[:3]]
        row = leaves[0].T[None]
        if dy is None:
            return Call(lambda: convolve(row, *leaves[1:]), lambda raw: outputs(raw[0].T))
        y, upstream = convolve(row, *leaves[1:]), dy.T[None]
        return Call(lambda: torch.autograd.grad(y, leaves, upstream, retain_graph=True), _gradients)


def _gradients(raw: tuple[Tensor, ...]) -> Outputs:
    return outputs(*raw)


class CausalConv1d(_Recorded):
    name, label = "causal_conv1d", "causal-conv1d"
    module, distribution = "causal_conv1d", "causal-conv1d"

    def convolution(self, inputs: ConvInputs) -> Any:
        function = importlib.import_module(self.module).causal_conv1d_fn
        lengths = inputs.bounds.diff().long()
        owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        seq_idx = owner.int()[None]
        return lambda x, w, b: function(x, w, b, seq_idx=seq_idx, activation="silu")


class TorchConv1d(_Recorded):
    """torch's depthwise convolution, then its silu: for one sequence."""

    name, label = "torch", "torch conv1d"
    module, distribution = "torch", "torch"
    needs_cuda = False

    def inapplicable(self, workload: Convolution) -> str | None:
        if len(workload.groups) > 1:
            return "it has no packed sequences"
        return super().inapplicable(workload)

    def convolution(self, inputs: ConvInputs) -> Any:
        T, reach = len(inputs.x), inputs.weight.shape[1] - 1

        def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return silu(conv1d(x, w[:, None], b, padding=reach, groups=len(w))[..., :T])

        return convolve


def known(family: str) -> list[Implementation]:
    return [OursConv(), CausalConv1d(), TorchConv1d()]
