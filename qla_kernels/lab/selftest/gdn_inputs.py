"""Inputs of kernels of the gated delta net, as models make them, and worse.

Tokens past the last sequence are NaN in every input: a kernel that reads them shows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus


class ChunkInputs(NamedTuple):
    """Packed sequences, and tokens of none."""

    k: Tensor  # [1, T, H, K]
    g: Tensor  # [1, T, HV] fp32, natural log
    beta: Tensor  # [1, T, HV] fp32
    cu_seqlens: Tensor  # [N + 1] int32
    tokens: int  # tokens that belong to a sequence


def gates(kind: str, tokens: int, heads: int) -> Tensor:
    """Returns [tokens, heads] log gates: of a model, or from one end of what a model could make."""
    if kind == "model":
        # -exp(A_log) softplus(a + dt_bias), A in [0, 16]: from no decay to nearly total
        strength = torch.linspace(0, 16, heads)
        return -strength * softplus(torch.randn(tokens, heads) * 0.5 - 4)
    if kind == "mild":
        return logsigmoid(torch.randn(tokens, heads)) / 16
    constant = {"none": 0.0, "strong": -20.0, "total": -torch.inf}[kind]
    return torch.full((tokens, heads), constant)


def keys(kind: str, tokens: int, heads: int, size: int) -> Tensor:
    """Returns [tokens, heads, size]: unit keys, keys in a subspace of few dimensions, or long."""
    if kind == "low rank":  # strongly dependent keys: L has large entries far from the diagonal
        return normalize(torch.randn(tokens, heads, 8) @ torch.randn(8, size), dim=-1)
    length: float = {"unit": 1.0, "long": 128**0.5}[kind]
    return length * normalize(torch.randn(tokens, heads, size), dim=-1)


def inputs(
    lengths: list[int],
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    gate: str = "model",
    key: str = "unit",
    padding: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> ChunkInputs:
    """Returns sequences of these lengths for heads = (H, HV), then `padding` tokens of none."""
    torch.manual_seed(seed)
    H, HV = heads
    tokens = sum(lengths)
    nan = torch.full((padding, 1), torch.nan)
    k = torch.cat([keys(key, tokens, H, size), nan[..., None].expand(-1, H, size)])
    g = torch.cat([gates(gate, tokens, HV), nan.expand(-1, HV)])
    beta = torch.cat([torch.rand(tokens, HV), nan.expand(-1, HV)])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    moved = (x.contiguous().to(device) for x in (k.to(dtype), g, beta))
    k, g, beta = (x[None] for x in moved)
    return ChunkInputs(k, g, beta, bounds.to(device), tokens)
