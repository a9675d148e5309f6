"""Serving by FlashInfer, and by the Triton functions of vLLM and SGLang without the engines.

Layouts and gates are converted before, as in all rows. Gathers, zeros, casts, copies and scatters
are in the time: they are the work that a pool makes.

A machine may have a part of flashinfer-python 0.7.2.post1. What a row's call lacks is named.
"""

import importlib
import inspect
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..harness.adapters import Call, Implementation, describe
from ..hybrid.step import StepInputs, gate_of
from . import engine_functions
from .engine_functions import CONVOLUTIONS, DRAFTS, PACKED, function
from .ours import OursOneToken, OursServing, OursTwo, Serves, checkpoints_of, paged, prefill_results
from .problem import Drafted, PrefillInputs, batch_of, from_minus_one, pool_of, shuffled, slots_of
from .workloads import LayerStep, PoolDecode, PoolPrefill

PREFILL, DECODE = "flashinfer.gdn_prefill", "flashinfer.gdn_decode"
PROMPT = PREFILL, "chunk_gated_delta_rule"
TOKEN = DECODE, "gated_delta_rule_decode_pretranspose"
CHECKPOINTS = ("state_checkpoints", "checkpoint_cu_starts", "checkpoint_every_n_tokens")


def lacking(module: str, name: str, *arguments: str) -> str | None:
    """What is missing of a function that a row calls with these arguments; None if nothing is."""
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # libraries probe the GPU on import and raise anything
        return f"missing: {module} ({describe(error)})"
    if function is None:
        return f"missing: {module}.{name}"
    known = inspect.signature(function).parameters
    if any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values()):
        return None
    names = [argument for argument in arguments if argument not in known]
    return f"missing: {', '.join(names)} of {module}.{name}" if names else None


class FlashInfer(Serves):
    module, distribution = "flashinfer", "flashinfer-python"
    # by kind of row the function that it calls: module, name, and arguments that a part may lack
    calls: ClassVar[dict[str, tuple[str, ...]]] = {}

    def inapplicable(self, workload: Any) -> str | None:
        reason = super().inapplicable(workload)
        more = CHECKPOINTS if getattr(workload, "every", 0) else ()
        return reason or lacking(*self.calls[workload.kind], *more)


class FlashInferGathers(FlashInfer):
    """Its functions on gathered states: vLLM's way."""

    name, label = "flashinfer_gathers", "FlashInfer, gather and scatter"
    calls: ClassVar = {"pool_prefill": PROMPT, "pool_decode": TOKEN}

    def pool_prefill(self, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
        x, slots = _Prompts(workload, inputs), slots_of(workload, inputs.states.device)
        pool, out = paged(inputs, slots), torch.empty_like(x.v)
        starts, ends = slots.starts.long(), slots.ends.long()

        def run() -> Tensor:
            states = pool[starts]
            if len(slots.fresh):
                states.index_fill_(0, slots.fresh, 0)
            o, states = x.run(initial_state=states.float())
            out.copy_(o)
            pool[ends] = states.to(pool.dtype)
            return out

        return Call.public(run, lambda o: prefill_results(o[None], pool[ends], x.kept))

    def pool_decode(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, decode = batch_of(workload, inputs), _token(workload, inputs)
        slots = batch.starts.long()

        def run() -> Tensor:
            o, states = decode(state=batch.pool[slots])
            batch.pool[slots] = states
            return torch.as_tensor(o)

        return Call.public(run, batch.results)


class FlashInferPool(FlashInfer):
    """Its functions that take slots: a row of the pool is where a sequence starts and ends.

    For prefill it gets a second pool to write to, so that a call can be repeated.
    """

    name, label = "flashinfer_pool", "FlashInfer, in the pool"
    calls: ClassVar = {
        "pool_prefill": (*PROMPT, "output_state", "state_indices"),
        "pool_decode": (*TOKEN, "initial_state", "initial_state_indices"),
        "drafts": (DECODE, "gated_delta_rule_mtp", "initial_state_indices", "ssm_state_indices"),
    }

    def pool_prefill(self, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
        x, device = _Prompts(workload, inputs), inputs.states.device
        slots, num_slots = shuffled(len(inputs.states), 0, device)
        before, after = (pool_of(inputs.states, slots, num_slots) for _ in range(2))
        rows = slots.long()
        zeroed = rows[slots_of(workload, device).fresh]
        into = {"output_state": after, "state_indices": slots, "output": torch.empty_like(x.v)}

        def run() -> Tensor:
            if len(zeroed):
                before.index_fill_(0, zeroed, 0)
            return torch.as_tensor(x.run(initial_state=before, **into)[0])

        return Call.public(run, lambda o: prefill_results(o[None], after[rows], x.kept))

    def pool_decode(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, decode = batch_of(workload, inputs), _token(workload, inputs)
        slots = {"initial_state": batch.pool, "initial_state_indices": from_minus_one(batch.starts)}
        run = partial(_first, decode, state=None, **slots)
        return Call.public(run, batch.results)

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        shape, (A_log, dt_bias) = (len(batch.table), workload.width), inputs.weights
        q, k, v, a, b = (
            y.reshape(*shape, *y.shape[1:]).contiguous() for y in (x.q[0], x.k[0], x.v[0], x.a, x.b)
        )
        run = partial(
            _first, importlib.import_module(DECODE).gated_delta_rule_mtp, q=q, k=k, v=v,
            initial_state=batch.pool, initial_state_indices=from_minus_one(batch.starts),
            A_log=A_log, a=a, dt_bias=dt_bias, b=b, output=torch.empty_like(v),
            ssm_state_indices=from_minus_one(batch.table), disable_state_update=False,
            use_qk_l2norm=True,
        )  # fmt: skip
        return Call.public(run, batch.results)


def _first(function: Any, **call: Any) -> Tensor:
    """o, of what a function returns."""
    return torch.as_tensor(function(**call)[0])


class _Prompts:
    """FlashInfer's prefill, given all but states: e^g, beta in fp32, checkpoints."""

    def __init__(self, workload: PoolPrefill, inputs: PrefillInputs) -> None:
        q, k, self.v = (x[0].contiguous() for x in inputs.rule[:3])
        self.kept = checkpoints_of(workload, inputs)
        options: dict[str, Any] = {}
        if workload.every:
            counts = torch.arange(len(inputs.states) + 1, device=q.device)
            starts = {"checkpoint_cu_starts": counts * workload.kept}
            every = {"checkpoint_every_n_tokens": workload.every}
            options = {"state_checkpoints": self.kept, **every, **starts}
        self.run = partial(
            importlib.import_module(PREFILL).chunk_gated_delta_rule, q, k, self.v,
            inputs.rule.g[0].exp(), inputs.rule.beta[0].float(), scale=workload.head_dim**-0.5,
            output_final_state=True, cu_seqlens=inputs.cu_seqlens, use_cp="auto",
            max_seqlen=max(workload.lengths), **options,
        )  # fmt: skip


def _token(workload: PoolDecode, inputs: StepInputs) -> Any:
    """FlashInfer's decoding, given all but states."""
    (A_log, dt_bias), x = inputs.weights, Drafted(workload, inputs)
    q, k, v, a, b = (y[:, None].contiguous() for y in (x.q[0], x.k[0], x.v[0], x.a, x.b))
    return partial(
        importlib.import_module(DECODE).gated_delta_rule_decode_pretranspose, q=q, k=k, v=v, a=a,
        b=b, A_log=A_log, dt_bias=dt_bias, output=torch.empty_like(v), use_qk_l2norm=True,
    )  # fmt: skip


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
        return partial(
            function(self.name, PACKED[self.name], name), mixed_qkv=rows, a=a, b=b, A_log=A_log,
            dt_bias=dt_bias, scale=states.shape[-1] ** -0.5, initial_state=states, out=out,
            ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def verifying(self, inputs: StepInputs, **call: Any) -> Any:
        """The function of drafts."""
        update = function(self.name, DRAFTS[self.name], "fused_sigmoid_gating_delta_rule_update")
        A_log, dt_bias = inputs.weights
        return partial(update, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True, **call)

    def pool_decode(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, (a, b) = batch_of(workload, inputs), inputs.gates.unbind(1)
        out = inputs.rows.new_empty(len(a), 1, *inputs.states.shape[1:3])
        slots = self.padded(batch.starts)
        decode = self.packed(inputs.rows, a, b, *inputs.weights, batch.pool, out, slots)

        def run() -> Tensor:
            decode()
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
            self.packed(y, a, b, A_log, dt_bias, states, out, slots)()
            return torch.as_tensor(norm(out, z, weight))

        return Call.public(run, lambda y: {"o": y.transpose(0, 1), "ht": states[1:].clone()})


class VLLM(_Engine):
    name, label, distribution = "vllm", "vLLM's Triton", "vllm"
    overwrites = True

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        q, k, v, a, b = (y.contiguous() for y in (x.q, x.k, x.v, x.a[None], x.b[None]))
        update = self.verifying(
            inputs, a=a, b=b, q=q, k=k, v=v, initial_state=batch.pool, cu_seqlens=x.bounds,
            ssm_state_indices=batch.table, num_accepted_tokens=batch.accepted,
        )  # fmt: skip
        return Call.public(partial(_first, update), batch.results)


class SGLang(_Engine):
    """States after drafts go into a buffer, and the pool stays as it is.

    Its function of a token rounds beta to the dtype of b.
    """

    name, label, distribution = "sglang", "SGLang's Triton", "sglang"
    rounds: ClassVar = ("ht",)

    def padded(self, slots: Tensor) -> Tensor:
        return from_minus_one(slots)

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        N, width, live = workload.sequences, workload.width, workload.live
        buffer = inputs.states.new_empty(N, width, *inputs.states.shape[1:])
        slots = self.padded(batch.starts)
        run = self.verifying(
            inputs, a=x.a, b=x.b, softplus_beta=1.0, softplus_threshold=20.0, q=x.q, k=x.k, v=x.v,
            initial_state_source=batch.pool, initial_state_indices=slots, cu_seqlens=x.bounds,
            disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=width,
            intermediate_state_indices=torch.arange(N, dtype=torch.int32, device=slots.device),
            retrieve_parent_token=None,
        )  # fmt: skip

        def collect(o: Tensor) -> dict[str, Tensor]:
            return {**batch.results(o), "ht": buffer[:live].flatten(0, 1)}

        return Call.public(run, collect)


def known() -> list[Implementation]:
    """Who is timed on pools of states."""
    others = OursOneToken(), OursTwo(), FlashInferGathers(), FlashInferPool(), VLLM(), SGLang()
    return [OursServing(), *others]
