"""Prefill on a pool of states whose sequences are cut into segments, emulated."""

import pytest
import torch

from qla_kernels import prefill_gated_delta_rule
from qla_kernels.gdn import plan
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest import gdn_prefill
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_prefill import in_pool, kept
from qla_kernels.runtime import jit

pytestmark = pytest.mark.usefixtures("seeds", "poison", "by_kernels")

CUT = plan.Plan(ForwardChoice(64, True), 1)


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
    whole = plan.Plan(ForwardChoice(*kernel))
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    given = gdn_prefill.INPUTS[1]
    gdn_prefill.run(given, (128, 128), torch.bfloat16, "cpu", torch.float32, torch.float32)


def test_a_dense_batch_and_one_that_does_not_flatten(monkeypatch):
    whole = plan.Plan(ForwardChoice(64, True))
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
    whole = plan.Plan(ForwardChoice(64, True))
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    x = in_pool(small([64, 3], sizes=(128, 64)), [9, -(1 << 31)], 5, [1 << 30, 5])
    before = {n: t.clone() for n, t in x.items()}
    room = torch.randn(2, *x["initial_state"].shape[1:])
    starts = torch.tensor([-7, 1 << 30], dtype=torch.int32)
    given = {"checkpoints": room.clone(), "checkpoint_every": 64, "checkpoint_starts": starts}
    gdn_prefill.check(x, before, prefill_gated_delta_rule(**x, **given))
    assert torch.equal(given["checkpoints"], room)


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], None], ids=["packed", "dense"])
@pytest.mark.parametrize("null_slot", [-1, 0])
def test_a_call_without_tokens_passes_states_on(lengths, null_slot):
    """From where a sequence starts to where it ends; zeros from a start that is none."""
    shape = {"sizes": (128, 64), "tokens": 0, "batch": 4, "padding": 0}
    x = in_pool(small(lengths, **shape), [3, 1, 0, 5], 5, [4, -1, 4, 2])
    x["null_slot"] = null_slot
    before = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    o = prefill_gated_delta_rule(**x)
    gdn_prefill.check(x, before, o)
    assert torch.equal(x["initial_state"][3], before["initial_state"][4])
    assert not x["initial_state"][1].any()


@pytest.mark.parametrize("lengths", [[3, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_a_state_before_all_tokens_is_kept(lengths):
    """Of a sequence without tokens, too, whether or not another one has any."""
    x = in_pool(small(lengths, sizes=(128, 64), padding=0), [3, 1, 0, 4], 5)
    first, starts = torch.tensor([0, 0, 1, 0]), torch.tensor([2, 0, 1, 9])
    x = kept(x, 4, torch.bfloat16, first_checkpoints=first, checkpoint_starts=starts)
    before = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    o = prefill_gated_delta_rule(**x)
    x["first_checkpoints"][3] = -1  # its entry is past the others: nothing is written
    gdn_prefill.check(x, before, o)


def test_a_call_is_one_launch(monkeypatch):
    launched = []
    compile = jit.compile
    monkeypatch.setattr(
        jit, "compile", lambda module, variant: launched.append(1) or compile(module, variant)
    )
    whole = plan.Plan(ForwardChoice(64, True))
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    prefill_gated_delta_rule(**in_pool(small([64, 3], sizes=(128, 64)), [1, 2], 5))
    assert len(launched) == 1


@pytest.mark.kernels("gdn.wide_fwd")
def test_wide_heads():
    x = in_pool(small([70, 3], sizes=(256, 64)), [3, 1], 5, [3, -1])
    before = {n: t.clone() for n, t in x.items()}
    gdn_prefill.check(x, before, prefill_gated_delta_rule(**x))
