"""Tensors for a workload: gates, keys and states as models make them, reproducible from a seed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from .workloads import Gdn


class GdnInputs(NamedTuple):
    """What every implementation is given; adapters convert outside the timed region."""

    q: Tensor  # [1, T, H, K], unit length
    k: Tensor  # [1, T, H, K], unit length
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV] fp32, natural log
    beta: Tensor  # [1, T, HV] in (0, 1)
    initial_state: Tensor | None  # [N, HV, K, V] fp32
    cu_seqlens: Tensor  # [N + 1] int32
    lengths: tuple[int, ...]
    do: Tensor | None  # [1, T, HV, V], backward only
    dht: Tensor | None  # [N, HV, K, V] fp32, backward only


def gdn_inputs(workload: Gdn, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GdnInputs:
    num_key_heads, num_value_heads = workload.heads
    tokens, K, V = workload.tokens, workload.head_dim, workload.V
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def state() -> Tensor:
        return normal(len(workload.lengths), num_value_heads, K, V)

    bounds = torch.tensor([0, *workload.lengths]).cumsum(0)
    needs_gradients = workload.direction != "fwd"
    return GdnInputs(
        q=normalize(normal(1, tokens, num_key_heads, K), dim=-1).to(dtype),
        k=normalize(normal(1, tokens, num_key_heads, K), dim=-1).to(dtype),
        v=normal(1, tokens, num_value_heads, V).to(dtype),
        g=_gate(workload, generator, device),
        beta=normal(1, tokens, num_value_heads).sigmoid().to(dtype),
        initial_state=state() if workload.initial_state else None,
        cu_seqlens=bounds.to(device, torch.int32),
        lengths=workload.lengths,
        do=normal(1, tokens, num_value_heads, V).to(dtype) if needs_gradients else None,
        dht=state() if needs_gradients else None,
    )


def _gate(workload: Gdn, generator: torch.Generator, device: torch.device) -> Tensor:
    """Log gates [1, T, HV], fp32.

    `model`: -exp(A_log) softplus(a + dt_bias), per head A uniform in (0, 16) and softplus(dt_bias)
    log-uniform in (0.001, 1.3), the ranges that layers are initialised with: some heads hardly
    forget, others forget within a token.
    `published`: logsigmoid(x) / 16, and exactly 0 for every fourth head, which then never forgets.
    """
    shape = (1, workload.tokens, workload.heads[1])
    x = torch.randn(shape, generator=generator, device=device)
    if workload.gate == "published":
        forgets = torch.arange(workload.heads[1], device=device) % 4 != 3
        return torch.where(forgets, logsigmoid(x) / 16, torch.zeros_like(x))
    uniform = torch.rand((2, workload.heads[1]), generator=generator, device=device)
    step = 1e-3 * torch.exp(uniform[1] * math.log(1300))
    dt_bias = step + torch.log(-torch.expm1(-step))  # inverse of softplus
    return -16 * uniform[0].clamp(min=1e-3) * softplus(x / 2 + dt_bias)
