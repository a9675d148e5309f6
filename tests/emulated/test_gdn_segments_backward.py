"""The backward's chains over segments, emulated: what whole sequences leave, from both ends."""

import pytest
import torch

from qla_kernels.gdn import plan
from qla_kernels.gdn.call import Incoming, SavedForward
from qla_kernels.gdn.launch import backward, segments
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.gdn_backward import check as check_gradients
from qla_kernels.lab.selftest.gdn_chains import case
from qla_kernels.lab.selftest.gdn_segments import GIVEN, NEVER, SOLVING
from qla_kernels.lab.selftest.gdn_segments_backward import check, end_gradients, run
from tests.gdn_calls import call, records

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_gates_and_keys_at_the_edge(gate, key):
    x = case([250, 70], gate=gate, key=key)
    check(x, run(x, 1, WARM_LOG_BOUND))


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Heads of which some fold, of three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = case([250, 1, 190], heads=(1, 3))
    x.g[..., 2] = 0
    check(x, run(x, 2, WARM_LOG_BOUND))


def test_warm_and_cold_heads_and_segments_side_by_side():
    """Head 0 forgets everywhere, head 1 nowhere, head 2 in the middle and at the end."""
    x = case([10 * 64], heads=(1, 3), gate="none")
    x.g[..., 0] = -0.2
    x.g[:, 4 * 64 : 6 * 64, 2] = -0.2
    x.g[:, 8 * 64 :, 2] = -0.2
    check(x, run(x, 2, WARM_LOG_BOUND))


def test_a_head_may_forget_only_when_looked_at_from_one_end():
    """e^-12.8 over the last chunk, but e^-11.5 over all three: too much, from the beginning on."""
    x = case([9 * 64], heads=(1, 1), gate="none")
    x.g[:, 3 * 64 : 5 * 64] = 0.01
    x.g[:, 5 * 64 : 6 * 64] = -0.2
    check(x, run(x, 3, WARM_LOG_BOUND))


def test_a_warm_head_reads_its_window_alone():
    """64 tokens leave e^-12.8: what comes behind them may be anything, unless all is asked for."""
    x = case([8 * 64])
    x.g[..., 0] = -0.2
    x.g[..., 1] = 0
    cut = segments.cut(x.g, x.cu_seqlens, 4)
    want = end_gradients(x, cut, WARM_LOG_BOUND)[1][0]
    x.do[:, 5 * 64 :] = torch.nan
    x.dht[:] = torch.nan
    got = end_gradients(x, cut, WARM_LOG_BOUND)[1][0]
    assert torch.equal(got[0], want[0])
    assert got[1].isnan().all()
    for limit in (-13.0, NEVER):
        assert end_gradients(x, cut, limit)[1][0, 0].isnan().all()


@pytest.mark.parametrize("kernel", [GIVEN, SOLVING])
def test_a_backward_that_is_given_the_forwards_segments_looks_for_none(kernel, monkeypatch):
    x = call([300, 70], heads=(1, 2), sizes=(128, 128), dtype=torch.bfloat16, gates=torch.float32)
    x["g"][..., 0] *= 0.01  # a head that is folded, beside one that is not
    cut = plan.Plan(kernel, 2, WARM_LOG_BOUND)
    monkeypatch.setattr(plan, "forward", lambda *_: cut)
    given, options = records(x, is_train=True, enable_fwd_cp_cache=True)
    done = launch.gdn_fwd(given, options)
    monkeypatch.setattr(segments, "cut", None)
    monkeypatch.setattr(segments, "maps", None)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    saved = SavedForward(done.g_cum, done.A, done.cp_cache)
    got = backward.gdn_bwd(given, saved, Incoming(do, dht), options)
    check_gradients(x, do, dht, got)
