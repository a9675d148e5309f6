"""The engines' own functions on a GPU beside ours, on the same layouts.

Skipped without Triton, or without the engines' sources (python scripts/engine_interfaces.py).
"""

import pytest
import torch

from tests import engine_kernels as theirs

pytestmark = pytest.mark.hopper

ENGINES = pytest.mark.parametrize("engine", [theirs.VLLM, theirs.SGLANG], ids=lambda x: x[0])
STATES = pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
HEADS = pytest.mark.parametrize("heads", [(1, 1), (2, 8), (16, 32)])


@ENGINES
@pytest.mark.parametrize("by_channels", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolution(engine, by_channels, bias, dtype):
    theirs.check_convolution(engine, "cuda", by_channels=by_channels, bias=bias, dtype=dtype)


@ENGINES
@STATES
@HEADS
def test_packed_decode(engine, state, heads):
    theirs.check_packed(engine, "cuda", state, heads=heads)


@ENGINES
@STATES
@HEADS
def test_a_step(engine, state, heads):
    for by_channels in (False, True):
        theirs.check_step(engine, "cuda", state, heads=heads, by_channels=by_channels)


@STATES
@HEADS
def test_drafts_of_vllm(state, heads):
    theirs.check_vllms_drafts("cuda", state, heads=heads)


@STATES
@HEADS
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_of_sglang(state, heads, tree):
    theirs.check_sglangs_drafts("cuda", state, tree, heads=heads)
