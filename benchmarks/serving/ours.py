"""Serving by us: what `ours` is on a pool, and the same with launches apart."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import qla_kernels

from ..gdn.ours import Ours, on_host
from ..harness.adapters import Call, Implementation
from ..hybrid.rivals import OursStep, in_two
from ..hybrid.step import StepInputs
from .problem import Batch, Drafted, PrefillInputs, Slots, batch_of, pool_of, slots_of
from .workloads import LayerStep, PoolDecode, PoolPrefill


class OursServing(Ours):
    """Also the calls of an engine; everything else as before."""

    def prepare(self, workload: Any, inputs: Any) -> Call:
        if workload.served:
            return Implementation.prepare(self, workload, inputs)
        return super().prepare(workload, inputs)

    def pool_prefill(self, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
        q, k, v, g, beta, *_ = inputs.rule
        slots = slots_of(workload, v.device)
        pool, kept = paged(inputs, slots), checkpoints_of(workload, inputs)
        options: dict[str, Any] = {"cu_seqlens_cpu": on_host(workload)}
        if kept is not None:
            counts = torch.arange(len(slots.ends), device=v.device, dtype=torch.int32)
            starts = {"checkpoint_starts": counts * workload.kept}
            options |= {"checkpoints": kept, "checkpoint_every": workload.every, **starts}
        run = partial(
            qla_kernels.prefill_gated_delta_rule, q, k, v, g, beta, pool, slots.ends,
            start_indices=slots.starts, null_slot=0, state_v_first=True, out=torch.empty_like(v),
            cu_seqlens=inputs.cu_seqlens, **options,
        )  # fmt: skip
        ends = slots.ends.long()
        return Call.public(run, lambda o: prefill_results(o, pool[ends], kept))

    def pool_decode(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        return one_token(batch_of(workload, inputs), inputs)

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch, x = batch_of(workload, inputs), Drafted(workload, inputs)
        A_log, dt_bias = inputs.weights
        names = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        flags: dict[str, Any] = dict.fromkeys(names, True)
        run = partial(
            qla_kernels.verify_gated_delta_rule, x.q, x.k, x.v, x.a[None], x.b[None], batch.pool,
            batch.table, A_log=A_log, dt_bias=dt_bias, cu_seqlens=x.bounds,
            num_accepted_tokens=batch.accepted, null_slot=0, state_v_first=True,
            out=torch.empty_like(x.v, memory_format=torch.contiguous_format),
            **flags,
        )  # fmt: skip
        return Call.public(run, batch.results)

    def decoding(self, workload: LayerStep, inputs: StepInputs) -> Call:
        return OursStep().decoding(workload, inputs)


class Serves(Implementation):
    """What has calls for workloads on pools alone, by the kinds of its methods."""

    on_request = True  # named by `names_for`

    def inapplicable(self, workload: Any) -> str | None:
        if not workload.served:
            return "it is timed on a pool of states alone"
        return super().inapplicable(workload)


class OursOneToken(Serves):
    """A step of decoding of the batch whose drafts are verified beside it.

    All drafts are one token that changes no state: a step's results are theirs.
    """

    name, label, distribution = "ours_step", "ours, a decode step", "qla-kernels"
    module, needs_cuda = "qla_kernels", False

    def drafts(self, workload: PoolDecode, inputs: StepInputs) -> Call:
        batch = batch_of(workload, inputs)
        slots, live, width = batch.starts.long(), batch.live, workload.width

        def collect(o: Tensor) -> dict[str, Tensor]:
            states = batch.pool[slots[:live]].repeat_interleave(width, 0)
            return {"o": o[:live].repeat_interleave(width, 0).transpose(0, 1), "ht": states}

        return Call.public(one_token(batch, inputs).run, collect)


class OursTwo(Serves, OursStep):
    """Convolution, then rule, norm and gate: states are loaded after the convolution."""

    name, label, step = "ours_step_two", "ours, two calls", staticmethod(in_two)


def one_token(batch: Batch, inputs: StepInputs) -> Call:
    a, b = inputs.gates.unbind(1)
    out = inputs.rows.new_empty(len(a), 1, *inputs.states.shape[1:3])
    call = inputs.rows, a, b, *inputs.weights, batch.pool, batch.starts
    run = partial(qla_kernels.packed_decode_gated_delta_rule, *call, null_slot=0, out=out)
    return Call.public(run, batch.results)


def paged(inputs: PrefillInputs, slots: Slots) -> Tensor:
    """A pool with the states that sequences start from."""
    old = slots.starts > 0
    return pool_of(inputs.states[old], slots.starts[old], slots.num_slots)


def checkpoints_of(workload: PoolPrefill, inputs: PrefillInputs) -> Tensor | None:
    """Room for them, in fp32."""
    if not workload.every:
        return None
    count, shape = len(inputs.states) * workload.kept, inputs.states.shape[1:]
    return inputs.states.new_empty((count, *shape), dtype=torch.float32)


def prefill_results(o: Tensor, states: Tensor, kept: Tensor | None) -> dict[str, Tensor]:
    found = {"o": o, "ht": states.mT}
    return found if kept is None else {**found, "kept": kept.mT}
