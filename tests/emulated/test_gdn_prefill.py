"""Prefill on a pool of states whose sequences are cut into segments, emulated."""

import pytest
import torch

from qla_kernels import jit, prefill_gated_delta_rule
from qla_kernels.gdn import heuristics, plan
from qla_kernels.selftest import gdn_prefill
from qla_kernels.selftest.gdn_calls import small
from qla_kernels.selftest.gdn_prefill import in_pool

pytestmark = pytest.mark.usefixtures("seeds", "poison", "by_kernels")

CUT = plan.Plan(heuristics.ForwardChoice(64, True), 1)


@pytest.mark.parametrize("given", gdn_prefill.INPUTS[2:], ids=range(2, len(gdn_prefill.INPUTS)))
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
def test_segments(given, pool, monkeypatch):
    """Every chunk is a segment: each starts and ends, and keeps states, where its sequence says."""
    monkeypatch.setattr(plan, "forward", lambda *_: CUT)
    gdn_prefill.run(given, (128, 64), torch.bfloat16, "cpu", pool, torch.float32)


@pytest.mark.parametrize("kernel", [(64, True), (128, True)])
def test_zeros_in_shared_memory_name_no_checkpoint(kernel, seeds, monkeypatch):
    """A call without checkpoints has a sequence without tokens, and the pool has a slot 0."""
    seeds["seed"] = 1  # the emulator fills shared memory with zeros
    whole = plan.Plan(heuristics.ForwardChoice(*kernel), None)
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    given = gdn_prefill.INPUTS[1]
    gdn_prefill.run(given, (128, 128), torch.bfloat16, "cpu", torch.float32, torch.float32)


def test_a_dense_batch_and_one_that_does_not_flatten(monkeypatch):
    whole = plan.Plan(heuristics.ForwardChoice(64, True), None)
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    for turned in (False, True):
        x = in_pool(small(None, sizes=(128, 64), batch=2, tokens=70), [3, 1], 5, [3, -1])
        if turned:
            for name in ("q", "k", "v"):
                x[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
        before = {n: t.clone() for n, t in x.items()}
        gdn_prefill.check(x, before, prefill_gated_delta_rule(**x))


def test_wrong_slots_name_none(monkeypatch):
    """On a GPU nobody reads them: what is not in the pool is not touched."""
    whole = plan.Plan(heuristics.ForwardChoice(64, True), None)
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    x = in_pool(small([64, 3], sizes=(128, 64)), [9, -(1 << 31)], 5, [1 << 30, 5])
    before = {n: t.clone() for n, t in x.items()}
    room = torch.randn(2, *x["initial_state"].shape[1:])
    starts = torch.tensor([-7, 1 << 30], dtype=torch.int32)
    given = {"checkpoints": room.clone(), "checkpoint_every": 64, "checkpoint_starts": starts}
    gdn_prefill.check(x, before, prefill_gated_delta_rule(**x, **given))
    assert torch.equal(given["checkpoints"], room)


def test_a_call_is_one_launch(monkeypatch):
    launched = []
    compile = jit.compile
    monkeypatch.setattr(
        jit, "compile", lambda module, variant: launched.append(1) or compile(module, variant)
    )
    whole = plan.Plan(heuristics.ForwardChoice(64, True), None)
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    prefill_gated_delta_rule(**in_pool(small([64, 3], sizes=(128, 64)), [1, 2], 5))
    assert len(launched) == 1


@pytest.mark.kernels("gdn.wide_fwd")
def test_wide_heads():
    x = in_pool(small([70, 3], sizes=(256, 64)), [3, 1], 5, [3, -1])
    before = {n: t.clone() for n, t in x.items()}
    gdn_prefill.check(x, before, prefill_gated_delta_rule(**x))
