"""The benchmark's decode rows: both adapters, what counts as wrong."""

import pytest
import torch

from benchmarks.gdn.ours import Ours, ours
from benchmarks.gdn.problem import gdn_inputs, gdn_truth
from benchmarks.gdn.rivals import FLA, Definition, FlashInfer, FlashQLA
from benchmarks.gdn.workloads import GDN, Gdn
from reference import gdn
from tests.host.rival_stand_ins import installed

CPU = torch.device("cpu")
_, TRAINING, *_, POOL = ours()


def fla_recurrent(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None, **kwargs,
):  # fmt: skip
    """FLA 0.6.0's signature around the definition."""
    assert not kwargs, "FLA ignores unknown keywords; we must not pass any"
    assert output_final_state, "the benchmark asks everyone for the final state"
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state)), "FLA would copy"
    return gdn.recurrent(q, k, v, g, beta, scale, initial_state, cu_seqlens)


def fla(function=fla_recurrent):
    return installed(fla__ops__gated_delta_rule={"fused_recurrent_gated_delta_rule": function})


def batch(count, tokens):
    return Gdn((2, 4), (tokens,) * count, initial_state=True, head_dim=16, decode=True)


def complaint_of(implementation, workload, dtype=torch.float32):
    assert implementation.inapplicable(workload) is None
    inputs = gdn_inputs(workload, CPU, dtype)
    call = implementation.prepare(workload, inputs)
    call.eager()()
    got = call.collect(call.run())
    return gdn_truth(workload, inputs).judge(got, dtype, implementation.leaves_out).complaint


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_ours_and_fla_decode_a_batch(count, tokens):
    assert complaint_of(Ours(), batch(count, tokens)) is None
    with fla():
        assert complaint_of(FLA(), batch(count, tokens)) is None


@pytest.mark.parametrize("tokens", [1, 4])
def test_our_pool_decodes_the_same_batch_in_every_call(tokens):
    workload = batch(5, tokens)
    assert complaint_of(POOL, workload) is None
    call = POOL.prepare(workload, gdn_inputs(workload, CPU, torch.float32))
    first = call.collect(call.run())["o"].clone()
    assert torch.equal(call.collect(call.run())["o"], first)
    assert POOL.inapplicable(GDN["forward"][0]) is not None


def test_operands_in_bf16_and_states_in_fp32():
    assert complaint_of(Ours(), batch(5, 4), torch.bfloat16) is None


def test_results_are_views_of_what_the_call_returned():
    """The harness overwrites them with NaN to see whether a replay writes them again."""
    workload = batch(3, 2)
    call = Ours().prepare(workload, gdn_inputs(workload, CPU, torch.float32))
    o, state = raw = call.run()
    for x in call.collect(raw).values():
        x.fill_(torch.nan)
    assert o.isnan().all()
    assert state.isnan().all()


def _rounded_state(*args, **options):
    o, state = fla_recurrent(*args, **options)
    return o, state.bfloat16().float()


def _weak_correction(*args, beta, **options):
    return fla_recurrent(*args, beta=0.99 * beta, **options)


def _next_sequence(*args, **options):
    o, state = fla_recurrent(*args, **options)
    return o, state.roll(1, 0)


@pytest.mark.parametrize("wrong", [_rounded_state, _weak_correction, _next_sequence])
def test_a_state_that_is_nearly_right_is_wrong(wrong):
    with fla(wrong):
        assert "ht is off by" in complaint_of(FLA(), batch(4, 1), torch.bfloat16)


def test_who_does_not_decode_says_so():
    for implementation in (FlashQLA(), FlashInfer(), TRAINING):
        assert implementation.inapplicable(GDN["decode"][0]) is not None
    assert Definition().inapplicable(GDN["decode"][0]) is None
