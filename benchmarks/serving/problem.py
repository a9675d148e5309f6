"""Calls of an engine made concrete: a pool of states, prompts, drafts, and the truth of prefill.

A pool has pages with room for other layers' data, and slots in any order. The truth of prefill is
the chunked algorithm in fp64, whose states before chunks are the checkpoints: on a GPU of all
heads, a few at a time; without one of the first and the last key head. Decoding has its inputs and
its truth from hybrid.step; of drafts all slots but the one that a sequence starts from hold NaN
before the first call.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..gdn.problem import CHUNK, GdnInputs, gdn_inputs, gdn_work, truth_by_heads
from ..gdn.workloads import Gdn
from ..harness.truth import Truth
from ..harness.workload import Work
from ..hybrid.step import StepInputs
from .workloads import PoolDecode, PoolPrefill

PAGE = 4096  # numbers of a page that belong to something else
BESIDE = 5  # slots of other sequences, for each sixteen that are in use


def pool_of(states: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """A pool [num_slots, HV, V, K] with states [n, HV, V, K] in `slots`, and NaN in all others.

    A page is longer than a state. Slot 0 is no state.
    """
    size = states[0].numel()
    pages = states.new_full((num_slots, size + PAGE), torch.nan)
    pool = torch.unflatten(pages[:, :size], 1, states.shape[1:])
    pool[slots.long()] = states
    return pool


def shuffled(count: int, seed: int, device: torch.device) -> tuple[Tensor, int]:
    """So many slots in random order, int32, and the size of a pool that has them among others."""
    others = 1 + BESIDE * count // 16
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count + others, generator=generator)[:count] + 1
    return order.to(device, torch.int32), 1 + count + others


def from_minus_one(slots: Tensor) -> Tensor:
    """Slots of an interface in which -1 is padding, and slot 0 is a state."""
    return torch.where(slots == 0, -1, slots)


# --- prefill


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
    fresh = slots_of(workload, inputs.states.device).fresh
    states = inputs.states.float().mT.index_fill(0, fresh, 0)
    rule, of_rule = rule_of(workload), inputs.rule._replace(initial_state=states)
    truth = truth_by_heads(rule, of_rule, partial(_prefilled, workload))
    return truth._replace(rounded=("ht",) if workload.pool == "bfloat16" else ())


def _prefilled(workload: PoolPrefill, inputs: GdnInputs) -> dict[str, Tensor]:
    from reference import gdn

    q, k, v, g, beta, h0, cu, *_ = inputs
    forward = gdn.chunked(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)
    found = {"o": forward.o, "ht": forward.final_state}
    if workload.every:
        before = torch.unflatten(forward.h[0], 0, (len(workload.lengths), -1))
        states = torch.cat([before, forward.final_state[:, None]], 1)  # [N, chunks + 1, HV, K, V]
        chunks = workload.every // CHUNK
        found["kept"] = states[:, chunks::chunks].flatten(0, 1)
    return found


# --- decoding


class Batch(NamedTuple):
    """The pool of a batch, and its slots."""

    pool: Tensor  # [slots, HV, V, K]
    table: Tensor  # [N, width] int32: a slot for the state after each token; 0 is padding
    accepted: Tensor  # [N] int32: a sequence starts from slot table[n, accepted[n] - 1]
    live: int  # sequences that are none

    @property
    def used(self) -> Tensor:
        """The slots that are written, int64."""
        return self.table[: self.live].flatten().long()

    @property
    def starts(self) -> Tensor:
        """[N] int32."""
        return self.table.gather(1, self.accepted[:, None].long() - 1)[:, 0]

    def results(self, o: Tensor) -> dict[str, Tensor]:
        """o of all tokens, and states as the pool has them; of padding nothing is judged."""
        width = self.table.shape[1]
        live = o.view(-1, *o.shape[-2:])[: self.live * width]
        return {"o": live[None], "ht": self.pool[self.used]}


def batch_of(workload: PoolDecode, inputs: StepInputs) -> Batch:
    """A pool of its own for each caller."""
    device, (N, width) = inputs.rows.device, (workload.sequences, workload.width)
    slots, num_slots = shuffled(N * width, 1, device)
    table = slots.view(N, width)
    table[workload.live :] = 0
    accepted = torch.arange(N, device=device, dtype=torch.int32) % width + 1
    batch = Batch(table.new_empty(0), table, accepted, workload.live)
    pool = pool_of(inputs.states, batch.starts[: workload.live], num_slots)
    return batch._replace(pool=pool)


class Drafted:
    """Drafts of all sequences, packed: each sequence's token again and again."""

    def __init__(self, workload: PoolDecode, inputs: StepInputs) -> None:
        (H, HV), D, width = workload.heads, workload.head_dim, workload.width
        rows = inputs.rows.repeat_interleave(width, 0)
        parts = torch.split(rows, [H * D, H * D, HV * D], 1)
        self.q, self.k, self.v = (torch.unflatten(x, 1, (-1, D))[None] for x in parts)
        self.a, self.b = inputs.gates.repeat_interleave(width, 0).unbind(1)  # [T, HV]
        self.bounds = torch.arange(0, len(rows) + 1, width, device=rows.device, dtype=torch.int32)
