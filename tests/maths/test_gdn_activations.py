"""l2norm, gate and the sigmoid of beta: their formulas, and their backwards against autograd."""

import pytest
import torch
from torch.nn.functional import softplus

from reference import gdn
from tests.compare import assert_close

EXACT = 1e-13


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_l2norm():
    x = normal(2, 5, 3, 7)
    assert_close("y", gdn.l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), EXACT)
    assert (gdn.l2norm(torch.zeros(1, 1, 1, 4)) == 0).all(), "a zero row has no direction"


def test_l2norm_backward():
    x, dy = normal(2, 5, 3, 7).requires_grad_(), normal(2, 5, 3, 7)
    (want,) = torch.autograd.grad(gdn.l2norm(x), x, dy)
    assert_close("dx", gdn.l2norm_backward(x.detach(), dy), want, EXACT)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gate(with_bias):
    x, A_log = 5 * normal(2, 9, 3), normal(3)
    dt_bias = normal(3) if with_bias else None
    z = x if dt_bias is None else x + dt_bias
    want = -A_log.exp() * softplus(z, threshold=40)
    assert_close("g", gdn.gate(x, A_log, dt_bias), want, EXACT)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gate_backward(with_bias):
    x, A_log, dg = (
        (5 * normal(2, 9, 3)).requires_grad_(),
        normal(3).requires_grad_(),
        normal(2, 9, 3),
    )
    dt_bias = normal(3).requires_grad_() if with_bias else None
    leaves = [x, A_log] + ([dt_bias] if with_bias else [])
    want = torch.autograd.grad(gdn.gate(x, A_log, dt_bias), leaves, dg)
    with torch.no_grad():
        got = gdn.gate_backward(x, A_log, dt_bias, dg)
    for name, a, b in zip(("dx", "dA_log", "ddt_bias"), got, want, strict=False):
        assert_close(name, a, b, EXACT)
    assert (got[2] is None) == (not with_bias)


def test_gate_neither_overflows_nor_rounds_to_no_decay():
    g = gdn.gate(torch.tensor([[[-80.0], [800.0]]]), torch.zeros(1))
    assert_close("g", g, torch.tensor([[[-(torch.tensor(-80.0).exp())], [-800.0]]]), 1e-6)
    assert g[0, 0, 0] < 0


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_sigmoid(allow_neg_eigval):
    x, dbeta = normal(2, 9, 3).requires_grad_(), normal(2, 9, 3)
    beta = gdn.beta_sigmoid(x, allow_neg_eigval)
    assert_close("beta", beta, (1 + allow_neg_eigval) / (1 + (-x).exp()), EXACT)
    (want,) = torch.autograd.grad(beta, x, dbeta)
    got = gdn.beta_sigmoid_backward(x.detach(), dbeta, allow_neg_eigval)
    assert_close("dx", got, want, EXACT)


def test_dtypes():
    x, parameter = torch.randn(1, 4, 2).bfloat16(), torch.randn(2).bfloat16()
    assert gdn.l2norm(x).dtype == torch.bfloat16
    assert gdn.l2norm_backward(x, x).dtype == torch.bfloat16
    assert gdn.gate(x, parameter, parameter).dtype == torch.float32
    assert gdn.beta_sigmoid(x).dtype == torch.float32
    assert gdn.beta_sigmoid_backward(x, x.float()).dtype == torch.bfloat16
    grads = gdn.gate_backward(x, parameter, parameter.float(), x.float())
    assert [t.dtype for t in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]
