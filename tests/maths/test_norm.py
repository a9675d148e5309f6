"""The gated norm: torch's RMSNorm and activation, and its backward against autograd."""

import pytest
import torch
from torch.nn import functional

from reference import norm
from tests.compare import assert_close

EXACT = 1e-13


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, gate and weight, all of which require gradients."""
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in (shape, shape, shape[-1:])]


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_definition(sigmoid):
    x, gate, weight = inputs(2, 3, 4, 8)
    act = gate.sigmoid() if sigmoid else functional.silu(gate)
    want = functional.rms_norm(x, (8,), weight, 1e-3) * act
    assert_close("y", norm.gated_rms_norm(x, gate, weight, 1e-3, sigmoid), want, EXACT)
    half = [each.bfloat16() for each in (x, gate, weight)]
    assert norm.gated_rms_norm(*half).dtype == torch.bfloat16


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 8), (2, 3, 2, 8)])
def test_the_backward_is_the_derivative(shape, sigmoid):
    leaves = inputs(*shape)
    y = norm.gated_rms_norm(*leaves, 1e-3, sigmoid)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        got = norm.gated_rms_norm_backward(dy, *leaves, 1e-3, sigmoid)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b, EXACT)


def test_gradients_have_the_dtypes_of_their_inputs():
    x, gate, weight = (each.detach() for each in inputs(5, 8, dtype=torch.bfloat16))
    done = norm.gated_rms_norm_backward(x, x, gate, weight.float())
    assert [each.dtype for each in done] == [torch.bfloat16, torch.bfloat16, torch.float32]
