"""The gated delta rule by us, and by us with a choice undone."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation
from .directions import (
    decoding,
    from_autograd,
    pool_decoding,
    through_autograd,
    two_functions,
)
from .inputs import GdnInputs
from .workloads import KERNELS, Gdn


class Ours(Implementation):
    """The low-level calls on CUDA tensors, the public functions on CPU tensors."""

    name, label, module, distribution = "ours", "ours", "qla_kernels", "qla-kernels"
    needs_cuda = False
    training = False
    keeps: bool | None = None  # segments, from a forward for its backward; None: as by default
    choices: ClassVar[dict[str, Any]] = {}  # of the low-level functions
    keywords: ClassVar[dict[str, Any]] = {}  # the same, of the public function

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
        bounds: dict[str, Any] = {
            "cu_seqlens": inputs.cu_seqlens,
            "cu_seqlens_cpu": _on_host(inputs),
        }
        if self.keeps is not None:
            bounds["enable_fwd_cp_cache"] = self.keeps
        return through_autograd(
            function, workload, inputs, self.training, **bounds, **self.keywords
        )

    def _low_level(self, workload: Gdn, inputs: GdnInputs) -> Call:
        ops, public = importlib.import_module(self.module), partial(self._public, workload, inputs)
        options = {"cu_seqlens_cpu": _on_host(inputs), **self.choices}
        return two_functions(ops, workload, inputs, public, options, self.training, self.keeps)

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
    lacks = dict.fromkeys((*KERNELS, "bwd", "both", "decode"), "the same as ours")


class OursWhole(Ours):
    """Sequences are not cut into segments, however few there are."""

    name, label, on_request = "ours_whole", "ours, uncut", True
    needs_cuda = True
    choices: ClassVar[dict[str, Any]] = {"auto_cp": False}
    keywords: ClassVar[dict[str, Any]] = {"batch_invariant": True}
    lacks = dict.fromkeys((*KERNELS, "both", "decode"), "nothing would be cut")


class OursExact(OursWhole):
    """Segments whose states are folded, not recomputed from where they are forgotten."""

    name, label = "ours_exact", "ours, exact"
    choices: ClassVar[dict[str, Any]] = {"exact": True}
    keywords: ClassVar[dict[str, Any]] = {"exact": True}


class OursKept(OursWhole):
    """The backward takes its segments from the forward, which keeps them."""

    name, label, keeps = "ours_kept", "ours, segments kept", True
    choices: ClassVar[dict[str, Any]] = {}
    keywords: ClassVar[dict[str, Any]] = {}
    lacks = dict.fromkeys((*KERNELS, "fwd", "both", "decode"), "a forward has none to take")


class OursAlone(OursKept):
    """The backward makes its segments itself."""

    name, label, keeps = "ours_alone", "ours, nothing kept", False


class OursPool(Ours):
    """Decoding with the chunked form's bits."""

    name, label, on_request = "ours_pool", "ours, pool", True
    leaves_out: ClassVar = ("ht",)  # a pool returns no states
    lacks = dict.fromkeys((*KERNELS, "fwd", "bwd", "both"), "only decodes")

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        return pool_decoding(self.module, workload, inputs)


def _on_host(inputs: GdnInputs) -> Tensor:
    """cu_seqlens, as a caller knows them who packed the sequences."""
    return torch.tensor([0, *inputs.lengths]).cumsum(0)


def ours() -> list[Implementation]:
    return [Ours(), OursTraining(), OursWhole(), OursExact(), OursKept(), OursAlone(), OursPool()]
