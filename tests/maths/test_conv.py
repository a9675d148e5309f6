"""The causal convolution over trees and packs equals that of every sequence alone, in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import conv
from tests.compare import assert_close
from tests.conv_inputs import FORESTS, WIDTHS, bounds_of, halo_of, replicated, tensors
from tests.dualkv_inputs import Forest, any_forest, forest

EXACT = 1e-12


def assert_packed_is_replicated(packed: Forest, width: int, silu: bool, bias: bool) -> None:
    """y and all gradients: written out by hand here, by autograd there."""
    x, weight, b = tensors(len(packed.tout), width=width)
    b = b if bias else None
    given_to = (silu, bounds_of(packed), halo_of(packed, width))
    y = conv.forward(x, weight, b, *given_to)
    want = replicated(lambda *args: conv.alone(*args, silu), packed, x, weight, b)
    assert_close("y", y.detach(), want.detach(), EXACT)
    dy = torch.randn_like(y)
    with torch.no_grad():
        got = conv.backward(dy, x, weight, b, *given_to)
    if not packed.paths:
        assert not any(dx.any() for dx in got if dx is not None)
        return
    leaves = [x, weight, *([b] if bias else [])]
    for name, a, b in zip(got._fields, got, torch.autograd.grad(want, leaves, dy), strict=bias):
        assert_close(name, a, b, EXACT)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FORESTS)
def test_packed_is_replicated(name, width):
    assert_packed_is_replicated(FORESTS[name], width, silu=True, bias=True)


@settings(max_examples=60, deadline=None)
@given(any_forest, st.sampled_from(WIDTHS), st.booleans(), st.booleans())
def test_any_tree(trees, width, silu, bias):
    assert_packed_is_replicated(forest(trees), width, silu, bias)


def test_thousands_of_leaves():
    leaves = tuple((1 + i % 3, ()) for i in range(3000))
    assert_packed_is_replicated(forest([(4, leaves)]), 4, silu=True, bias=True)


@pytest.mark.parametrize("silu", [True, False])
def test_the_backward_is_the_derivative(silu):
    packed = FORESTS["short nodes"]
    x, weight, bias = tensors(len(packed.tout), channels=2)
    given_to = (silu, bounds_of(packed), halo_of(packed, 4))

    class Conv(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            ctx.save_for_backward(*leaves)
            return conv.forward(*leaves, *given_to)

        @staticmethod
        def backward(ctx, dy):
            return tuple(conv.backward(dy, *ctx.saved_tensors, *given_to))

    assert torch.autograd.gradcheck(Conv.apply, (x, weight, bias))


def test_tokens_of_no_sequence_are_not_read():
    x, weight, bias = tensors(9)
    x = x.detach().index_fill(0, torch.tensor([7, 8]), torch.nan)
    bounds = torch.tensor([0, 3, 7])
    y = conv.forward(x, weight, bias, True, bounds)
    assert torch.equal(y[:7], conv.forward(x[:7], weight, bias, True, bounds))
    assert not y[7:].any()
    done = conv.backward(torch.full_like(y, torch.nan).index_fill(0, torch.arange(7), 1.0), x,
                         weight, bias, True, bounds)  # fmt: skip
    assert done.dx.isfinite().all()
    assert not done.dx[7:].any()
    assert done.dweight.isfinite().all()


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_token_at_a_time_is_the_sequence(width, silu):
    x, weight, bias = (t.detach() for t in tensors(11, width=width))
    state, want = x.new_zeros(1, x.shape[1], width - 1), conv.alone(x, weight, bias, silu)
    for t in range(len(x)):
        y, state = conv.update(x[t : t + 1], state, weight, bias, silu)
        assert_close("y", y[0], want[t], EXACT)
    assert torch.equal(state[0].T, x[len(x) - width + 1 :])
