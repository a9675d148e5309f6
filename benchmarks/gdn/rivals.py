"""The gated delta rule by FlashQLA, FlashInfer, FLA, and by its definition."""

import importlib
import os
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation, Outputs
from ..harness.timing import one_thread
from .ours import decoding, low_level, ours, through_autograd, two_functions
from .problem import GdnInputs
from .workloads import KERNELS, Gdn

NO_KERNEL = dict.fromkeys(KERNELS, "it has no kernel that does only this")


def other_size(workload: Gdn) -> str | None:
    sizes = workload.head_dim, workload.V
    return None if sizes == (128, 128) else "it has head size 128 only"


class FlashQLA(Implementation):
    name, label = "flash_qla", "FlashQLA"
    module, distribution = "flash_qla", "flash-qla"

    lacks: ClassVar = {"decode": "it has no token-by-token form"}

    def inapplicable(self, workload: Gdn) -> str | None:
        return super().inapplicable(workload) or other_size(workload)

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        if workload.kernel:
            return self._kkt_solve(inputs)
        ops = importlib.import_module(self.module)
        bounds: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens}
        function = ops.chunk_gated_delta_rule
        public = partial(through_autograd, function, workload, inputs, **bounds)
        # its public function keeps segments for the backward unless told not to
        return two_functions(ops, workload, inputs, public, {"auto_cp": True}, keeps=True)

    def _kkt_solve(self, inputs: GdnInputs) -> Call:
        """Its inverse has no gates in it; times e^(gamma_i - gamma_j) it is ours."""
        ops = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")
        k, g, beta, cu = inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens

        def run() -> tuple[Tensor, Tensor]:
            gamma = ops.chunk_local_cumsum(g=g, cu_seqlens=cu, chunk_size=64)
            return gamma, ops.kkt_solve(k=k, b=beta, cu_seqlens=cu, chunk_size=64)

        def collect(raw: tuple[Tensor, Tensor]) -> Outputs:
            return {"g_cum": raw[0], "A": apply_gates(raw[0], raw[1], inputs.lengths)}

        return Call(run, collect)


def apply_gates(gamma: Tensor, A: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """A[t, h, j] e^(gamma_t - gamma_s), s the j-th token of t's chunk; above the diagonal 0."""
    position = torch.cat([torch.arange(n) for n in lengths]).to(A.device) % A.shape[-1]
    column = torch.arange(A.shape[-1], device=A.device)
    token = torch.arange(A.shape[1], device=A.device)
    source = (token - position)[:, None] + column  # [T, C]
    other = gamma[0][source.clamp(max=A.shape[1] - 1)]  # [T, C, HV]
    visible = (column <= position[:, None])[..., None]
    decay = (gamma[0][:, None] - other).masked_fill(~visible, -torch.inf).exp()
    return torch.where(decay.mT > 0, A[0] * decay.mT, 0.0)[None]


class FLA(Implementation):
    """flash-linear-attention's Triton kernels.

    Called below the dispatch of its public function, which would hand over to FlashQLA. The
    dispatch further inside stays: on Hopper with Triton 3.4 to 3.7.0 it replaces one backward
    kernel that FLA knows to be wrong there by FLA's TileLang version.
    """

    name, label = "fla", "FLA"
    module, distribution = "fla.ops.gated_delta_rule", "fla-core"
    lacks = NO_KERNEL
    _tables: tuple[Tensor, dict[str, Tensor]] | None = None

    def _packing(self, cu_seqlens: Tensor) -> dict[str, Tensor]:
        """int64 cu_seqlens and their chunks; the same tensors while those of the inputs stay.

        FLA remembers tables by a tensor's identity, four of them: another copy for each input set
        would have it build them anew, inside the graph.
        """
        if self._tables is None or self._tables[0] is not cu_seqlens:
            index = importlib.import_module("fla.ops.utils.index")
            cu = cu_seqlens.long()
            packing = {"cu_seqlens": cu, "chunk_indices": index.prepare_chunk_indices(cu, 64)}
            self._tables = cu_seqlens, packing
        return self._tables[1]

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        if workload.decode:  # no dispatch there
            return decoding(self.module, workload, inputs)
        os.environ["FLA_FLASH_QLA"] = "0"  # FLA reads it at each call of the public function
        ops = importlib.import_module("fla.ops.gated_delta_rule.chunk")
        q, k, v, g, beta, h0, cu, *_ = inputs
        options = {"scale": workload.head_dim**-0.5, **self._packing(cu)}
        public = partial(through_autograd, ops.chunk_gated_delta_rule, workload, inputs, **options)

        def forward(save: bool) -> Any:  # it always saves
            return ops.chunk_gated_delta_rule_fwd(
                q=q, k=k, v=v, g=g, beta=beta,
                initial_state=h0, output_final_state=True, **options,
            )  # fmt: skip

        def backward(saved: Any) -> Any:
            gamma, _, A = saved[:3]
            return ops.chunk_gated_delta_rule_bwd(
                q=q, k=k, v=v, g=gamma, beta=beta, A=A,
                initial_state=h0, do=inputs.do, dht=inputs.dht, **options,
            )  # fmt: skip

        return low_level(
            workload, forward, backward, lambda raw: {"o": raw[1], "ht": raw[3]}, public
        )


class FlashInfer(Implementation):
    """Takes e^g, beta in fp32 and states [N, HV, V, K]; cuts long sequences where it sees fit."""

    name, label = "flashinfer", "FlashInfer"
    module, distribution = "flashinfer.gdn_prefill", "flashinfer-python"

    lacks: ClassVar = {
        **NO_KERNEL, **dict.fromkeys(("bwd", "both"), "it has no backward"),
        "decode": "only its prefill is measured here",
    }  # fmt: skip

    def inapplicable(self, workload: Gdn) -> str | None:
        return super().inapplicable(workload) or other_size(workload)

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        ops = importlib.import_module(self.module)
        q, k, v = (x[0].contiguous() for x in (inputs.q, inputs.k, inputs.v))
        decay, beta = inputs.g[0].exp(), inputs.beta[0].float()
        h0 = inputs.initial_state
        state = None if h0 is None else h0.mT.contiguous()

        def run() -> Any:
            return ops.chunk_gated_delta_rule(
                q, k, v, decay, beta,
                scale=workload.head_dim**-0.5, initial_state=state, output_final_state=True,
                cu_seqlens=inputs.cu_seqlens, use_cp="auto", max_seqlen=max(inputs.lengths),
            )  # fmt: skip

        return Call.public(run, lambda raw: {"o": raw[0][None], "ht": raw[1].mT})


class Definition(Implementation):
    """The token loop: what the operation means. Timed where there is no GPU to compare on."""

    name, label, module, distribution = "definition", "token loop", "reference", ""
    needs_cuda = False
    lacks = dict.fromkeys((*KERNELS, "bwd", "both"), "forward only")

    def version(self) -> str:
        return "reference"

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        from reference import gdn

        q, k, v, g, beta, h0, cu, *_ = inputs

        def run() -> Any:
            with one_thread():
                return gdn.recurrent(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)

        return Call(run, lambda raw: {"o": raw[0], "ht": raw[1]})


def known(family: str) -> list[Implementation]:
    """All but `ours`, which is serving's, too."""
    # on a GPU the loop is 100,000 launches a row
    more = ours()[1:] if torch.cuda.is_available() else [Definition()]
    return [*more, FlashQLA(), FlashInfer(), FLA()]
