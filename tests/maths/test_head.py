"""Log-probabilities from hidden states: parts of rows and gradients by hand, against autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qla_kernels.lab.selftest.head import inputs
from reference import head
from tests.compare import assert_close

EXACT = 1e-12
# Small entropies, and gradients, are differences of numbers as large as logits
SIZE = 0.1
VOCABULARY = 37


def assert_is_the_definition(counts, bias, low, temperature, softcap):
    tensors, targets, first = inputs(torch.float64, counts, VOCABULARY, bias, low)
    leaves = [x.requires_grad_() for x in tensors if x is not None]
    hidden, *rest = tensors
    made, numbers = head.Head(*rest), (temperature, softcap)
    want = head.definition(hidden, made, targets, first, *numbers)
    dlogprobs, dentropy = torch.randn(len(targets)).double(), torch.randn(len(counts)).double()
    total = (want[0] * dlogprobs).sum() + (want[1] * dentropy).sum()
    wanted = torch.autograd.grad(total, leaves)
    with torch.no_grad():
        got = head.forward(hidden, made, targets, first, *numbers)
        grads = head.backward(
            dlogprobs, dentropy, hidden, made, targets, first, got.lse, got.entropy, *numbers
        )
    assert_close("log-probabilities", got.logprobs, want[0].detach(), EXACT)
    assert_close("entropies", got.entropy, want[1].detach(), EXACT, at_least=SIZE)
    for a, b in zip((x for x in grads if x is not None), wanted, strict=True):
        assert_close("a gradient", a, b, EXACT, at_least=SIZE)


@pytest.mark.parametrize("elements", [1, 3 * VOCABULARY, 1 << 24])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_parts_of_rows_are_the_definition(elements, softcap, monkeypatch):
    monkeypatch.setattr(head, "ELEMENTS", elements)
    assert_is_the_definition([1, 1, 5, 0, 30, 1], True, True, 0.7, softcap)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_any_number_of_targets_a_row(counts, bias, low, temperature):
    assert_is_the_definition(counts, bias, low, temperature, None)


def test_words_that_are_ruled_out_and_rows_that_are_certain():
    """-inf in the bias; logits a thousand apart, whose entropy is 0 and has a gradient of 0."""
    hidden = torch.eye(3).double()
    weight = torch.tensor([[1000.0, 0, 0], [0, 1, 0], [0, 0, -5]]).double()
    bias = torch.tensor([0.0, 0.0, -torch.inf]).double()
    targets, first = torch.tensor([0, 1, 0]), torch.arange(4)
    made = head.Head(weight, bias)
    got = head.forward(hidden, made, targets, first)
    ones = torch.ones(3).double()
    grads = head.backward(ones, ones, hidden, made, targets, first, got.lse, got.entropy)
    assert got.logprobs[0] == got.entropy[0] == 0
    assert all(x.isfinite().all() for x in (*got, *(x for x in grads if x is not None)))
    assert not grads.dhidden[0].any()
    assert not grads.dbias[2]
