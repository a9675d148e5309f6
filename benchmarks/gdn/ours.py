"""The gated delta rule by us, and by us with a choice undone."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation
from .directions import decoding, from_autograd, low_level, six_tuple, through_autograd
from .inputs import GdnInputs
from .workloads import Gdn


class Ours(Implementation):
    """The low-level calls on CUDA tensors, the public functions on CPU tensors."""

    name, label, module, distribution = "ours", "ours", "qla_kernels", "qla-kernels"
    needs_cuda = False
    training = False
    keeps = False  # segments, from a forward for its backward
    choices: ClassVar[dict[str, Any]] = {}

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        if workload.kernel:
            return self._kernel(workload, inputs)
        if workload.decode:
            return decoding(self.module, workload, inputs)
        if inputs.q.is_cuda:
            return self._low_level(workload, inputs)
        return Call(self._public(workload, inputs), from_autograd(workload))

    def _public(self, workload: Gdn, inputs: GdnInputs) -> Callable[[], Any]:
        function = importlib.import_module(self.module).chunk_gated_delta_rule
        bounds = {"cu_seqlens": inputs.cu_seqlens, "cu_seqlens_cpu": _on_host(inputs)}
        return through_autograd(function, workload, inputs, **bounds)

    def _low_level(self, workload: Gdn, inputs: GdnInputs) -> Call:
        ops = importlib.import_module(self.module)
        q, k, v, g, beta, h0, cu, *_ = inputs
        scale, cu_seqlens_cpu = workload.head_dim**-0.5, _on_host(inputs)
        public = partial(self._public, workload, inputs)

        def forward(save: bool) -> Any:
            return ops.chunk_gated_delta_rule_fwd(
                q, k, v, g, beta, scale, h0, cu, is_train=save, cu_seqlens_cpu=cu_seqlens_cpu,
                enable_fwd_cp_cache=self.keeps, **self.choices,
            )  # fmt: skip

        def backward(saved: Any) -> Any:
            return ops.chunk_gated_delta_rule_bwd(
                q, k, v, saved[0], beta, saved[1], inputs.do, inputs.dht, scale, h0, cu,
                cp_cache=saved[5], cu_seqlens_cpu=cu_seqlens_cpu, **self.choices,
            )  # fmt: skip

        return low_level(workload, forward, backward, six_tuple, public, self.training)

    def _kernel(self, workload: Gdn, inputs: GdnInputs) -> Call:
        launch = importlib.import_module("qla_kernels.gdn.launch.forward")
        varlen = importlib.import_module("qla_kernels.varlen")
        kernel, k, g = getattr(launch, workload.kernel), inputs.k, inputs.g
        beta, cu = inputs.beta.float(), inputs.cu_seqlens
        table = varlen.chunk_table(workload.tokens, cu, batch=1, device=k.device)
        return Call(
            lambda: kernel(k, g, beta, cu, table), lambda raw: {"g_cum": raw[0], "A": raw[1]}
        )


class OursTraining(Ours):
    """The forward that also writes gamma and A for its backward; peers always write them."""

    name, label, training = "ours_train", "ours, training", True
    needs_cuda = True

    def inapplicable(self, workload: Gdn) -> str | None:
        return None if workload.kind == "fwd" else "the same as ours"


class OursWhole(Ours):
    """Sequences are not cut into segments, however few there are."""

    name, label, on_request = "ours_whole", "ours, uncut", True
    needs_cuda = True
    choices: ClassVar[dict[str, Any]] = {"auto_cp": False}

    def inapplicable(self, workload: Gdn) -> str | None:
        return None if workload.kind in ("fwd", "bwd") else "nothing would be cut"


class OursExact(OursWhole):
    """Segments whose states are folded, not recomputed from where they are forgotten."""

    name, label = "ours_exact", "ours, exact"
    choices: ClassVar[dict[str, Any]] = {"exact": True}


class OursKept(OursWhole):
    """The backward takes its segments from the forward, which keeps them."""

    name, label, keeps = "ours_kept", "ours, segments kept", True
    choices: ClassVar[dict[str, Any]] = {}

    def inapplicable(self, workload: Gdn) -> str | None:
        return None if workload.kind == "bwd" else "a forward has none to take"


def _on_host(inputs: GdnInputs) -> Tensor:
    """cu_seqlens, as a caller knows them who packed the sequences."""
    return torch.tensor([0, *inputs.lengths]).cumsum(0)


def ours() -> list[Implementation]:
    return [Ours(), OursTraining(), OursWhole(), OursExact(), OursKept()]
