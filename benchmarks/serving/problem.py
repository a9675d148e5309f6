"""Calls of an engine made concrete: a pool of states, inputs, counted work and truth.

A pool has pages with room for other layers' data, and slots in any order.

Prefill: the truth is the chunked algorithm in fp64, whose states before chunks are the checkpoints.
On a GPU it has all heads, a few at a time; without one the first and the last key head.

Decoding: calls overwrite what they read. So that every call of a row does the same work on the same
numbers, a sequence gets the same token again and again, all its drafts are that token, and its
state [V, K] is the one that the token leaves as it is,

    S = s k^T,  s = beta v / (1 - d (1 - beta))        as d S + beta (v - d S k) k^T = S

When decoding, a state differs from it a little, so that a call which does not write states is
wrong. Of drafts all slots but the one that a sequence starts from hold NaN before the first call.
The truth is a step by the definitions, in fp64.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..gdn.problem import CHUNK, GdnInputs, gdn_inputs, gdn_work, heads_at_once, of_heads
from ..gdn.workloads import Gdn
from ..harness.floor import Work
from ..harness.truth import Truth, head_axis
from ..hybrid.step import inputs_of_beta, kept_state, stepped, token
from .workloads import PoolDecode, PoolPrefill

PAGE = 4096  # numbers of a page that belong to something else
BESIDE = 5  # slots of other sequences, for each sixteen that are in use
APART = 2e-4  # of a state's norm: 10 times what a state may be off, and too little to change o
AT_ONCE = 64  # sequences whose truth is computed together


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
    H, on_gpu = workload.heads[0], inputs.states.is_cuda
    fresh = slots_of(workload, inputs.states.device).fresh
    states = inputs.states.float().mT.index_fill(0, fresh, 0)
    given = inputs.rule._replace(initial_state=states)
    heads = tuple(range(H)) if on_gpu else tuple(sorted({0, H - 1}))
    step = heads_at_once(rule_of(workload)) if on_gpu else len(heads)
    parts = [
        _prefilled(workload, of_heads(given, heads[i : i + step], H))
        for i in range(0, len(heads), step)
    ]
    want = {name: torch.cat([p[name] for p in parts], head_axis(name)) for name in parts[0]}
    rounded = ("ht",) if workload.pool == "bfloat16" else ()
    return Truth(want, heads, H, (), rounded=rounded)


def _prefilled(workload: PoolPrefill, inputs: GdnInputs) -> dict[str, Tensor]:
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


# --- decoding


class DecodeInputs(NamedTuple):
    rows: Tensor  # [N, (2 H + HV) D]: queries, keys and values of a token
    gates: Tensor  # [N, 2 HV]: a and b, as a projection returns them
    states: Tensor  # [live, HV, V, K] fp32
    weights: tuple[Tensor, Tensor]  # A_log [HV], dt_bias [HV]


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


def decode_inputs(
    workload: PoolDecode, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> DecodeInputs:
    generator = torch.Generator(device).manual_seed(0)
    (_, HV), N, D = workload.heads, workload.sequences, workload.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # first, and from one seed: input sets have the same weights
    weights = torch.linspace(-3, 1, HV, device=device), normal(HV)
    generator.manual_seed(seed)
    rows = normal(N, workload.channels).to(dtype)
    gates = torch.cat([normal(N, HV), inputs_of_beta(normal(N, HV))], 1).to(dtype)
    inputs = DecodeInputs(rows, gates, normal(workload.live, HV, D, D), weights)
    for part in _parts(workload):
        _, *of_state = prepared(workload, inputs, part)
        fixed, noise = kept_state(*of_state), inputs.states[part]
        if workload.drafts:
            noise.zero_()
        # a number of `noise` is about 1, a number of a state about its norm / D
        norm = fixed.flatten(-2).norm(dim=-1)
        noise.mul_((APART / D * norm)[..., None, None]).add_(fixed)
    return inputs


def batch_of(workload: PoolDecode, inputs: DecodeInputs) -> Batch:
    """A pool of its own for each caller."""
    device, (N, width) = inputs.rows.device, (workload.sequences, workload.width)
    slots, num_slots = shuffled(N * width, 1, device)
    table = slots.view(N, width)
    table[workload.live :] = 0
    accepted = torch.arange(N, device=device, dtype=torch.int32) % width + 1
    batch = Batch(table.new_empty(0), table, accepted, workload.live)
    pool = pool_of(inputs.states, batch.starts[: workload.live], num_slots)
    return batch._replace(pool=pool)


def decode_work(workload: PoolDecode, element_size: int) -> Work:
    """Of sequences that are no padding: a state read, a state written for each token, rows, o."""
    (_, HV), D, width = workload.heads, workload.head_dim, workload.width
    states, tokens = HV * D * D, workload.live * width
    rows = workload.channels + 2 * HV + HV * D
    moved = 4.0 * workload.live * (1 + width) * states + element_size * tokens * rows
    return Work(8.0 * tokens * states, moved)


def decode_truth(workload: PoolDecode, inputs: DecodeInputs) -> Truth:
    o, states = [], []
    for part in _parts(workload):
        S = inputs.states[part].double()
        o.append(stepped(S, *prepared(workload, inputs, part)))
        states.append(S.float())
    each = workload.width
    want = {
        "o": torch.cat(o).repeat_interleave(each, 0)[None].float(),
        "ht": torch.cat(states).repeat_interleave(each, 0),
    }
    return Truth(want, tuple(range(workload.heads[0])), workload.heads[0], ("ht",))


def prepared(workload: PoolDecode, inputs: DecodeInputs, part: slice) -> tuple[Tensor, ...]:
    """What the rule gets of a token, of some sequences."""
    a, b = inputs.gates[part].double().chunk(2, 1)
    weights = (x.double() for x in inputs.weights)
    return token(workload.heads, inputs.rows[part].double(), a, b, *weights)


def _parts(workload: PoolDecode) -> Iterator[slice]:
    """Some of the sequences that are no padding."""
    for start in range(0, workload.live, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, workload.live))
