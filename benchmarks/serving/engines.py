"""Serving by the Triton functions of vLLM and SGLang, without the engines around them."""

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation
from ..hybrid.step import StepInputs, gate_of
from . import engine_functions
from .engine_functions import CONVOLUTIONS, DRAFTS, PACKED, function
from .flashinfer import FlashInferGathers, FlashInferPool
from .ours import OursOneToken, OursServing, OursTwo, Serves
from .problem import Drafted, batch_of, from_minus_one
from .workloads import LayerStep, PoolDecode


class _Engine(Serves):
    """An engine's own Triton functions, from the files of build/engines."""

    module = "triton"
    overwrites = False  # what it convolves, unless it is given a place for the result

    def installed(self) -> bool:
        return engine_functions.missing(self.name) is None

    def missing(self) -> str | None:
        return super().missing() or engine_functions.missing(self.name)

    def version(self) -> str:
        return str(engine_functions.engine_interfaces.VERSIONS[self.name])

    def padded(self, slots: Tensor) -> Tensor:
        """Slots as the engine has them."""
        return slots

    def packed(self, *call: Any) -> Any:
        """The function of a token, given rows, a, b, A_log, dt_bias, states, out and slots."""
        rows, a, b, A_log, dt_bias, states, out, slots = call
        name = "fused_recurrent_gated_delta_rule_packed_decode"
        return function(self.name, PACKED[self.name], name)(
            mixed_qkv=rows, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=states.shape[-1] ** -0.5,
            initial_state=states, out=out, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def verifying(self) -> Any:
        """The function of drafts."""
        name = "fused_sigmoid_gating_delta_rule_update"
        return function(self.name, DRAFTS[self.name], name)

    def pool_decode(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, (a, b) = batch_of(workload, inputs), inputs.gates.unbind(1)
        out = inputs.rows.new_empty(len(a), 1, *inputs.states.shape[1:3])
        slots = self.padded(batch.starts)

        def run() -> Tensor:
            self.packed(inputs.rows, a, b, *inputs.weights, batch.pool, out, slots)
            return out

        return Call.public(run, batch.results)

    def decoding(self, workload: LayerStep, inputs: StepInputs) -> Call:
        """Three launches: convolution, rule, and the norm of gated_norm.py."""
        assert inputs.last is not None, "a layer convolves"
        update = function(self.name, CONVOLUTIONS[self.name], "causal_conv1d_update")
        norm = importlib.import_module("benchmarks.serving.gated_norm").gated_norm
        N, C = len(inputs.rows), workload.channels
        (a, b), z = inputs.gates.unbind(1), gate_of(workload, inputs)
        A_log, dt_bias, taps, weight = inputs.weights
        slots = torch.arange(1, N + 1, dtype=torch.int32, device=a.device)
        states = torch.cat([inputs.states[:1], inputs.states])
        last = torch.cat([inputs.last[:1], inputs.last]).mT
        rows = inputs.rows[:, :C].contiguous()
        into = {"out": torch.empty_like(rows)} if self.overwrites else {}
        out = a.new_empty(N, 1, *states.shape[1:3])

        def run() -> Tensor:
            y = update(rows, last, taps, None, "silu", conv_state_indices=slots, **into)
            self.packed(y, a, b, A_log, dt_bias, states, out, slots)
            return torch.as_tensor(norm(out, z, weight))

        return Call.public(run, lambda y: {"o": y.transpose(0, 1), "ht": states[1:].clone()})


class VLLM(_Engine):
    name, label, distribution = "vllm", "vLLM's Triton", "vllm"
    overwrites = True

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        update, (A_log, dt_bias) = self.verifying(), inputs.weights
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        q, k, v, a, b = (y.contiguous() for y in (x.q, x.k, x.v, x.a[None], x.b[None]))

        def run() -> Tensor:
            o, _ = update(
                A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=batch.pool,
                cu_seqlens=x.bounds, ssm_state_indices=batch.table,
                num_accepted_tokens=batch.accepted, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return torch.as_tensor(o)

        return Call.public(run, batch.results)


class SGLang(_Engine):
    """States after drafts go into a buffer, and the pool stays as it is.

    Its function of a token rounds beta to the dtype of b.
    """

    name, label, distribution = "sglang", "SGLang's Triton", "sglang"
    rounds: ClassVar = ("ht",)

    def padded(self, slots: Tensor) -> Tensor:
        return from_minus_one(slots)

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        update, (A_log, dt_bias) = self.verifying(), inputs.weights
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        N, width, live = workload.sequences, workload.width, workload.live
        buffer = inputs.states.new_empty(N, width, *inputs.states.shape[1:])
        slots = self.padded(batch.starts)
        lines = torch.arange(N, dtype=torch.int32, device=slots.device)

        def run() -> Tensor:
            o = update(
                A_log=A_log, a=x.a, b=x.b, dt_bias=dt_bias, softplus_beta=1.0,
                softplus_threshold=20.0, q=x.q, k=x.k, v=x.v, initial_state_source=batch.pool,
                initial_state_indices=slots, cu_seqlens=x.bounds, use_qk_l2norm_in_kernel=True,
                disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=width,
                intermediate_state_indices=lines, retrieve_parent_token=None,
            )  # fmt: skip
            return torch.as_tensor(o)

        def collect(o: Tensor) -> dict[str, Tensor]:
            return {**batch.results(o), "ht": buffer[:live].flatten(0, 1)}

        return Call.public(run, collect)


def known() -> list[Implementation]:
    """Who is timed on pools of states."""
    others = OursOneToken(), OursTwo(), FlashInferGathers(), FlashInferPool(), VLLM(), SGLang()
    return [OursServing(), *others]
