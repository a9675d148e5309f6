"""Halves of the layers of a hybrid model, as Qwen3-Next and Qwen3.5 have them, and their weights.

All but the convolution, the gated delta rule and attention is PyTorch's, and the same for everyone.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu, softplus

from .workloads import Half, HybridPart

EPSILON, THETA = 1e-6, 1e7  # of the norms, of the rotations: as published with the models


class Mixing(Protocol):
    """The functions in which tokens meet."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """y [T, C] of x [T, C] and weight [C, W], activated."""

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """o [T, HV, V] of q, k [T, H, K], v [T, HV, V], g and beta [T, HV]; q and k as they are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o [T, H, D] of q [T, H, D] and of k, v [T, Hk, D]."""


class Linear(NamedTuple):
    norm: Tensor  # [hidden]
    in_qkv: Tensor  # [2 H K + HV V, hidden]
    in_z: Tensor  # [HV V, hidden]
    in_ba: Tensor  # [2 HV, hidden]
    conv: Tensor  # [2 H K + HV V, W]
    A_log: Tensor  # [HV] fp32
    dt_bias: Tensor  # [HV]
    out_norm: Tensor  # [V]
    out: Tensor  # [hidden, HV V]


class Full(NamedTuple):
    norm: Tensor  # [hidden]
    q_proj: Tensor  # [2 H D, hidden]: of each head the query, then the gate
    k_proj: Tensor  # [Hk D, hidden]
    v_proj: Tensor  # [Hk D, hidden]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    o_proj: Tensor  # [hidden, H D]


class Mlp(NamedTuple):
    norm: Tensor  # [hidden]
    gate_proj: Tensor  # [intermediate, hidden]
    up_proj: Tensor  # [intermediate, hidden]
    down_proj: Tensor  # [hidden, intermediate]


Weights = Linear | Full | Mlp


def weights_of(
    half: Half, workload: HybridPart, generator: torch.Generator, dtype: torch.dtype
) -> Weights:
    """Random, of sizes that keep the numbers of a layer near 1."""
    device, hidden = generator.device, workload.hidden

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def product(rows: int, columns: int) -> Tensor:
        return torch.mul(normal(rows, columns), columns**-0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * normal(size)).to(dtype)

    if half == "linear":
        value_heads, columns = workload.linear_heads[1], sum(workload.linear_columns)
        values = workload.linear_columns[2]
        decay = torch.rand(value_heads, generator=generator, device=device)
        return Linear(
            norm(hidden), product(columns, hidden), product(values, hidden),
            product(2 * value_heads, hidden), product(columns, workload.width),
            (1 + 15 * decay).log() - 3,  # memories of a few and of hundreds of tokens
            normal(value_heads).to(dtype), norm(workload.linear_dim), product(hidden, values),
        )  # fmt: skip
    if half == "full":
        (kv_heads, heads), d = workload.heads, workload.head_dim
        return Full(
            norm(hidden), product(2 * heads * d, hidden), product(kv_heads * d, hidden),
            product(kv_heads * d, hidden), norm(d), norm(d), product(hidden, heads * d),
        )  # fmt: skip
    wide = workload.intermediate
    return Mlp(norm(hidden), product(wide, hidden), product(wide, hidden), product(hidden, wide))


def rotations(position: Tensor, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, rotated] of each position's angles."""
    frequency = THETA ** -(torch.arange(0, rotated, 2, device=position.device) / rotated)
    angle = (position[:, None] * frequency).repeat(1, 2)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def layers(
    x: Tensor,
    weights: tuple[Weights, ...],
    workload: HybridPart,
    turns: tuple[Tensor, Tensor],
    mixing: Mixing,
) -> Tensor:
    """[T, hidden] of [T, hidden]: each half adds to what it gets."""
    for w in weights:
        h = rms_norm(x, w.norm.shape, w.norm, EPSILON)
        if isinstance(w, Linear):
            x = x + _linear(h, w, workload, mixing)
        elif isinstance(w, Full):
            x = x + _full(h, w, turns, mixing)
        else:
            x = x + linear(silu(linear(h, w.gate_proj)) * linear(h, w.up_proj), w.down_proj)
    return x


def _linear(h: Tensor, w: Linear, workload: HybridPart, mixing: Mixing) -> Tensor:
    qkv = mixing.convolve(linear(h, w.in_qkv), w.conv)
    columns = torch.split(qkv, list(workload.linear_columns), -1)
    q, k, v = (torch.unflatten(x, -1, (-1, workload.linear_dim)) for x in columns)
    b, a = linear(h, w.in_ba).chunk(2, -1)
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -w.A_log.to(wide).exp() * softplus(a.to(wide) + w.dt_bias)
    o = mixing.delta(q, k, v, g, b.sigmoid())
    o = rms_norm(o, w.out_norm.shape, w.out_norm, EPSILON).flatten(1)
    return linear(o * silu(linear(h, w.in_z)), w.out)


def _full(h: Tensor, w: Full, turns: tuple[Tensor, Tensor], mixing: Mixing) -> Tensor:
    d = len(w.q_norm)

    def heads(projection: Tensor, size: int = d) -> Tensor:
        return torch.unflatten(linear(h, projection), -1, (-1, size))

    def turned(z: Tensor, norm: Tensor) -> Tensor:
        z = rms_norm(z, norm.shape, norm, EPSILON)
        turning = turns[0].shape[-1]
        part, rest = z[..., :turning], z[..., turning:]
        a, b = part.chunk(2, -1)
        return torch.cat((part * turns[0] + torch.cat((-b, a), -1) * turns[1], rest), -1)

    q, gate = heads(w.q_proj, 2 * d).chunk(2, -1)
    q, k = turned(q, w.q_norm), turned(heads(w.k_proj), w.k_norm)
    o = mixing.attend(q, k, heads(w.v_proj)) * gate.sigmoid()
    return linear(o.flatten(1), w.o_proj)
