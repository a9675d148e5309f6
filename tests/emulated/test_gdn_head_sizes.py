"""Head sizes that no variant has, emulated: V above 128, K between 16 and 128.

Kernels and launches are those of other sizes, so each path has one case.
"""

import pytest
import torch

from qla_kernels import fused_recurrent_gated_delta_rule
from qla_kernels.gdn import plan
from qla_kernels.gdn.call import Incoming, SavedForward
from qla_kernels.gdn.launch import backward as launch_backward
from qla_kernels.gdn.launch import segments
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest import (
    gdn_anchored,
    gdn_backward,
    gdn_forward,
    gdn_prefill,
    gdn_recurrent,
    gdn_verify,
)
from qla_kernels.lab.selftest.gdn_calls import Call, call, records, small
from tests import gdn_tree_check
from tests.compare import assert_close
from tests.emulated.test_gdn_tree import both
from tests.gdn_shards_check import run as run_ranks

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("seeds", "poison", "by_kernels")


def both_directions(x: Call) -> None:
    """Compares a forward and a backward with fp64."""
    done = gdn_forward.forward(x, is_train=True)
    gdn_forward.check(x, done.o, done.final_state)
    do, dht = gdn_backward.gradients(x)
    gdn_backward.check(x, do, dht, gdn_backward.backward(x, do, dht))


@pytest.mark.parametrize(
    ("sizes", "state_v_first"),
    [((64, 256), False), ((48, 64), False)],
    ids=str,
)
def test_a_call(sizes, state_v_first):
    """q, k and v are slices: what lies between their heads is another's, and NaN."""
    x = small([70, 64], sizes=sizes, state_v_first=state_v_first)
    for name in ("q", "k", "v"):
        size = x[name].shape[3]
        room = x[name].new_full((*x[name].shape[:3], size + 64), torch.nan)
        x[name] = room[..., :size].copy_(x[name])
    both_directions(x)


def test_sequences_that_are_cut(monkeypatch):
    x = small([300], sizes=(80, 192), heads=(1, 1), state_v_first=True)
    x["g"][:, :300] *= 0.01
    cut = plan.Plan(ForwardChoice(64, True), 2, -30.0)
    monkeypatch.setattr(plan, "forward", lambda *_: cut)
    monkeypatch.setattr(plan, "kept_is_faster", lambda *_: True)
    flags = {"enable_fwd_cp_cache": True, "cu_seqlens_cpu": x["cu_seqlens"]}
    done = gdn_forward.forward(x, is_train=True, **flags)
    gdn_forward.check(x, done.o, done.final_state)
    do, dht = gdn_backward.gradients(x)
    call, options = records(x, **flags)
    kept = SavedForward(done.g_cum, done.A, done.cp_cache)
    got = launch_backward.gdn_bwd(call, kept, Incoming(do, dht), options)
    gdn_backward.check(x, do, dht, got)


def test_a_layer_of_olmo_hybrid():
    flags = {"activations": True, "allow_neg_eigval": True}
    both_directions(small([70, 64], sizes=(96, 192), state_v_first=True, **flags))


def test_states_of_chunks_have_no_other_columns():
    x = small(None, sizes=(96, 192), batch=1, tokens=130)
    h = gdn_forward.forward(x, output_h=True).h
    part = {name: x[name][:, :64] for name in ("q", "k", "v", "g", "beta")}
    before = gdn_forward.forward({**x, **part}).final_state
    assert h.shape == (1, 3, 2, 96, 192)
    assert_close("h", h[:, 1], before, 2**-8)


def test_how_far_a_segment_looks_back_depends_on_its_keys_alone():
    """Norms are those of the same keys with zeros behind them; here large numbers lie between."""
    x = small([400], sizes=(80, 64), padding=0)
    x["g"], keys = x["g"] - 0.2, 1.5 * x["k"]
    room = keys.new_full((*keys.shape[:3], 128), 100)
    slices = room[..., :80].copy_(keys)
    cut = segments.cut(x["g"], x["cu_seqlens"].int(), 3)
    found = [
        segments.maps(k, x["v"], x["g"], x["beta"], None, None, cut, plan.WARM_LOG_BOUND)
        for k in (slices, torch.nn.functional.pad(keys, (0, 48)))
    ]
    (first, other), mapped = found, slice(0, 2)
    assert not first.cold[mapped].all(), "take gates that forget"
    assert torch.equal(first.cold[mapped], other.cold[mapped])
    assert torch.equal(first.left[1:3], other.left[1:3])


def test_a_tree():
    sizes = 96, 192
    x = gdn_tree_check.tree_case(gdn_tree_check.KERNEL_FORESTS["turns"], BF16, sizes=sizes)
    gdn_tree_check.check(x, *both(x))


def test_ranks_whose_sequences_are_cut(monkeypatch):
    x = call([2 * 100], heads=(1, 1), sizes=(80, 192), dtype=BF16, gates=torch.float32)
    del x["initial_state"]
    x["g"] *= 0.01
    kernel = ForwardChoice(64, True)
    monkeypatch.setattr(plan, "forward", lambda *_, **__: plan.Plan(kernel, 1))
    monkeypatch.setattr(plan, "backward", lambda *_, **__: 1)
    do = torch.randn_like(x["v"])
    o, grads = run_ranks(x, do, 2, plan.WARM_LOG_BOUND, monkeypatch)
    gdn_forward.check(x, o)
    gdn_backward.check(x, do, None, grads)


def test_a_step_of_anchors():
    tails, count = gdn_anchored.STEPS[2]
    x = gdn_anchored.step(tails, count, BF16, (96, 192), (1, 2))
    gdn_anchored.check(x, tails, count, *gdn_anchored.run(x, "cpu"))


def test_a_pool_is_filled(monkeypatch):
    whole = plan.Plan(ForwardChoice(64, True))
    monkeypatch.setattr(plan, "forward", lambda *_: whole)
    given = gdn_prefill.INPUTS[2]
    gdn_prefill.run(given, (112, 192), BF16, "cpu", torch.float32, torch.float32)


def test_a_token_is_decoded():
    x = gdn_recurrent.decode([2, 0, 1], sizes=(96, 192), state_v_first=True)
    x = gdn_recurrent.pooled(x, [2, -1, 3], 4)
    before = x["initial_state"].clone()
    o, _ = fused_recurrent_gated_delta_rule(**x)
    gdn_recurrent.check_pool(x, before, o)


def test_drafts_are_verified():
    x = gdn_recurrent.decode([4, 0, 6], BF16, (48, 192))
    gdn_verify.run(gdn_verify.drafted(x, [7, -1, 2], 14, rows=[1, 0, 2], steps=6))
