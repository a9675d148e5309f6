"""The gated delta rule by FlashQLA, FlashInfer, FLA, and by its definition."""

import importlib
import os
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation, Outputs
from ..harness.timing import one_thread
from .ours import decoding, low_level, only, ours, through_autograd, two_functions
from .problem import GdnInputs
from .workloads import KERNELS, Gdn

NO_KERNEL = dict.fromkeys(KERNELS, "it has no kernel that does only this")


class Of128(Implementation):
    """A library with one head size."""

    def inapplicable(self, workload: Gdn) -> str | None:
        if reason := super().inapplicable(workload):
            return reason
        one = (workload.head_dim, workload.V) == (128, 128)
        return None if one else "it has head size 128 only"


class FlashQLA(Of128):
    name, label, module, distribution = "flash_qla", "FlashQLA", "flash_qla", "flash-qla"
    lacks: ClassVar = {"decode": "it has no token-by-token form"}

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        if workload.kernel:
            return self._kkt_solve(inputs)
        ops = importlib.import_module(self.module)
        call = ops.chunk_gated_delta_rule, workload, inputs
        public = partial(through_autograd, *call, cu_seqlens=inputs.cu_seqlens)
        # its public function keeps segments for the backward unless told not to
        return two_functions(ops, workload, inputs, public, {"auto_cp": True}, keeps=True)

    def _kkt_solve(self, inputs: GdnInputs) -> Call:
        """Its inverse has no gates in it; times e^(gamma_i - gamma_j) it is ours."""
        ops = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")
        k, g, beta = inputs.k, inputs.g, inputs.beta
        options = {"cu_seqlens": inputs.cu_seqlens, "chunk_size": 64}

        def run() -> tuple[Tensor, Tensor]:
            gamma = ops.chunk_local_cumsum(g=g, **options)
            return gamma, ops.kkt_solve(k=k, b=beta, **options)

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
    module, distribution, lacks = "fla.ops.gated_delta_rule", "fla-core", NO_KERNEL
    _tables: tuple[Tensor, dict[str, Tensor]] | None = None

    def _packing(self, cu_seqlens: Tensor) -> dict[str, Tensor]:
        """int64 cu_seqlens and their chunks; the same tensors while those of the inputs stay.

        FLA remembers tables by a tensor's identity, four of them: another copy for each input set
        would have it build them anew, inside the graph.
        """
        if self._tables is None or self._tables[0] is not cu_seqlens:
            index, cu = importlib.import_module("fla.ops.utils.index"), cu_seqlens.long()
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
        call = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": h0, **options}

        def forward(save: bool) -> Any:  # it always saves
            return ops.chunk_gated_delta_rule_fwd(g=g, output_final_state=True, **call)

        def backward(saved: Any) -> Any:
            gamma, _, A = saved[:3]
            upstream = {"do": inputs.do, "dht": inputs.dht}
            return ops.chunk_gated_delta_rule_bwd(g=gamma, A=A, **upstream, **call)

        def outputs(raw: Any) -> Outputs:
            return {"o": raw[1], "ht": raw[3]}

        return low_level(workload, forward, backward, outputs, public)


class FlashInfer(Of128):
    """Takes e^g, beta in fp32 and states [N, HV, V, K]; cuts long sequences where it sees fit."""

    name, label = "flashinfer", "FlashInfer"
    module, distribution = "flashinfer.gdn_prefill", "flashinfer-python"
    lacks: ClassVar = {
        **NO_KERNEL, **dict.fromkeys(("bwd", "both"), "it has no backward"),
        "decode": "only its prefill is measured here",
    }  # fmt: skip

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        ops, h0 = importlib.import_module(self.module), inputs.initial_state
        q, k, v = (x[0].contiguous() for x in (inputs.q, inputs.k, inputs.v))
        run = partial(
            ops.chunk_gated_delta_rule, q, k, v, inputs.g[0].exp(), inputs.beta[0].float(),
            scale=workload.head_dim**-0.5, initial_state=None if h0 is None else h0.mT.contiguous(),
            output_final_state=True, cu_seqlens=inputs.cu_seqlens, use_cp="auto",
            max_seqlen=max(inputs.lengths),
        )  # fmt: skip
        return Call.public(run, lambda raw: {"o": raw[0][None], "ht": raw[1].mT})


class Definition(Implementation):
    """The token loop: what the operation means. Timed where there is no GPU to compare on."""

    name, label, module, distribution = "definition", "token loop", "reference", ""
    needs_cuda, lacks = False, only("forward only", "fwd", "decode")

    def version(self) -> str:
        return "reference"

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        from reference import gdn

        q, k, v, g, beta, h0, cu, *_ = inputs
        run = one_thread()(partial(gdn.recurrent, q, k, v, g, beta, None, h0, cu))
        return Call(run, lambda raw: {"o": raw[0], "ht": raw[1]})


def known(family: str) -> list[Implementation]:
    """All but `ours`, which is serving's, too."""
    # on a GPU the loop is 100,000 launches a row
    more = ours()[1:] if torch.cuda.is_available() else [Definition()]
    return [*more, FlashQLA(), FlashInfer(), FLA()]
