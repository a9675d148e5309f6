"""Serving by FlashInfer, by what an engine writes around it, and by the engines' own functions.

Layouts and gates are converted before, as in all rows. Gathers, zeros, casts, copies and scatters
are in the time: they are the work that a pool makes.
"""

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation
from ..hybrid.step import StepInputs, gate_of
from . import engine_functions
from .decode import DecodeInputs, batch_of
from .engine_functions import CONVOLUTIONS, DRAFTS, PACKED, function
from .ours import (
    Drafted,
    OursOneToken,
    OursServing,
    OursTwo,
    Serves,
    checkpoints_of,
    paged,
    prefill_results,
)
from .pool import pool_of, shuffled
from .prefill import PrefillInputs, slots_of
from .workloads import LayerStep, PoolDecode, PoolPrefill


class FlashInferGathers(Serves):
    """Its functions on gathered states: vLLM's way."""

    name, label = "flashinfer_gathers", "FlashInfer, gather and scatter"
    module, distribution = "flashinfer.gdn_prefill", "flashinfer-python"
    serves = ("pool_prefill", "pool_decode")

    def prepare(self, workload: Any, inputs: Any) -> Call:
        if isinstance(workload, PoolPrefill):
            return self._prefill(workload, inputs)
        return self._decode(workload, inputs)

    def _prefill(self, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
        ops, x = importlib.import_module(self.module), _Prompts(workload, inputs)
        slots = slots_of(workload, x.v.device)
        pool, out = paged(inputs, slots), torch.empty_like(x.v)
        starts, ends = slots.starts.long(), slots.ends.long()

        def run() -> Tensor:
            states = pool[starts]
            if len(slots.fresh):
                states.index_fill_(0, slots.fresh, 0)
            o, states = ops.chunk_gated_delta_rule(
                *x.call, initial_state=states.float(), **x.options
            )
            out.copy_(o)
            pool[ends] = states.to(pool.dtype)
            return out

        return Call(run, lambda o: prefill_results(o[None], pool[ends], x.kept), lambda: run)

    def _decode(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        ops = importlib.import_module("flashinfer.gdn_decode")
        batch, call = batch_of(workload, inputs), _tokens(workload, inputs)
        slots = batch.starts.long()

        def run() -> Tensor:
            states = batch.pool[slots]
            o, states = ops.gated_delta_rule_decode_pretranspose(state=states, **call)
            batch.pool[slots] = states
            return torch.as_tensor(o)

        return Call(run, batch.results, lambda: run)


class FlashInferPool(Serves):
    """Its functions that take slots: a row of the pool is where a sequence starts and ends.

    For prefill it gets a second pool to write to, so that a call can be repeated.
    """

    name, label = "flashinfer_pool", "FlashInfer, in the pool"
    module, distribution = "flashinfer.gdn_prefill", "flashinfer-python"
    serves = ("pool_prefill", "pool_decode", "drafts")

    def prepare(self, workload: Any, inputs: Any) -> Call:
        if isinstance(workload, PoolPrefill):
            return self._prefill(workload, inputs)
        return (self._verify if workload.drafts else self._decode)(workload, inputs)

    def _prefill(self, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
        ops, x = importlib.import_module(self.module), _Prompts(workload, inputs)
        fresh = slots_of(workload, x.v.device).fresh
        slots, num_slots = shuffled(len(inputs.states), 0, x.v.device)
        before, after = (pool_of(inputs.states, slots, num_slots) for _ in range(2))
        rows, out = slots.long(), torch.empty_like(x.v)
        zeroed = rows[fresh]

        def run() -> Tensor:
            if len(zeroed):
                before.index_fill_(0, zeroed, 0)
            o, _ = ops.chunk_gated_delta_rule(
                *x.call, initial_state=before, output_state=after, state_indices=slots,
                output=out, **x.options,
            )  # fmt: skip
            return torch.as_tensor(o)

        return Call(run, lambda o: prefill_results(o[None], after[rows], x.kept), lambda: run)

    def _decode(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        ops = importlib.import_module("flashinfer.gdn_decode")
        batch, call = batch_of(workload, inputs), _tokens(workload, inputs)
        slots = _padded(batch.starts)

        def run() -> Tensor:
            o, _ = ops.gated_delta_rule_decode_pretranspose(
                state=None, initial_state=batch.pool, initial_state_indices=slots, **call
            )
            return torch.as_tensor(o)

        return Call(run, batch.results, lambda: run)

    def _verify(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        ops = importlib.import_module("flashinfer.gdn_decode")
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        shape = len(batch.table), workload.width
        q, k, v, a, b = (
            y.reshape(*shape, *y.shape[1:]).contiguous() for y in (x.q[0], x.k[0], x.v[0], x.a, x.b)
        )
        A_log, dt_bias = inputs.weights
        slots, table = _padded(batch.starts), _padded(batch.table)
        out = torch.empty_like(v)

        def run() -> Tensor:
            o, _ = ops.gated_delta_rule_mtp(
                q=q, k=k, v=v, initial_state=batch.pool, initial_state_indices=slots, A_log=A_log,
                a=a, dt_bias=dt_bias, b=b, output=out, ssm_state_indices=table,
                disable_state_update=False, use_qk_l2norm=True,
            )  # fmt: skip
            return torch.as_tensor(o)

        return Call(run, batch.results, lambda: run)


class _Prompts:
    """What FlashInfer's prefill is given but for states: e^g, beta in fp32, checkpoints."""

    def __init__(self, workload: PoolPrefill, inputs: PrefillInputs) -> None:
        q, self.k, self.v = (x[0].contiguous() for x in inputs.rule[:3])
        self.call = q, self.k, self.v, inputs.rule.g[0].exp(), inputs.rule.beta[0].float()
        self.kept = checkpoints_of(workload, inputs)
        self.options: dict[str, Any] = {
            "scale": workload.head_dim**-0.5, "output_final_state": True,
            "cu_seqlens": inputs.cu_seqlens, "use_cp": "auto", "max_seqlen": max(workload.lengths),
        }  # fmt: skip
        if workload.every:
            counts = torch.arange(len(inputs.states) + 1, device=q.device)
            self.options |= {
                "state_checkpoints": self.kept, "checkpoint_every_n_tokens": workload.every,
                "checkpoint_cu_starts": counts * workload.kept,
            }  # fmt: skip


def _tokens(workload: PoolDecode, inputs: DecodeInputs) -> dict[str, Any]:
    """What FlashInfer's decoding is given but for states."""
    (H, HV), D, rows = workload.heads, workload.head_dim, inputs.rows
    parts = torch.split(rows, [H * D, H * D, HV * D], 1)
    q, k, v = (torch.unflatten(x, 1, (-1, D))[:, None].contiguous() for x in parts)
    a, b = (x[:, None].contiguous() for x in inputs.gates.chunk(2, 1))
    A_log, dt_bias = inputs.weights
    return {
        "q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
        "output": torch.empty_like(v), "use_qk_l2norm": True,
    }  # fmt: skip


def _padded(slots: Tensor) -> Tensor:
    """Slots of an interface in which -1 is padding, and slot 0 is a state."""
    return torch.where(slots == 0, -1, slots)


class _Engine(Serves):
    """An engine's own Triton functions, from the files of build/engines."""

    module = "triton"
    serves = ("pool_decode", "drafts", "decoding")
    overwrites = False  # what it convolves, unless it is given a place for the result

    def missing(self) -> str | None:
        return super().missing() or engine_functions.missing(self.name)

    def version(self) -> str:
        return str(engine_functions.engine_interfaces.VERSIONS[self.name])

    def prepare(self, workload: Any, inputs: Any) -> Call:
        if isinstance(workload, LayerStep):
            return self._step(workload, inputs)
        return (self._verify if workload.drafts else self._decode)(workload, inputs)

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

    def _decode(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        batch = batch_of(workload, inputs)
        a, b = inputs.gates.chunk(2, 1)
        out = inputs.rows.new_empty(len(a), 1, *inputs.states.shape[1:3])
        slots = self.padded(batch.starts)

        def run() -> Tensor:
            self.packed(inputs.rows, a, b, *inputs.weights, batch.pool, out, slots)
            return out

        return Call(run, batch.results, lambda: run)

    def _verify(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        raise NotImplementedError

    def _step(self, workload: LayerStep, inputs: StepInputs) -> Call:
        """Three launches: convolution, rule, and the norm of gated_norm.py."""
        update = function(self.name, CONVOLUTIONS[self.name], "causal_conv1d_update")
        norm = importlib.import_module("benchmarks.serving.gated_norm").gated_norm
        N, C = len(inputs.rows), workload.channels
        (a, b), z = inputs.gates.unbind(1), gate_of(workload, inputs)
        taps, A_log, dt_bias, weight = inputs.weights
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

        return Call(run, lambda y: {"o": y.transpose(0, 1), "ht": states[1:].clone()}, lambda: run)


class VLLM(_Engine):
    name, label, distribution = "vllm", "vLLM's Triton", "vllm"
    overwrites = True

    def _verify(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        update = function("vllm", DRAFTS["vllm"], "fused_sigmoid_gating_delta_rule_update")
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        q, k, v, a, b = (y.contiguous() for y in (x.q, x.k, x.v, x.a[None], x.b[None]))
        A_log, dt_bias = inputs.weights

        def run() -> Tensor:
            o, _ = update(
                A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=batch.pool,
                cu_seqlens=x.bounds, ssm_state_indices=batch.table,
                num_accepted_tokens=batch.accepted, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return torch.as_tensor(o)

        return Call(run, batch.results, lambda: run)


class SGLang(_Engine):
    """States after drafts go into a buffer, and the pool stays as it is.

    Its function of a token rounds beta to the dtype of b.
    """

    name, label, distribution = "sglang", "SGLang's Triton", "sglang"
    rounds: ClassVar = ("ht",)

    def padded(self, slots: Tensor) -> Tensor:
        return _padded(slots)

    def _verify(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        update = function("sglang", DRAFTS["sglang"], "fused_sigmoid_gating_delta_rule_update")
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        N, width, live = workload.sequences, workload.width, workload.live
        A_log, dt_bias = inputs.weights
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

        return Call(run, collect, lambda: run)


def known() -> list[Implementation]:
    others = OursOneToken(), OursTwo(), FlashInferGathers(), FlashInferPool(), VLLM(), SGLang()
    return [OursServing(), *others]
