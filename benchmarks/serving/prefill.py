"""Prefill from and into a pool: inputs, counted work and truth.

The truth is the chunked algorithm in fp64, whose states before chunks are the checkpoints. On a GPU
it has all heads, a few at a time; without one the first and the last key head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..gdn.inputs import GdnInputs, gdn_inputs
from ..gdn.truth import heads_at_once, of_heads
from ..gdn.work import CHUNK, gdn_work
from ..gdn.workloads import Gdn
from ..harness.floor import Work
from ..harness.truth import Truth, head_axis
from .pool import shuffled
from .workloads import PoolPrefill


class PrefillInputs(NamedTuple):
    rule: GdnInputs  # without states
    states: Tensor  # [N, HV, V, K] in the pool's dtype; those of `fresh` sequences are not read
    cu_seqlens: Tensor  # [N + 1] int32


class Slots(NamedTuple):
    """Where sequences start and end; a fresh one starts from slot 0, which is no state."""

    starts: Tensor  # [N] int32
    ends: Tensor  # [N] int32
    fresh: Tensor  # int64, which sequences
    num_slots: int


def rule_of(workload: PoolPrefill) -> Gdn:
    return Gdn(workload.heads, workload.lengths, head_dim=workload.head_dim)


def prefill_inputs(
    workload: PoolPrefill, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PrefillInputs:
    rule = gdn_inputs(rule_of(workload), device, dtype, seed)
    generator = torch.Generator(device).manual_seed(seed + 1000)
    D, shape = workload.head_dim, (len(workload.lengths), workload.heads[1])
    states = torch.randn((*shape, D, D), generator=generator, device=device)
    return PrefillInputs(rule, states.to(getattr(torch, workload.pool)), rule.cu_seqlens)


def slots_of(workload: PoolPrefill, device: torch.device) -> Slots:
    count = len(workload.lengths)
    slots, num_slots = shuffled(2 * count, 0, device)
    fresh = torch.arange(1, count, 3, device=device)
    starts = slots[:count].index_fill(0, fresh, 0)
    return Slots(starts, slots[count:].clone(), fresh, num_slots)


def prefill_work(workload: PoolPrefill, element_size: int) -> Work:
    """The rule's, with states in the pool's dtype: those read, those written, and checkpoints."""
    count = len(workload.lengths)
    of_rule = gdn_work(rule_of(workload), element_size)  # with the final states, in fp32
    size = getattr(torch, workload.pool).itemsize
    read = count - len(range(1, count, 3))
    states = (read + count) * size + (workload.kept - 1) * count * 4
    return Work(of_rule.flops, of_rule.bytes + states * workload.heads[1] * workload.head_dim**2)


def prefill_truth(workload: PoolPrefill, inputs: PrefillInputs) -> Truth:
    H, on_gpu = workload.heads[0], inputs.states.is_cuda
    fresh = slots_of(workload, inputs.states.device).fresh
    states = inputs.states.float().mT.index_fill(0, fresh, 0)
    given = inputs.rule._replace(initial_state=states)
    heads = tuple(range(H)) if on_gpu else tuple(sorted({0, H - 1}))
    step = heads_at_once(rule_of(workload)) if on_gpu else len(heads)
    parts = [
        _evaluate(workload, of_heads(given, heads[i : i + step], H))
        for i in range(0, len(heads), step)
    ]
    want = {name: torch.cat([p[name] for p in parts], head_axis(name)) for name in parts[0]}
    rounded = ("ht",) if workload.pool == "bfloat16" else ()
    return Truth(want, heads, H, (), rounded=rounded)


def _evaluate(workload: PoolPrefill, inputs: GdnInputs) -> dict[str, Tensor]:
    from reference import gdn

    q, k, v, g, beta, h0, cu, *_ = inputs
    forward = gdn.chunked(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)
    found = {"o": forward.o.float(), "ht": forward.final_state.float()}
    if workload.every:
        before = torch.unflatten(
            forward.h[0], 0, (len(workload.lengths), -1)
        )  # [N, chunks, HV, K, V]
        last = forward.final_state[:, None]
        after = torch.cat([before, last], 1)[:, workload.every // CHUNK :: workload.every // CHUNK]
        found["kept"] = after.flatten(0, 1).float()
    return found
