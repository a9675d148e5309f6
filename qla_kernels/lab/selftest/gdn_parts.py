"""The cases of the kernels around value heads that are computed in parts."""

from typing import Any

import torch

from qla_kernels.gdn.launch import parts
from qla_kernels.lab.selftest.cases import Cases, dtype_of


def _repeat_gates(variant: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks that each part has its value head's numbers, bit for bit."""
    *sizes, num = shape
    g, beta, A = (
        torch.randn(sizes),
        torch.rand(sizes),
        torch.randn(*sizes, 64).to(dtype_of(variant)),
    )
    found = parts.repeat_gates(g.to(device), beta.to(device), A.to(device), num)
    for got, x in zip(found, (g, beta, A), strict=True):
        assert torch.equal(got.cpu(), x.repeat_interleave(num, 2))


def _part_sums(_: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks that sums have, bit for bit, those of one part after the other."""
    *sizes, num = shape
    given = [torch.randn(*sizes, num) for _ in range(2)]
    out = [torch.full(sizes, torch.nan).to(device) for _ in range(2)]
    parts.part_sums(*(x.flatten(2).to(device) for x in given), *out)
    for got, x in zip(out, given, strict=True):
        want = x[..., 0].clone()
        for part in range(1, num):
            want += x[..., part]
        assert torch.equal(got.cpu(), want)


SHAPES = [(2, 33, 3, 3), (1, 1, 1, 4)]
LARGE = [(2, 4000, 32, 2), (1, 3000, 7, 7)]
CASES = (
    Cases(("gdn.repeat_gates",), _repeat_gates, SHAPES, LARGE),
    Cases(("gdn.part_sums",), _part_sums, SHAPES, LARGE),
)
