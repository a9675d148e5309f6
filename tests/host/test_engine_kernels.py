"""The engines' own functions in Triton's interpreter, and ours on the CPU, on the same layouts.

Skipped without Triton, or without the engines' sources (python scripts/engine_interfaces.py).
"""

import pytest
import torch

from tests import engine_kernels as theirs

if torch.cuda.is_available():
    pytest.skip("tests/device/test_engine_kernels.py runs them", allow_module_level=True)

ENGINES = pytest.mark.parametrize("engine", [theirs.VLLM, theirs.SGLANG], ids=lambda x: x[0])
WIDE = {"dtype": torch.float32}  # the interpreter multiplies no bf16
STATES = pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])


@ENGINES
@pytest.mark.parametrize("by_channels", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution(engine, by_channels, bias):
    theirs.check_convolution(engine, "cpu", by_channels=by_channels, bias=bias, **WIDE)


@ENGINES
@STATES
def test_packed_decode(engine, state):
    theirs.check_packed(engine, "cpu", state)


@ENGINES
@STATES
def test_a_step(engine, state):
    theirs.check_step(engine, "cpu", state, **WIDE)


@STATES
def test_drafts_of_vllm(state):
    theirs.check_vllms_drafts("cpu", state)


@STATES
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_of_sglang(state, tree):
    theirs.check_sglangs_drafts("cpu", state, tree)
