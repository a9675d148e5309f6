"""Raw gates and betas, activated and back, emulated: any dtypes, strides and numbers of heads."""

import pytest
import torch

from qla_kernels.gdn.kernels import gate_sums
from qla_kernels.gdn.launch import activations
from qla_kernels.lab.selftest.gdn_activations import (
    EXACT,
    MIXES,
    check_backward,
    check_forward,
    gradients,
    raw,
)
from qla_kernels.runtime import jit
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("seeds", "poison")


def test_interleavings_leave_no_trace(seeds):
    x = raw((2, 600, 3), MIXES[0], "cpu", True)
    dg, dbeta = torch.randn(2, 2, 600, 3)
    want = gradients(x, dg, dbeta, 1.0)
    for seeds["seed"] in range(1, 4):
        got = gradients(x, dg, dbeta, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_is_ready_takes_no_launch(monkeypatch):
    monkeypatch.setattr(jit, "compile", None)
    g, beta = torch.randn(2, 1, 70, 4)
    for dtype in (torch.bfloat16, torch.float16):
        ready = activations.activate(g, beta.to(dtype), None, None, 0.0, dtype)
        assert ready[0] is g
        assert ready[1].dtype == dtype
    assert activations.activate(g, beta, None, None, 0.0, torch.bfloat16)[1] is beta
    assert activations.activate_beta(beta, 0.0) is beta
    assert activations.backward(None, beta, None, None, g, beta, 0.0, None)[:2] == (g, beta)


@pytest.mark.parametrize("shape", [(0, 5, 2), (3, 0, 2)])
def test_no_tokens_take_no_launch(shape, monkeypatch):
    monkeypatch.setattr(jit, "compile", None)
    x = raw(shape, MIXES[0], "cpu", True)
    check_forward(x, 1.0)
    check_backward(x, 1.0)


def test_one_of_both_is_ready():
    """The other is made beside it, and it stays what it is."""
    g, beta = torch.randn(2, 1, 70, 4)
    got_g, got_beta = activations.activate(g, beta.bfloat16(), None, None, 0.0)
    assert got_g is g
    assert torch.equal(got_beta, beta.bfloat16().float())
    got_g, got_beta = activations.activate(g.half(), beta, None, None, 0.0)
    assert got_beta is beta
    assert torch.equal(got_g, g.half().float())
    dg, dbeta, *none = activations.backward(
        None, beta.half(), None, None, g, beta.clone(), 0.0, None
    )
    assert dg is g
    assert none == [None, None]
    assert torch.equal(dbeta, beta.half())


@pytest.mark.parametrize("blocks", [1, 127, 1025, 2500])
def test_sums_over_any_number_of_blocks(blocks):
    sums, dA_log, ddt_bias = torch.randn(blocks, 2, 13), torch.empty(13), torch.empty(13)
    found = dA_log.view(torch.uint8), ddt_bias.view(torch.uint8)
    jit.compile(gate_sums, gate_sums.VARIANTS[0])(sums, *found, 0, 0, 2)
    for got, want in zip((dA_log, ddt_bias), sums.double().sum(0), strict=True):
        assert_close("sum", got, want, EXACT)
