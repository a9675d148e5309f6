"""Inputs for the gated delta rule: as models make them, and from the edges of what is legal."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

GATES = ("mild", "some zero", "zero", "strong", "total", "some -inf", "positive")
KEYS = ("unit", "low rank", "one direction", "long")
BETAS = ("random", "zero", "one", "two")

# Arguments of `make`, drawn by hypothesis.
CASES = {
    "lengths": st.lists(st.sampled_from([0, 1, 15, 16, 63, 64, 65, 127, 128, 130]), max_size=5),
    "heads": st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    "sizes": st.tuples(st.integers(1, 9), st.integers(1, 9)),
    "gate": st.sampled_from(GATES),
    "key": st.sampled_from(KEYS),
    "beta": st.sampled_from(BETAS),
    "scale": st.sampled_from([None, 0.0, 0.7]),
    "initial_state": st.booleans(),
    "padding": st.integers(0, 3),
}


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]
    scale: float | None
    initial_state: Tensor | None  # [N, HV, K, V]
    cu_seqlens: Tensor | None  # [N + 1]


def gates(kind: str, *shape: int) -> Tensor:
    """Natural log gates; "some zero" keeps every fourth value head from ever decaying."""
    mild = logsigmoid(torch.randn(shape, dtype=torch.float64)) / 16
    if kind == "mild":
        return mild
    if kind == "some zero":
        return torch.where(torch.arange(shape[-1]) % 4 == 0, torch.zeros_like(mild), mild)
    if kind == "some -inf":
        return mild.masked_fill(torch.rand(shape) < 0.1, -torch.inf)
    if kind == "positive":
        return 0.1 * torch.rand(shape, dtype=torch.float64)
    return torch.full_like(mild, {"zero": 0.0, "firm": -2.0, "strong": -20.0, "total": -70.0}[kind])


def keys(kind: str, *shape: int) -> Tensor:
    """Unit keys, all in few dimensions or in one, or keys of squared length 2.5."""
    directions = {"low rank": 2, "one direction": 1}.get(kind)
    if directions is None:
        key = normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
        return key * 2.5**0.5 if kind == "long" else key
    within = torch.randn(*shape[:-1], directions, dtype=torch.float64)
    return normalize(within @ torch.randn(directions, shape[-1], dtype=torch.float64), dim=-1)


def betas(kind: str, *shape: int) -> Tensor:
    random = torch.randn(shape, dtype=torch.float64).sigmoid()
    return (
        random if kind == "random" else torch.full_like(random, ("zero", "one", "two").index(kind))
    )


def make(
    lengths: list[int] | int,
    batch: int = 1,
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (6, 5),
    gate: str = "mild",
    key: str = "unit",
    beta: str = "random",
    scale: float | None = None,
    initial_state: bool = True,
    padding: int = 0,
) -> Inputs:
    """Packed sequences of these lengths, then `padding` rows of NaN; or a batch of one length."""
    T = sum(lengths) if isinstance(lengths, list) else lengths
    (H, HV), (K, V) = heads, sizes
    bounds = torch.tensor([0, *lengths]).cumsum(0) if isinstance(lengths, list) else None
    num_sequences = len(lengths) if isinstance(lengths, list) else batch
    tensors = (
        normalize(torch.randn(batch, T, H, K, dtype=torch.float64), dim=-1),
        keys(key, batch, T, H, K),
        torch.randn(batch, T, HV, V, dtype=torch.float64),
        gates(gate, batch, T, HV),
        betas(beta, batch, T, HV),
    )
    h0 = torch.randn(num_sequences, HV, K, V, dtype=torch.float64) if initial_state else None
    return Inputs(*(with_nan_rows(x, padding) for x in tensors), scale, h0, bounds)


def with_nan_rows(x: Tensor, count: int) -> Tensor:
    """`count` more tokens, which belong to no sequence."""
    return torch.cat([x, x.new_full((x.shape[0], count, *x.shape[2:]), torch.nan)], 1)
