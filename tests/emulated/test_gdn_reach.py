"""Rows of a batch that are too far apart for one launch, as if 1 byte were: emulated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qla_kernels import fused_recurrent_gated_delta_rule
from qla_kernels.gdn.decode import api as recurrent
from qla_kernels.gdn.decode import launch as launch_recurrent
from qla_kernels.gdn.launch import activations, backward, tensors
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.lab.selftest.gdn_activations import MIXES, gradients, raw
from qla_kernels.lab.selftest.gdn_recurrent import decode, pooled
from qla_kernels.runtime import jit

pytestmark = pytest.mark.usefixtures("seeds", "poison")


@pytest.fixture
def far_apart(monkeypatch) -> Callable[..., Any]:
    """The same results bit for bit, and how many launches more."""

    def check(run: Callable[[], Any]) -> int:
        launches = 0
        compile = jit.compile

        def counted(*args: Any) -> Any:
            nonlocal launches
            launches += 1
            return compile(*args)

        monkeypatch.setattr(jit, "compile", counted)
        want, together = run(), launches
        monkeypatch.setattr(tensors, "REACH", 1)
        got, apart = run(), launches - together
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if b is not None)
        return apart - together

    return check


def test_norms(far_apart):
    room = torch.randn(3, 2, 40, 128).bfloat16()
    x, dy = room[..., 64:].transpose(1, 2), torch.randn(3, 40, 2, 64).bfloat16()

    def norms() -> tuple[torch.Tensor, torch.Tensor]:
        return launch.l2norm_fwd(x), backward.l2norm_bwd(x, dy, None)

    assert far_apart(norms) == 2 * 2


def test_gates(far_apart):
    x, (dg, dbeta) = raw((3, 100, 6), MIXES[0], "cpu", True), torch.randn(2, 3, 100, 6)

    def there_and_back() -> tuple[torch.Tensor | None, ...]:
        return *activations.activate(*x, 1.0), *gradients(x, dg, dbeta, 1.0)

    assert far_apart(there_and_back) == 2 * 2


@pytest.mark.parametrize("slots", [None, [4, -1, 0]], ids=["states", "a pool"])
def test_tokens_one_by_one(far_apart, slots, monkeypatch):
    for op in ("gdn_recurrent", "gdn_recurrent_slots"):
        monkeypatch.setattr(recurrent, op, getattr(launch_recurrent, op))
    x = decode(None, sizes=(64, 64))

    y = x if slots is None else pooled(x, slots, 5)

    def run() -> tuple[torch.Tensor, ...]:
        states = {"initial_state": y["initial_state"].clone()}  # a pool is written
        return fused_recurrent_gated_delta_rule(**{**y, **states}, output_final_state=True)

    assert far_apart(run) == 2
