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


def assert_packed_is_replicated(
    packed: Forest, width: int, silu: bool, bias: bool, heads: tuple[int, int] = conv.NO_HEADS
) -> None:
    """y and all gradients: written out by hand here, by autograd there."""
    x, weight, b = tensors(len(packed.tout), width=width)
    b = b if bias else None
    given_to = (silu, bounds_of(packed), halo_of(packed, width), heads)
    y = conv.forward(x, weight, b, *given_to)
    want = replicated(lambda *args: conv.alone(*args, silu, heads), packed, x, weight, b)
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


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("heads", [(1, 5), (2, 2), (1, 1), (0, 3)])
def test_packed_heads_are_replicated(name, heads):
    assert_packed_is_replicated(FORESTS[name], 4, silu=True, bias=False, heads=heads)


def test_heads_have_a_norm_of_one():
    x, weight, bias = (t.detach() for t in tensors(9, channels=13))
    bounds = torch.tensor([0, 9])
    y = conv.forward(x, weight, bias, True, bounds)
    got = conv.forward(x, weight, bias, True, bounds, heads=(3, 4))
    assert torch.equal(got[:, 12:], y[:, 12:])
    first = y[:, :12].unflatten(1, (3, 4))
    want = first / (first.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close("y", got[:, :12], want.flatten(1), EXACT)


@settings(max_examples=60, deadline=None)
@given(any_forest, st.sampled_from(WIDTHS), st.booleans(), st.booleans())
def test_any_tree(trees, width, silu, bias):
    assert_packed_is_replicated(forest(trees), width, silu, bias)


def test_thousands_of_leaves():
    leaves = tuple((1 + i % 3, ()) for i in range(3000))
    assert_packed_is_replicated(forest([(4, leaves)]), 4, silu=True, bias=True)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("heads", [conv.NO_HEADS, (1, 2)])
def test_the_backward_is_the_derivative(silu, heads):
    packed = FORESTS["short nodes"]
    x, weight, bias = tensors(len(packed.tout), channels=3)
    given_to = (silu, bounds_of(packed), halo_of(packed, 4), heads)

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
@pytest.mark.parametrize("heads", [conv.NO_HEADS, (2, 2)])
def test_a_token_at_a_time_is_the_sequence(width, silu, heads):
    x, weight, bias = (t.detach() for t in tensors(11, width=width))
    state, want = x.new_zeros(1, x.shape[1], width - 1), conv.alone(x, weight, bias, silu, heads)
    for t in range(len(x)):
        y, state = conv.update(x[t : t + 1], state, weight, bias, silu, heads)
        assert_close("y", y[0], want[t], EXACT)
    assert torch.equal(state[0].T, x[len(x) - width + 1 :])
