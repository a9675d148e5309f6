"""Segments at K = 256, emulated; the cases of their kernels are in test_cases.py."""

import pytest
import torch

from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND, Plan
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_forward import check, forward
from qla_kernels.lab.selftest.gdn_segments import NEVER, batch, check_starts
from qla_kernels.lab.selftest.gdn_wide_segments import cut_forward, wide_starts

pytestmark = pytest.mark.usefixtures("seeds", "poison")

SIZES = (256, 64)


def test_a_sequence_in_two_segments_has_the_bits_of_the_whole_one():
    """The first segment's b is its end state: nothing is folded, and all roundings are the same."""
    x = small([300, 64], sizes=(256, 128))
    plan = Plan(ForwardChoice(64, False), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "planned", lambda *_: (plan, False))
        want = forward(x)
    for width in (64, 128):
        done = cut_forward(x, 3, NEVER, width)
        assert torch.equal(done.o, want.o)
        assert torch.equal(done.final_state, want.final_state)


@pytest.mark.parametrize("seed", range(1, 4))
def test_interleavings(seed, seeds):
    """Heads of which some fold, of two sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = batch([250, 1, 130], heads=(1, 2), sizes=SIZES)
    check_starts(x, wide_starts(x, 1, WARM_LOG_BOUND).states, 1)


def test_warm_and_cold_heads_and_segments_side_by_side():
    """Head 0 forgets everywhere, head 1 nowhere, head 2 in the third segment of five."""
    x = batch([5 * 64], heads=(1, 3), sizes=SIZES, gate="none", key="low rank")
    x.g[..., 0] = -0.2
    x.g[:, 2 * 64 : 3 * 64, 2] = -0.2
    done = wide_starts(x, 1, WARM_LOG_BOUND)
    check_starts(x, done.states, 1)
    assert done.windows.T.tolist() == [[1, 1, 1, 1, 0], [0] * 5, [0, 0, 1, 0, 0]]


@pytest.mark.parametrize("gate", ["strong", "total"])
def test_gates_at_the_edge(gate):
    x = batch([3 * 64, 70], sizes=SIZES, gate=gate, key="low rank")
    check_starts(x, wide_starts(x, 1, WARM_LOG_BOUND).states, 1)


def test_a_warm_head_reads_its_window_alone():
    """64 tokens leave e^-12.8: what comes before them may be anything, unless all is asked for."""
    x = batch([4 * 64 + 1], sizes=SIZES)
    x.g[..., 0] = -0.2
    x.g[..., 1] = 0
    want = wide_starts(x, 3, WARM_LOG_BOUND)
    assert want.windows[0].tolist() == [1, 0]
    x.v[:, :64] = torch.nan
    entered = wide_starts(x, 3, WARM_LOG_BOUND).states[1]
    assert torch.equal(entered[0], want.states[1, 0])
    assert entered[1].isnan().all()
    assert wide_starts(x, 3, EXACT_LOG_BOUND).states[1, 0].isnan().all()


def test_keys_that_grow_the_state_lengthen_the_window():
    """One chunk decays by e^-13, but three tokens of it multiply the state by up to 11 each."""
    x = batch([5 * 64], heads=(1, 1), sizes=SIZES, gate="none")
    x.g[:] = -13 / 64
    x.k[:, 2 * 64 - 3 : 2 * 64] *= 12**0.5
    x.beta[:, 2 * 64 - 3 : 2 * 64] = 1
    assert wide_starts(x, 3, WARM_LOG_BOUND).windows.T.tolist() == [[2, 0]]


def test_a_fold_keeps_what_nothing_forgets():
    """Seven segments of a chunk, keys of rank 8: as exact as the sequence in one piece."""
    x = batch([7 * 64], heads=(1, 1), sizes=SIZES, gate="none", key="low rank", padding=0)
    check_starts(x, wide_starts(x, 1, WARM_LOG_BOUND).states, 1)


def test_a_state_with_V_first_and_a_beta_of_16_bits():
    x = small([150], sizes=SIZES)
    x["beta"] = x["beta"].bfloat16()
    done = cut_forward(x, 1, beta=x["beta"].float())
    turned = x["initial_state"].mT.contiguous()
    other = cut_forward(x, 1, state_v_first=True, initial_state=turned)
    assert torch.equal(other.o, done.o)
    assert torch.equal(other.final_state.mT, done.final_state)


def test_a_dense_batch_and_no_initial_state():
    x = small(batch=2, tokens=140, sizes=SIZES, initial_state=None)
    x["initial_state"] = None
    done = cut_forward(x, 1)
    check(x, done.o, done.final_state)


def test_a_backward_gets_what_whole_sequences_leave():
    """It runs over whole sequences, from g_cum and A."""
    x = small([150, 1], sizes=SIZES)
    want, done = forward(x, is_train=True), cut_forward(x, 1, is_train=True)
    check(x, done.o, done.final_state)
    assert torch.equal(done.g_cum, want.g_cum)
    assert torch.equal(done.A, want.A)
    assert not done.cp_cache
