"""The block over a packed tree, and over whole sequences by the same kernels."""

import importlib
from typing import ClassVar

import torch
from torch import Tensor

from ..attention.workloads import Group
from ..harness.adapters import Call, Implementation
from . import step_ways
from .problem import HybridInputs, most_tokens, packed, whole
from .workloads import HybridPart


class Attention:
    """Ours, over groups of a prompt and its responses; tables are made before, once."""

    def __init__(
        self, groups: tuple[Group, ...], workload: HybridPart, device: torch.device
    ) -> None:
        self._dualkv = importlib.import_module("qla_kernels.dualkv")
        self._layout = self._dualkv.SharedLayout.from_lengths(groups, device=device)
        if device.type == "cuda":
            kv_heads, heads = workload.heads
            self._layout.prepare(heads, kv_heads, head_dim=workload.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = self._dualkv.shared_prefix_attention(q, k, v, self._layout)
        return o


class OverTree(Attention):
    """Our functions over groups that share their prompts."""

    def __init__(self, workload: HybridPart, device: torch.device) -> None:
        super().__init__(workload.groups, workload, device)
        self._hybrid = importlib.import_module("qla_kernels.hybrid")
        self._hybrid.prepare_conv1d(self._layout, workload.width)
        self._hybrid.prepare_gated_delta_rule(self._layout)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self._hybrid.shared_prefix_conv1d(x, weight, None, self._layout, "silu")
        return y

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        row = (x[None] for x in (q, k, v, g, beta))
        rule = self._hybrid.shared_prefix_gated_delta_rule
        o, _ = rule(*row, self._layout, use_qk_l2norm_in_kernel=True)
        return torch.as_tensor(o.squeeze(0))  # o[0] has a gradient that is filled and copied


class OverSequences(Attention):
    """Our functions over sequences that share nothing, one behind the other."""

    def __init__(
        self, lengths: tuple[int, ...], workload: HybridPart, device: torch.device
    ) -> None:
        super().__init__(tuple((n, ()) for n in lengths), workload, device)
        self._package = importlib.import_module("qla_kernels")
        self._bounds_cpu = torch.tensor([0, *lengths]).cumsum(0).int()
        self._bounds = self._bounds_cpu.to(device)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self._package.causal_conv1d(x, weight, None, "silu", self._bounds)
        return y

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        o, _ = self._package.chunk_gated_delta_rule(
            *(x[None] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True,
            cu_seqlens=self._bounds, cu_seqlens_cpu=self._bounds_cpu,
        )  # fmt: skip
        return torch.as_tensor(o.squeeze(0))


class OursHybrid(Implementation):
    name, label, distribution = "ours", "ours", "qla-kernels"
    lacks: ClassVar = {"decoding": "only trains"}
    module, needs_cuda = "qla_kernels.hybrid", False

    def prepare(self, workload: HybridPart, inputs: HybridInputs) -> Call:
        return packed(workload, inputs, OverTree(workload, inputs.x.device))


class Whole(Implementation):
    """In passes, if a step of all sequences would not fit into the memory of the GPU."""

    name, label, distribution = "whole", "whole sequences", "qla-kernels"
    lacks: ClassVar = {"decoding": "only trains"}
    module, needs_cuda = "qla_kernels.hybrid", False

    def prepare(self, workload: HybridPart, inputs: HybridInputs) -> Call:
        device = inputs.x.device

        def mixing(lengths: tuple[int, ...]) -> OverSequences:
            return OverSequences(lengths, workload, device)

        return whole(workload, inputs, mixing, most_tokens(device))


def known(family: str) -> list[Implementation]:
    return [OursHybrid(), Whole(), *step_ways.known()]
