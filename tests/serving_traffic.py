"""A model of a server's traffic on a pool of states, in plain torch, beside the real calls.

Requests arrive, are prefilled in pieces, hit prefixes whose states were kept, decode, verify drafts
of which some are accepted, are preempted, end, and are evicted. The model holds a state for each
request; the pool holds what the calls write. After each step the two agree, and no slot has changed
that the step did not name. Gates, betas and norms are raw, as in an engine.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qla_kernels import (
    causal_conv1d_update,
    decode_gated_delta_net,
    packed_decode_gated_delta_rule,
    prefill_gated_delta_rule,
    verify_gated_delta_rule,
)
from reference import conv, gdn

DRAFTS = 3  # tokens of a verification
WIDTH = 4  # of the convolution


@dataclass
class Request:
    slot: int
    state: Tensor  # [HV, K, V], what the model says
    tokens: int = 0
    spare: list[int] = field(default_factory=list)  # slots of its drafts
    accepted: int = 1
    last: Tensor | None = None  # [channels, WIDTH - 1], what the model says of the convolution


class Traffic:
    """Requests on a pool [slots, HV, V, K] of which slot 0 is no state."""

    def __init__(
        self, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64,
        sizes: tuple[int, int] = (8, 4), heads: tuple[int, int] = (1, 2), slots: int = 24,
        state: torch.dtype | None = None, limit: float = 1e-9,
    ) -> None:  # fmt: skip
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        (self.K, self.V), (self.H, self.HV) = sizes, heads
        self.device, self.dtype, self.limit = device, dtype, limit
        state = state or (torch.float64 if dtype == torch.float64 else torch.float32)
        room = torch.randn(slots, self.HV * self.V * self.K + 24, dtype=torch.float64)
        self.pool = room.to(device, state)[:, :-24].view(slots, self.HV, self.V, self.K)
        self.parameters = {
            "A_log": torch.linspace(-3, 0, self.HV).to(device),
            "dt_bias": torch.randn(self.HV).to(device),
        }
        channels = 2 * self.H * self.K + self.HV * self.V
        room = torch.randn(slots, WIDTH - 1, channels + 8, dtype=torch.float64).to(device, dtype)
        self.rows_before = room[..., :-8].mT  # [slots, channels, WIDTH - 1]
        self.conv_weight = torch.randn(channels, WIDTH).to(device, dtype)
        self.norm_weight = (torch.rand(self.V) + 0.5).to(device)
        self.free = list(range(1, slots))
        self.live: list[Request] = []
        self.prefixes: list[tuple[int, Tensor]] = []  # kept slots and their states
        self.done = dict.fromkeys(("prefill", "decode", "verify", "evict", "preempt", "hit"), 0)

    def take(self, count: int) -> list[int] | None:
        """Returns free slots; evicts a prefix where there are too few, else preempts nobody."""
        while len(self.free) < count and self.prefixes:
            slot, _ = self.prefixes.pop(self.draw.randrange(len(self.prefixes)))
            self.free.append(slot)
            self.done["evict"] += 1
        if len(self.free) < count:
            return None
        self.draw.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns packed rows [count, 2 * H * K + HV * V], and a and b [count, HV]."""
        width = 2 * self.H * self.K + self.HV * self.V
        wide = torch.randn(count, width + 16).to(self.device, self.dtype)
        a, b = (torch.randn(count, self.HV).to(self.device, self.dtype) for _ in range(2))
        return wide[:, :width], a, b

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.H * self.K
        q, k, v = torch.split(rows, [keys, keys, self.HV * self.V], 1)
        q, k = (x.view(1, len(x), self.H, self.K) for x in (q, k))
        return q, k, v.view(1, len(v), self.HV, self.V)

    def truth(self, rows: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o and the state after each of some tokens, by the definition in fp64."""
        q, k, v = (x.double().cpu() for x in self.split(rows))
        g = gdn.gate(a[None].double().cpu(), *(x.double().cpu() for x in self.parameters.values()))
        beta = gdn.beta_sigmoid(b[None].double().cpu())
        q, k = gdn.l2norm(q), gdn.l2norm(k)
        o, states = gdn.draft_recurrent(q, k, v, g, beta, initial_state=state[None])
        return o[0], states[0]

    def agree(self, what: str, got: Tensor, want: Tensor) -> None:
        error = (got.double().cpu() - want).norm() / want.norm().clamp(min=1e-6)
        assert error <= self.limit, f"{what}: relative error {error:.2e}"

    def flags(self) -> dict[str, Any]:
        return self.parameters | {
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "null_slot": 0,
        }  # fmt: skip

    def table(self, x: list[Any]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=self.device)

    def step(self) -> None:
        """Runs one step, and compares."""
        before = self.pool.clone()
        kinds = [self.prefill, self.decode, self.verify, self.preempt]
        named = self.draw.choices(kinds, (3, 4, 4, 1))[0]()
        same = [slot for slot in range(len(self.pool)) if slot not in named]
        assert torch.equal(self.pool[same], before[same]), "a slot was written that nobody named"
        for request in self.live:
            self.agree("state", self.pool[request.slot].mT, request.state)
        for slot, state in self.prefixes:
            self.agree("kept prefix", self.pool[slot].mT, state)

    def prefill(self) -> set[int]:
        """New requests, some from a kept prefix, beside further pieces of old ones."""
        found: list[tuple[Request, int]] = []  # and where to start
        # all at once: no prefix is evicted after a request has been told to start from it
        for slot in self.take(self.draw.randint(0, 2)) or ():
            zero = torch.zeros(self.HV, self.K, self.V, dtype=torch.float64)
            start, state = 0, zero
            if self.prefixes and self.draw.random() < 0.5:
                start, state = self.draw.choice(self.prefixes)
                self.done["hit"] += 1
            request = Request(slot, state.clone())
            self.live.append(request)
            found.append((request, start))
        old = [x for x in self.live if x not in [request for request, _ in found]]
        for request in self.draw.sample(old, min(len(old), self.draw.randint(0, 2))):
            found.append((request, request.slot))
        if not found:
            return set()
        lengths = [self.draw.choice((1, 5, 64, 70, 129)) for _ in found]
        total = sum(lengths) + self.draw.choice((0, 3))
        rows, a, b = self.rows(total)
        room = torch.full((len(found), *self.pool.shape[1:]), torch.nan, dtype=self.pool.dtype)
        kept, at = room.to(self.device), [length // 64 or -1 for length in lengths]
        ends, pads = [request.slot for request, _ in found], self.draw.randint(0, 1)
        o = prefill_gated_delta_rule(
            *self.split(rows), a[None], b[None], self.pool, self.table(ends + [0] * pads),
            start_indices=self.table([start for _, start in found] + [0] * pads),
            cu_seqlens=self.table([0, *torch.tensor(lengths).cumsum(0).tolist()])
            if not pads else self.table([0, *torch.tensor([*lengths, 0]).cumsum(0).tolist()]),
            checkpoints=kept, first_checkpoints=self.table(at + [-1] * pads), **self.flags(),
        )  # fmt: skip
        begin = 0
        for n, ((request, _), length) in enumerate(zip(found, lengths, strict=True)):
            mine = slice(begin, begin + length)
            want, states = self.truth(rows[mine], a[mine], b[mine], request.state)
            self.agree("o of a prefill", o[0, mine], want)
            if at[n] > 0:
                self.agree("checkpoint", kept[n].mT, states[64 * at[n] - 1])
            else:
                assert kept[n].isnan().all(), "a checkpoint that nobody asked for"
            request.state, request.tokens = states[-1], request.tokens + length
            begin += length
        assert not o[0, begin:].any(), "rows of no sequence are not 0"
        self.done["prefill"] += 1
        return set(ends) | self.keep_a_prefix()

    def keep_a_prefix(self) -> set[int]:
        """The server copies a state that others may start from."""
        if not self.live or self.draw.random() < 0.5 or (slots := self.take(1)) is None:
            return set()
        request = self.draw.choice(self.live)
        self.pool[slots[0]] = self.pool[request.slot]
        self.prefixes.append((slots[0], request.state.clone()))
        return set(slots)

    def decode(self) -> set[int]:
        batch = self.draw.sample(self.live, self.draw.randint(0, len(self.live)))
        padding = self.draw.randint(0, 2)
        rows, a, b = self.rows(len(batch) + padding)
        if not len(rows):
            return set()
        slots = [request.slot for request in batch]
        table, normed, convolved = (
            self.table(slots + [0] * padding),
            *self.draw.choices((0, 1), k=2),
        )
        rule = a, b, self.parameters["A_log"], self.parameters["dt_bias"], self.pool, table
        z = torch.randn(len(rows), self.HV, self.V).to(rows)
        norm = {"z": z, "norm_weight": self.norm_weight} if normed else {}
        if convolved:
            given, before = rows, self.rows_before.clone()
            for request in batch:
                if request.last is not None:  # the server moves it to the request's slot
                    self.rows_before[request.slot] = request.last
            pool = self.rows_before.clone()
            taps = self.conv_weight, None, "silu"
            rows = causal_conv1d_update(given, pool, *taps, table, null_slot=0)
            o = decode_gated_delta_net(
                given, *rule, self.rows_before, *taps, null_slot=0, **norm
            )  # fmt: skip
            assert torch.equal(self.rows_before, pool), "the two calls leave other tokens"
            same = [slot for slot in range(len(pool)) if slot not in slots]
            assert torch.equal(pool[same], before[same]), "a slot was written that nobody named"
        else:
            o = packed_decode_gated_delta_rule(rows, *rule, null_slot=0, **norm)
        for n, request in enumerate(batch):
            mine = slice(n, n + 1)
            want, states = self.truth(rows[mine], a[mine], b[mine], request.state)
            if convolved:
                self.convolve(request, given[n], before[request.slot], rows[n])
            if normed:
                want = gdn.gated_rms_norm(want, z[mine].double().cpu(), self.norm_weight.cpu())
            self.agree("o of a step", o[n], want)
            request.state, request.tokens = states[0], request.tokens + 1
        assert not o[len(batch) :].any(), "padding is not 0"
        self.done["decode"] += 1
        return set(slots)

    def convolve(self, request: Request, x: Tensor, before: Tensor, row: Tensor) -> None:
        """Compares a row after the convolution; a new request goes on from what its slot held."""
        last = before if request.last is None else request.last
        exact = (t.double().cpu() for t in (x[None], last[None], self.conv_weight))
        want, after = conv.update(*exact, None, True)
        self.agree("a convolved row", row, want[0])
        request.last = after[0].to(row)

    def verify(self) -> set[int]:
        """Drafts of some requests; then a random number of each is accepted."""
        batch: list[Request] = []
        for request in self.draw.sample(self.live, self.draw.randint(0, len(self.live))):
            if not request.spare and (slots := self.take(DRAFTS - 1)) is not None:
                request.spare = slots
            if request.spare:
                batch.append(request)
        if not batch:
            return set()
        tables = []
        for request in batch:  # the slot that holds the state stands where the last step left it
            row = list(request.spare)
            row.insert(request.accepted - 1, request.slot)
            tables.append(row)
        named = {slot for row in tables for slot in row}
        count = len(batch) * DRAFTS
        rows, a, b = self.rows(count)
        o = verify_gated_delta_rule(
            *self.split(rows), a[None], b[None], self.pool, self.table([*tables, [0] * DRAFTS]),
            num_accepted_tokens=self.table([*(request.accepted for request in batch), 1]),
            cu_seqlens=self.table([*range(0, count + 1, DRAFTS), count]), **self.flags(),
        )  # fmt: skip
        for n, (request, row) in enumerate(zip(batch, tables, strict=True)):
            mine = slice(n * DRAFTS, (n + 1) * DRAFTS)
            want, states = self.truth(rows[mine], a[mine], b[mine], request.state)
            self.agree("o of drafts", o[0, mine], want)
            request.accepted = self.draw.randint(1, DRAFTS)
            request.slot = row.pop(request.accepted - 1)
            request.spare, request.state = row, states[request.accepted - 1]
            request.tokens += request.accepted
        self.done["verify"] += 1
        return named

    def preempt(self) -> set[int]:
        """A request ends, or is put off: its slots are free for others."""
        if self.live:
            request = self.live.pop(self.draw.randrange(len(self.live)))
            self.free += [request.slot, *request.spare]
            self.done["preempt"] += 1
        return set()
