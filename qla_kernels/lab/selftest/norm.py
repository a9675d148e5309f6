"""The cases of the gated norm's kernels: a gate that is a slice of a projection, and padding."""

from typing import Any

import torch

from qla_kernels.lab.selftest.cases import Cases, dtype_of
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.norm import launch
from qla_kernels.runtime.cpu import reference

# Sums are in fp32 and each result is rounded once
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WEIGHTS = 1e-5  # fp32
EPSILON = 1e-5


def _norm(variant: Any, given: tuple[int, int, int, int, bool], device: str) -> None:
    """Checks results and gradients against fp64; tokens behind the last sequence are NaN."""
    tokens, heads, less, padding, silu = given
    V, dtype = variant.V - less, dtype_of(variant)
    x, dy = torch.randn(2, tokens, heads, V).to(dtype)
    projection = torch.full((tokens, heads * V + 16), torch.nan, dtype=dtype)
    projection[:, 8:-8] = torch.randn(tokens, heads * V)
    weight = torch.randn(V)
    live = tokens - padding
    for each in (x, dy, projection):
        each[live:] = torch.nan
    gate = projection[:, 8:-8].view(tokens, heads, V)
    exact = [each[:live].double() for each in (x, gate)]
    norm = reference().norm
    y = norm.gated_rms_norm(*exact, weight.double(), EPSILON, not silu)
    want = norm.gated_rms_norm_backward(
        dy[:live].double(), *exact, weight.double(), EPSILON, not silu
    )
    tables = [torch.tensor([0, live], dtype=torch.int64).to(device)] if padding else []
    on_device = projection.to(device)[:, 8:-8].view(tokens, heads, V)
    call = x.to(device), on_device, weight.to(device), tables, EPSILON, silu
    got_y, got = launch.gated_norm_fwd(*call), launch.gated_norm_bwd(dy.to(device), *call)
    for name, result, truth in (
        ("y", got_y, y), ("dx", got.dx, want.dx), ("dgate", got.dgate, want.dgate)
    ):  # fmt: skip
        assert_close(name, result[:live].cpu(), truth, ROUNDING[dtype])
        assert not result[live:].any(), f"{name}: rows of padding are not 0"
    assert_close("dweight", got.dweight.cpu(), want.dweight, WEIGHTS)


CASES = (
    Cases(
        ("norm.fwd", "norm.bwd", "norm.weight_sums"),
        _norm,
        [(70, 3, 0, 0, True), (33, 5, 40, 3, False), (9, 1, 24, 0, True)],
        [(9000, 32, 0, 100, True), (3000, 17, 24, 0, False)],
    ),
)
