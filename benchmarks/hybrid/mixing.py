"""The functions in which tokens meet: by the definitions, and by our kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qla_kernels
from qla_kernels import hybrid
from qla_kernels.dualkv import SharedLayout, shared_prefix_attention

from ..attention.workloads import Group
from .workloads import HybridPart

Mixing = Any  # what has the methods of `Alone`, or some of them


class Alone:
    """The definitions, for one sequence."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """y [T, C] of x [T, C] and weight [C, W], activated."""
        from reference import conv

        return conv.alone(x, weight, None, True)

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """o [T, HV, V] of q, k [T, H, K], v [T, HV, V], g and beta [T, HV]; q and k as they are."""
        from reference import gdn

        q, k, v, g, beta = (x[None] for x in (gdn.l2norm(q), gdn.l2norm(k), v, g, beta))
        return gdn.recurrent(q, k, v, g, beta)[0][0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o [T, H, D] of q [T, H, D] and of k, v [T, Hk, D]."""
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        o = scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
        return o.transpose(0, 1)


class Attends:
    """A function of attention alone."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attend = attend


class OverGroups:
    """Our attention over groups of a prompt and its responses; tables are made before, once."""

    def __init__(
        self, groups: tuple[Group, ...], workload: HybridPart, device: torch.device
    ) -> None:
        self._layout = SharedLayout.from_lengths(groups, device=device)
        if device.type == "cuda":
            kv_heads, heads = workload.heads
            self._layout.prepare(heads, kv_heads, head_dim=workload.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prefix_attention(q, k, v, self._layout)


class OverTree(OverGroups):
    """Our functions over groups that share their prompts."""

    def __init__(self, workload: HybridPart, device: torch.device) -> None:
        super().__init__(workload.groups, workload, device)
        hybrid.prepare_conv1d(self._layout, workload.width)
        hybrid.prepare_gated_delta_rule(self._layout)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return hybrid.shared_prefix_conv1d(x, weight, None, self._layout, "silu")

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
        o, _ = hybrid.shared_prefix_gated_delta_rule(
            q, k, v, g, beta, self._layout, use_qk_l2norm_in_kernel=True
        )
        return o.squeeze(0)  # o[0] has a gradient that is filled and copied


class OverSequences(OverGroups):
    """Our functions over sequences that share nothing, one behind the other."""

    def __init__(
        self, lengths: tuple[int, ...], workload: HybridPart, device: torch.device
    ) -> None:
        super().__init__(tuple((n, ()) for n in lengths), workload, device)
        self._bounds_cpu = torch.tensor([0, *lengths]).cumsum(0).int()
        self._bounds = self._bounds_cpu.to(device)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return qla_kernels.causal_conv1d(x, weight, None, "silu", self._bounds)

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
        o, _ = qla_kernels.chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True,
            cu_seqlens=self._bounds, cu_seqlens_cpu=self._bounds_cpu,
        )  # fmt: skip
        return o.squeeze(0)
