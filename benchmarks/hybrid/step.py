"""A step of decoding of a gated delta net's layer, between its projections: rows, inputs and truth.

Every call of a row does the same work on the same numbers, although it overwrites its pools: a
sequence gets the same token again and again, its convolution's last tokens are that token, and its
state is the one that the token leaves as it is,

    S = k s^T,  s = beta v / (1 - d (1 - beta))        as d S + beta k (v - d S^T k)^T = S

The truth is a step from there by the definitions, in fp64.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..harness.floor import Work
from ..harness.truth import Truth
from ..harness.workload import Heads, Workload


@dataclass(frozen=True)
class DecodeStep(Workload):
    """One token of each sequence: convolution, rule, RMSNorm and gate, with fp32 states."""

    heads: Heads
    sequences: int
    head_dim: int = 128

    family = "hybrid"
    kind, direction, what = "decoding", "fwd", "a token of each sequence"
    width: ClassVar = 4  # of the convolution

    @property
    def name(self) -> str:
        return f"hybrid-step-{self.heads_label}-{self.sequences}"

    @property
    def layout(self) -> str:
        return f"{self.sequences} of 1"

    @property
    def tokens(self) -> int:
        return self.sequences

    @property
    def channels(self) -> int:
        return (2 * self.heads[0] + self.heads[1]) * self.head_dim

    def reduced(self, factor: int) -> "DecodeStep":
        """Fewer sequences and smaller heads, for machines without a GPU."""
        return replace(self, sequences=max(1, self.sequences // factor), head_dim=16)


STEPS = tuple(
    DecodeStep(heads, count)
    for heads in ((2, 8), (4, 16), (16, 32), (16, 64))
    for count in (1, 8, 64, 256)
)


class StepInputs(NamedTuple):
    rows: Tensor  # [N, channels + HV V]: what a projection returns, z behind q, k and v
    gates: Tensor  # [N, 2, HV]: a and b
    last: Tensor  # [N, width - 1, channels]
    states: Tensor  # [N, HV, V, K] fp32
    weights: tuple[Tensor, ...]  # conv [channels, width], A_log [HV], dt_bias [HV], norm [V]


def step_inputs(
    workload: DecodeStep, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    (_, HV), V, N, C = workload.heads, workload.head_dim, workload.sequences, workload.channels

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # first, and from one seed: input sets have the same weights
    taps, norm = taps_of(normal(C, workload.width)).to(dtype), (1 + normal(V) / 8).to(dtype)
    weights = taps, torch.linspace(-3, 1, HV, device=device), normal(HV), norm
    generator.manual_seed(seed)
    rows = normal(N, C + HV * V).to(dtype)
    gates = torch.stack([normal(N, HV), inputs_of_beta(normal(N, HV))], 1).to(dtype)
    last = rows[:, None, :C].repeat(1, workload.width - 1, 1)
    _, k, v, d, beta = _prepared(workload, StepInputs(rows, gates, last, rows, weights), dtype)
    return StepInputs(rows, gates, last, kept_state(k, v, d, beta).float(), weights)


def taps_of(x: Tensor) -> Tensor:
    """The convolution's weights [C, width], powers of two whose signs are those of x.

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


def step_work(workload: DecodeStep, element_size: int) -> Work:
    """Each state and each last token read and written; a projection's row read, a result written.

    y of the convolution, o and what a norm reads of it do not count.
    """
    (_, HV), D, N, C = workload.heads, workload.head_dim, workload.sequences, workload.channels
    states = 2 * HV * D * D
    rows = (2 * (workload.width - 1) + 1) * C + 2 * HV * D
    return Work(4.0 * N * states, N * (4.0 * states + element_size * rows))


def step_truth(workload: DecodeStep, inputs: StepInputs) -> Truth:
    from reference import gdn

    S = inputs.states.double()
    o = stepped(S, *_prepared(workload, inputs, inputs.rows.dtype))
    y = gdn.gated_rms_norm(o, gate_of(workload, inputs).double(), inputs.weights[3].double())
    heads = workload.heads[0]
    return Truth({"o": y[None].float(), "ht": S.float()}, tuple(range(heads)), heads, ())


def gate_of(workload: DecodeStep, inputs: StepInputs) -> Tensor:
    """z, [N, HV, V]."""
    return torch.unflatten(inputs.rows[:, workload.channels :], 1, (-1, workload.head_dim))


def _prepared(workload: DecodeStep, inputs: StepInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the rule gets of a token, behind the convolution, which rounds."""
    from reference import conv

    taps, A_log, dt_bias, _ = (x.double() for x in inputs.weights)
    rows = inputs.rows[:, : workload.channels].double()
    y = conv.update(rows, inputs.last.double().mT, taps, None, True)[0].to(dtype).double()
    a, b = inputs.gates.double().unbind(1)
    return token(workload.heads, y, a, b, A_log, dt_bias)


def token(
    heads: Heads, y: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, ...]:
    """q and k of each value head, v, the decay and beta, in fp64, of rows y of all heads."""
    from reference import gdn

    (H, HV), y = heads, torch.unflatten(y, 1, (2 * heads[0] + heads[1], -1))
    q, k = (gdn.l2norm(x).repeat_interleave(HV // H, 1) for x in (y[:, :H], y[:, H : 2 * H]))
    return q, k, y[:, 2 * H :], gdn.gate(a[:, None], A_log, dt_bias)[:, 0].exp(), b.sigmoid()


def kept_state(k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    """The state [N, HV, V, K] that a token leaves as it is."""
    return torch.einsum("nhv,nhk->nhvk", v * (beta / (1 - d * (1 - beta)))[..., None], k)


def stepped(S: Tensor, q: Tensor, k: Tensor, v: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    """Returns o of a token, and leaves the state after it in S."""
    u = beta[..., None] * (v - d[..., None] * torch.einsum("nhvk,nhk->nhv", S, k))
    S.mul_(d[..., None, None]).add_(torch.einsum("nhk,nhv->nhvk", k, u))
    return torch.mul(torch.einsum("nhvk,nhk->nhv", S, q), q.shape[-1] ** -0.5)
