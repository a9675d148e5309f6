"""The kernels of a head, emulated: words that are ruled out, NaN, blocks of rows."""

import math

import pytest
import torch

from qla_kernels.head import launch
from qla_kernels.head.shapes import COLUMNS
from qla_kernels.lab.selftest.head import SUMS, inputs
from qla_kernels.runtime.cpu import reference
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("seeds", "poison")

KERNELS = pytest.mark.kernels("head.row_grads", "head.row_sums")
WANTED = [True, True, True, False, False]


def both(tensors, targets, first):
    """Returns results and gradients of launches, with upstream gradients of 1."""
    done = launch.head_fwd(*tensors, targets, first, 1.0, 0.0)
    ones = torch.ones(len(targets))
    grads = launch.head_bwd(
        ones, ones, *tensors, targets, first, done.lse2, done.entropy, 1.0, 0.0, WANTED
    )
    return done, grads


@KERNELS
def test_words_that_are_ruled_out_and_rows_that_are_certain():
    """-inf in the bias of a block's word and of all words of the first; logits 1000 apart."""
    vocabulary = COLUMNS + 40
    tensors, targets, first = inputs(torch.float32, [1, 1, 1], vocabulary, True, False)
    hidden, weight, bias, *_ = tensors
    targets[:] = torch.tensor([COLUMNS + 2, COLUMNS + 3, COLUMNS + 2])
    weight[COLUMNS + 2] = hidden[0] * 1000
    bias[:COLUMNS] = bias[COLUMNS + 9] = -torch.inf
    done, grads = both(tensors, targets, first)
    ours = reference().head
    want = ours.forward(hidden.double(), ours.Head(weight, bias), targets, first)
    assert done.logprobs[0] == done.entropy[0] == 0
    assert_close("log-probabilities", done.logprobs, want.logprobs, SUMS)
    assert_close("entropies", done.entropy, want.entropy, SUMS)
    assert all(x.isfinite().all() for x in (*done, *grads[:3]))
    assert not grads.dhidden[0].any()
    assert not grads.dbias[:COLUMNS].any()


@KERNELS
def test_nan_is_not_lost():
    """Of a row's logits; of a target outside of the vocabulary."""
    tensors, targets, first = inputs(torch.float32, [1, 1, 1], 300, False, False)
    tensors[0][1, 0] = math.nan
    targets[:] = torch.tensor([7, 7, -100])
    done, grads = both(tensors, targets, first)
    assert done.logprobs.isnan().tolist() == [False, True, True]
    assert done.entropy.isnan().tolist() == [False, True, False]
    assert grads.dhidden.isnan().any(1).tolist() == [False, True, False]


@KERNELS
def test_blocks_of_rows_add_up(monkeypatch):
    """Gradients of weights are sums over blocks, in fp32."""
    tensors, targets, first = inputs(torch.bfloat16, [1, 0, 3, 1, 1, 2, 1], 60, True, False)
    want, whole = both(tensors, targets, first)
    monkeypatch.setattr(launch, "TOKENS", 3)
    done, grads = both(tensors, targets, first)
    for a, b in zip((*done, *grads[:3]), (*want, *whole[:3]), strict=True):
        assert_close("a result", a, b, 2.0**-8 if a.dtype == torch.bfloat16 else 1e-7)
