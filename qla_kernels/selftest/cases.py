"""Inputs of the gated-delta-rule cases, and the result that every case reports.

There are two sequences, of 65 tokens and of 1, with 2 key heads and 4 value heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

LENGTHS = (65, 1)
HEADS, VALUE_HEADS, SIZE = 2, 4, 128


@dataclass(frozen=True)
class Result:
    name: str
    error: float | None  # relative L2 error; None when nothing was run
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None or self.error <= self.limit  # NaN fails

    def __str__(self) -> str:
        if self.error is None:
            return f"skip  {self.name}: {self.note}"
        verdict = "ok  " if self.passed else "FAIL"
        return f"{verdict}  {self.name}: error {self.error:.1e}, limit {self.limit:.1e}"


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [1, T, H, K]
    k: Tensor
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV]
    beta: Tensor
    initial_state: Tensor  # [N, HV, K, V]
    cu_seqlens: Tensor  # [N + 1]

    def tensors(self, dtype: torch.dtype, where: str = "cpu") -> tuple[Tensor, ...]:
        """Returns q, k, v in `dtype`, and g, beta in at least fp32, on the device `where`."""
        wide = torch.promote_types(dtype, torch.float32)
        qkv = (x.to(where, dtype) for x in (self.q, self.k, self.v))
        return *qkv, self.g.to(where, wide), self.beta.to(where, wide)


def inputs() -> Inputs:
    """Returns fp64 CPU tensors; q, k and v are representable in bf16, and gates are realistic."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def representable(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    tokens = sum(LENGTHS)
    q, k = (representable(normalize(draw(1, tokens, HEADS, SIZE), dim=-1)) for _ in range(2))
    v = representable(draw(1, tokens, VALUE_HEADS, SIZE))
    decay = torch.linspace(0, 16, VALUE_HEADS, dtype=torch.float64)  # from none to nearly total
    g = -decay * softplus(draw(1, tokens, VALUE_HEADS) - 4)
    beta = draw(1, tokens, VALUE_HEADS).sigmoid()
    state = draw(len(LENGTHS), VALUE_HEADS, SIZE, SIZE) / SIZE
    return Inputs(q, k, v, g, beta, state, torch.tensor([0, *LENGTHS]).cumsum(0).int())


def label(what: str, dtype: torch.dtype, rest: str = "") -> str:
    return f"{what} {str(dtype).removeprefix('torch.')}{rest}"


def raw_gates() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns g and beta [1, T, HV] before their activations, A_log and dt_bias [HV]; all fp64."""
    random = torch.Generator().manual_seed(1)
    g, beta = torch.randn(2, 1, sum(LENGTHS), VALUE_HEADS, generator=random).bfloat16().double()
    A_log, dt_bias = torch.randn(2, VALUE_HEADS, generator=random).bfloat16().double()
    return g, beta, A_log, dt_bias


def error_of(got: Tensor | None, want: Tensor) -> float:
    """Returns the relative L2 error of `got`, NaN if it is None.

    Computed in fp64 on the CPU, so that a broken GPU does not check itself.
    """
    if got is None:
        return float("nan")
    return float((got.cpu().double() - want).norm() / want.norm())
