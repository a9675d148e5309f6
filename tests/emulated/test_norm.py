"""The gated norm's kernels, emulated: sizes, strides, packs, forward and backward."""

import functools

import pytest
import torch

from qla_kernels.norm import launch
from qla_kernels.norm.heuristics import columns_of
from qla_kernels.norm.kernels import fwd, weight_sums
from qla_kernels.runtime import jit
from tests.compare import FP32, assert_close
from tests.norm_check import ROUNDING, case, check

pytestmark = pytest.mark.usefixtures("seeds", "poison")

run = functools.partial(check, fwd=launch.gated_norm_fwd, bwd=launch.gated_norm_bwd)


@pytest.mark.parametrize("variant", fwd.VARIANTS, ids=jit.variant_id)
@pytest.mark.kernels("norm.fwd", "norm.bwd")
def test_every_variant(variant):
    kind = {"dtype": getattr(torch, variant.dtype)}
    for less in (0, 8, 24):
        run(case((37, 3, variant.V - less), "cpu", padding=5, **kind))
        run(case((150, variant.V - less), "cpu", silu=False, **kind))


@pytest.mark.parametrize("size", [8, 64, 72, 96, 128, 136, 192, 256])
def test_sizes_of_heads(size):
    assert size <= columns_of(size)
    run(case((2, 20, 3, size), "cpu", projection=16))


@pytest.mark.parametrize("weights", list(ROUNDING))
@pytest.mark.parametrize("silu", [True, False])
def test_weights_of_any_dtype(weights, silu):
    run(case((40, 2, 64), "cpu", weights=weights, silu=silu, eps=0.5))


@pytest.mark.parametrize("rows", [1, 31, 33, 128, 1000])
def test_any_number_of_rows(rows):
    """Fewer than a CTA takes at a time, and more than all CTAs take."""
    run(case((rows, 1, 64), "cpu"))
    run(case((rows, 64), "cpu"))


@pytest.mark.parametrize("bounds", [torch.int32, torch.int64])
def test_tokens_of_no_sequence_are_not_read(bounds):
    for eps in (0.0, 1e-6):
        run(case((60, 2, 64), "cpu", padding=17, bounds=bounds, eps=eps))
        run(case((1, 60, 2, 64), "cpu", padding=59, bounds=bounds, projection=8, eps=eps))


def test_a_gradient_of_any_strides():
    c = case((3, 20, 2, 64), "cpu")
    longer = torch.randn(3, 30, 2, 64).bfloat16()[:, :20]  # rows that do not flatten
    ones = torch.ones(1, 1, 1, 1).bfloat16().expand(c.dy.shape)
    for dy in (ones, c.dy.mT.contiguous().mT, longer):
        run(c._replace(dy=dy))


def test_no_rows_take_no_launch(monkeypatch):
    monkeypatch.setattr(jit, "compile", None)
    for shape in ((0, 2, 64), (2, 0, 3, 64)):
        *call, dy = case(shape, "cpu")
        assert launch.gated_norm_fwd(*call).shape == dy.shape
        assert not launch.gated_norm_bwd(dy, *call).dweight.any()


def test_gates_of_every_size():
    """The logistic function at its ends: all results are finite."""
    for silu in (True, False):
        c = case((4, 2, 64), "cpu", silu=silu)
        for size in (1e2, 1e4, 1e30):
            *call, dy = c._replace(gate=c.gate * size)
            if silu and size > 1e4:
                call[0] = call[0] * 1e-30  # y is as large as the gate
                call[4] = 1e-3
            assert launch.gated_norm_fwd(*call).isfinite().all()
            assert all(x.isfinite().all() for x in launch.gated_norm_bwd(dy * 1e-3, *call))


@pytest.mark.parametrize("blocks", [1, 15, 16, 65, 200])
@pytest.mark.kernels("norm.weight_sums")
def test_sums_over_any_number_of_blocks(blocks):
    sums, dweight = torch.randn(blocks, 72), torch.empty(72)
    jit.compile(weight_sums, weight_sums.VARIANTS[0])(sums[:, None], dweight.view(torch.uint8), 0)
    assert_close("dweight", dweight, sums.double().sum(0), FP32)


def test_interleavings_leave_no_trace(seeds):
    *call, dy = case((300, 3, 64), "cpu")
    want = launch.gated_norm_bwd(dy, *call)
    for seeds["seed"] in range(1, 4):
        assert all(map(torch.equal, launch.gated_norm_bwd(dy, *call), want))


def test_a_wrong_end_stays_inside():
    """The emulator reports accesses outside of tensors; there is nothing to compare."""
    *call, dy = case((40, 2, 64), "cpu")
    for end in (-(2**31), -1, 41, 2**31 - 1):
        call[3] = [torch.tensor([0, end], dtype=torch.int32)]
        launch.gated_norm_fwd(*call)
        launch.gated_norm_bwd(dy, *call)


def test_results_in_place():
    """The same bits as in a tensor of their own; x is gone."""
    x, gate = torch.randn(2, 70, 3, 64).bfloat16()
    weight = torch.randn(64)
    want = launch.gated_norm_fwd(x, gate, weight, [], 1e-6, True)
    launch.gated_norm_into(x, gate, weight, 1e-6, True, x)
    assert torch.equal(x, want)
