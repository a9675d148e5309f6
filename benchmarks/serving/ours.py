"""Serving by us: what `ours` is on a pool, and the same with launches apart."""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..gdn.ours import Ours
from ..harness.adapters import Call, Implementation
from ..hybrid.rivals import OursStep, OursTwoCalls
from .problem import Batch, DecodeInputs, PrefillInputs, Slots, batch_of, pool_of, slots_of
from .workloads import LayerStep, PoolDecode, PoolPrefill

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "null_slot": 0,
}  # fmt: skip


class OursServing(Ours):
    """Also the calls of an engine; everything else as before."""

    serves = ("pool_prefill", "pool_decode", "drafts", "decoding")

    def prepare(self, workload: Any, inputs: Any) -> Call:
        package = importlib.import_module(self.module)
        if isinstance(workload, PoolPrefill):
            return prefill(package, workload, inputs)
        if isinstance(workload, PoolDecode):
            batch = batch_of(workload, inputs)
            way = verify if workload.drafts else decode
            return way(package, workload, inputs, batch)
        if isinstance(workload, LayerStep):
            return OursStep().prepare(workload, inputs)
        return super().prepare(workload, inputs)


class Serves(Implementation):
    """What has calls for workloads on pools alone."""

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
    module, needs_cuda, serves = "qla_kernels", False, ("drafts",)

    def prepare(self, workload: PoolDecode, inputs: DecodeInputs) -> Call:
        package, batch = importlib.import_module(self.module), batch_of(workload, inputs)
        step = decode(package, workload, inputs, batch)
        slots, live, width = batch.starts.long(), batch.live, workload.width

        def collect(o: Tensor) -> dict[str, Tensor]:
            states = batch.pool[slots[:live]].repeat_interleave(width, 0)
            return {"o": o[:live].repeat_interleave(width, 0).transpose(0, 1), "ht": states}

        return Call(step.run, collect, step.eager)


class OursTwo(Serves):
    """Convolution, then rule, norm and gate: states are loaded after the convolution."""

    name, label, distribution = "ours_step_two", "ours, two calls", "qla-kernels"
    module, needs_cuda, serves = "qla_kernels", False, ("decoding",)

    def prepare(self, workload: LayerStep, inputs: Any) -> Call:
        return OursTwoCalls().prepare(workload, inputs)


def prefill(package: Any, workload: PoolPrefill, inputs: PrefillInputs) -> Call:
    q, k, v, g, beta, *_ = inputs.rule
    cu, slots = inputs.cu_seqlens, slots_of(workload, v.device)
    pool = paged(inputs, slots)
    kept, options = checkpoints_of(workload, inputs), dict[str, Any]()
    if workload.every:
        counts = torch.arange(len(slots.ends), device=v.device, dtype=torch.int32)
        options = {
            "checkpoints": kept, "checkpoint_every": workload.every,
            "checkpoint_starts": counts * workload.kept,
        }  # fmt: skip
    bounds = {"cu_seqlens": cu, "cu_seqlens_cpu": bounds_of(workload)}
    out, ends = torch.empty_like(v), slots.ends.long()

    def run() -> Tensor:
        o: Tensor = package.prefill_gated_delta_rule(
            q, k, v, g, beta, pool, slots.ends, start_indices=slots.starts, null_slot=0,
            state_v_first=True, out=out, **bounds, **options,
        )  # fmt: skip
        return o

    return Call(run, lambda o: prefill_results(o, pool[ends], kept), lambda: run)


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


def bounds_of(workload: PoolPrefill) -> Tensor:
    """cu_seqlens, as an engine knows them that packed the prompts."""
    return torch.tensor([0, *workload.lengths]).cumsum(0)


def decode(package: Any, workload: PoolDecode, inputs: DecodeInputs, batch: Batch) -> Call:
    a, b = inputs.gates.chunk(2, 1)
    out = inputs.rows.new_empty(len(a), 1, *inputs.states.shape[1:3])
    call = inputs.rows, a, b, *inputs.weights, batch.pool, batch.starts

    def run() -> Tensor:
        o: Tensor = package.packed_decode_gated_delta_rule(*call, null_slot=0, out=out)
        return o

    return Call(run, batch.results, lambda: run)


def verify(package: Any, workload: PoolDecode, inputs: DecodeInputs, batch: Batch) -> Call:
    x = Drafted(workload, inputs)
    A_log, dt_bias = inputs.weights
    options = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": x.bounds, **FLAGS}

    def run() -> Tensor:
        o: Tensor = package.verify_gated_delta_rule(
            x.q, x.k, x.v, x.a[None], x.b[None], batch.pool, batch.table,
            num_accepted_tokens=batch.accepted, out=x.out, **options,
        )  # fmt: skip
        return o

    return Call(run, batch.results, lambda: run)


class Drafted:
    """Drafts of all sequences, packed: each sequence's token again and again."""

    def __init__(self, workload: PoolDecode, inputs: DecodeInputs) -> None:
        (H, HV), D, width = workload.heads, workload.head_dim, workload.width
        rows = inputs.rows.repeat_interleave(width, 0)
        gates = inputs.gates.repeat_interleave(width, 0)
        parts = torch.split(rows, [H * D, H * D, HV * D], 1)
        self.q, self.k, self.v = (torch.unflatten(x, 1, (-1, D))[None] for x in parts)
        self.a, self.b = gates.chunk(2, 1)  # [T, HV]
        self.bounds = torch.arange(0, len(rows) + 1, width, device=rows.device, dtype=torch.int32)
        self.out = torch.empty_like(self.v, memory_format=torch.contiguous_format)
