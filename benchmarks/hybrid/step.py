"""Decoding: a token of each sequence, or its drafts; rows, inputs, counted work and truth.

It is the gated delta rule in a pool of states, or a layer between its projections: convolution,
rule, RMSNorm and gate. Calls overwrite what they read. So that every call of a row does the same
work on the same numbers, a sequence gets the same token again and again, its drafts and its
convolution's last tokens are that token, and its state [V, K] is the one that the token leaves as
it is,

    S = s k^T,  s = beta v / (1 - d (1 - beta))        as d S + beta (v - d S k) k^T = S

A state that is decoded in a pool differs from it a little, so that a call which does not write
states is wrong. The truth is a step by the definitions, in fp64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..harness.truth import Truth
from ..harness.workload import Heads, Work, Workload

APART = 2e-4  # of a state's norm: 10 times what a state may be off, and too little to change o
AT_ONCE = 64  # sequences whose states and truth are computed together


class Decoding(Workload):
    """`width` tokens of each sequence, with states in fp32."""

    sequences: int
    head_dim: int
    direction = "fwd"
    taps = 0  # of a layer's convolution; 0: the rule alone

    @property
    def width(self) -> int:
        return 1

    @property
    def layout(self) -> str:
        return f"{self.sequences} of {self.width}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.width

    @property
    def live(self) -> int:
        """Sequences that are no padding."""
        return self.sequences

    @property
    def channels(self) -> int:
        return (2 * self.heads[0] + self.heads[1]) * self.head_dim


@dataclass(frozen=True)
class DecodeStep(Decoding):
    """A layer, between its projections."""

    heads: Heads
    sequences: int
    head_dim: int = 128

    family, kind, what = "hybrid", "decoding", "a token of each sequence"
    taps = 4

    @property
    def name(self) -> str:
        return f"hybrid-step-{self.heads_label}-{self.sequences}"

    def reduced(self, factor: int) -> "DecodeStep":
        """Fewer sequences and smaller heads, for machines without a GPU."""
        return replace(self, sequences=max(1, self.sequences // factor), head_dim=16)


STEPS = tuple(
    DecodeStep(heads, count)
    for heads in ((2, 8), (4, 16), (16, 32), (16, 64))
    for count in (1, 8, 64, 256)
)


class StepInputs(NamedTuple):
    rows: Tensor  # [N, channels], or [N, channels + HV V]: z behind q, k and v, as projections do
    gates: Tensor  # [N, 2, HV]: a and b
    states: Tensor  # [live, HV, V, K] fp32
    weights: tuple[Tensor, ...]  # A_log, dt_bias [HV]; a layer's conv [channels, taps], norm [V]
    last: Tensor | None  # [N, taps - 1, channels]: tokens before, of a layer


def step_inputs(
    workload: Decoding, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    HV, D, N = workload.heads[1], workload.head_dim, workload.sequences
    C, taps = workload.channels, workload.taps

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # first, and from one seed: input sets have the same weights
    of_layer: tuple[Tensor, ...] = ()
    if taps:
        of_layer = taps_of(normal(C, taps)).to(dtype), (1 + normal(D) / 8).to(dtype)
    weights = torch.linspace(-3, 1, HV, device=device), normal(HV), *of_layer
    generator.manual_seed(seed)
    rows = normal(N, C + HV * D if taps else C).to(dtype)
    gates = torch.stack([normal(N, HV), inputs_of_beta(normal(N, HV))], 1).to(dtype)
    last = rows[:, None, :C].repeat(1, taps - 1, 1) if taps else None
    states, apart = normal(workload.live, HV, D, D), APART if workload.kind == "pool_decode" else 0
    inputs = StepInputs(rows, gates, states, weights, last)
    for part in _parts(workload):
        _, *of_state = _prepared(workload, inputs, part)
        fixed = kept_state(*of_state)
        # a number of `states` is about 1, a number of the state that stays about its norm / D
        norm = fixed.flatten(-2).norm(dim=-1)
        states[part].mul_((apart / D * norm)[..., None, None]).add_(fixed)
    return inputs


def taps_of(x: Tensor) -> Tensor:
    """The convolution's weights [C, taps], powers of two whose signs are those of x.

    Triton rounds a product of two tensors in bf16 to bf16. Of these weights no product is rounded,
    so that engines convolve as the truth does, and find the state that their token leaves as it is.
    """
    return x.sign() / 2 ** torch.arange(x.shape[1], device=x.device)


def inputs_of_beta(x: Tensor) -> Tensor:
    """b, chosen by normal x among numbers in (-3, 3) whose sigmoid is nearly one of bf16.

    SGLang rounds beta to bf16. Its states would not stay as they are, and the harness would take
    a replay of its graph for one that does not write its result.
    """
    every = (torch.arange(-384, 385, device=x.device) / 128).bfloat16().double()
    beta = every.sigmoid()
    few = every[(beta.bfloat16() / beta - 1).abs() < 2**-15].to(x.dtype)
    return few[(len(few) * torch.special.ndtr(x)).long().clamp(0, len(few) - 1)]


def step_work(workload: Decoding, element_size: int) -> Work:
    """Of sequences that are no padding: a state read, and one written for each token; rows and o.

    Of a layer also z, and the last tokens read and written. y of the convolution, and o as the norm
    reads it, do not count.
    """
    HV, D, C, taps = workload.heads[1], workload.head_dim, workload.channels, workload.taps
    states, tokens = HV * D * D, workload.live * workload.width
    row = C + HV * D + (2 * (taps - 1) * C + HV * D if taps else 2 * HV)
    moved = 4.0 * workload.live * (1 + workload.width) * states + element_size * tokens * row
    return Work(8.0 * tokens * states, moved)


def step_truth(workload: Decoding, inputs: StepInputs) -> Truth:
    from reference import gdn

    each: list[tuple[Tensor, Tensor]] = []
    for part in _parts(workload):
        S = inputs.states[part].double()
        o = stepped(S, *_prepared(workload, inputs, part))
        if workload.taps:
            z, norm = gate_of(workload, inputs)[part].double(), inputs.weights[-1].double()
            o = gdn.gated_rms_norm(o, z, norm)
        each.append((o.float(), S.float()))
    o, S = (torch.cat(x).repeat_interleave(workload.width, 0) for x in zip(*each, strict=True))
    heads = workload.heads[0]
    in_fp32 = () if workload.taps else ("ht",)
    return Truth({"o": o[None], "ht": S}, tuple(range(heads)), heads, in_fp32)


def gate_of(workload: Decoding, inputs: StepInputs) -> Tensor:
    """z of a layer, [N, HV, V]."""
    return torch.unflatten(inputs.rows[:, workload.channels :], 1, (-1, workload.head_dim))


def _parts(workload: Decoding) -> Iterator[slice]:
    """Some of the sequences that are no padding."""
    for start in range(0, workload.live, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, workload.live))


def _prepared(workload: Decoding, inputs: StepInputs, part: slice) -> tuple[Tensor, ...]:
    """q and k of each value head, v, the decay and beta of some sequences, in fp64."""
    from reference import conv, gdn

    (H, HV), (A_log, dt_bias, *of_layer) = workload.heads, (x.double() for x in inputs.weights)
    y = inputs.rows[part, : workload.channels].double()
    if inputs.last is not None:  # behind the convolution, which rounds
        y = conv.update(y, inputs.last[part].double().mT, of_layer[0], None, True)[0]
        y = y.to(inputs.rows.dtype).double()
    y = torch.unflatten(y, 1, (2 * H + HV, -1))
    q, k = (gdn.l2norm(x).repeat_interleave(HV // H, 1) for x in (y[:, :H], y[:, H : 2 * H]))
    a, b = inputs.gates[part].double().unbind(1)
    return q, k, y[:, 2 * H :], gdn.gate(a[:, None], A_log, dt_bias)[:, 0].exp(), b.sigmoid()


def kept_state(k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    """The state [N, HV, V, K] that a token leaves as it is."""
    return torch.einsum("nhv,nhk->nhvk", v * (beta / (1 - d * (1 - beta)))[..., None], k)


def stepped(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    """Returns o of a token, and leaves the state after it in S."""
    u = beta[..., None] * (v - d[..., None] * torch.einsum("nhvk,nhk->nhv", S, k))
    S.mul_(d[..., None, None]).add_(torch.einsum("nhk,nhv->nhvk", k, u))
    return torch.mul(torch.einsum("nhvk,nhk->nhv", S, q), q.shape[-1] ** -0.5)
