"""The reference under its public names: activations, state layouts, what is returned."""

import pytest
import torch

import reference
from reference import gdn
from tests.compare import assert_close
from tests.maths.inputs import make

EXACT = 1e-13


def test_activations_come_before_the_rule():
    x = make([70, 0, 3], heads=(2, 4))
    q, k, raw_g, raw_beta = 3 * x.q, 3 * x.k, torch.randn_like(x.g), torch.randn_like(x.beta)
    A_log, dt_bias = torch.randn(2, 4, dtype=torch.float64)
    o, state = reference.chunk_gated_delta_rule(
        q,
        k,
        x.v,
        raw_g,
        raw_beta,
        initial_state=x.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        cu_seqlens=x.cu_seqlens,
    )
    g, beta = gdn.gate(raw_g, A_log, dt_bias), gdn.beta_sigmoid(raw_beta, True)
    normalised = (gdn.l2norm(q), gdn.l2norm(k), x.v, g, beta, None)
    want = gdn.recurrent(*normalised, x.initial_state, x.cu_seqlens)
    assert_close("o", o, want[0], 1e-12)
    assert_close("final_state", state, want[1], 1e-12)


def test_state_v_first_transposes_states_and_nothing_else():
    x = make([70, 3])
    out = reference.chunk_gated_delta_rule_fwd(*x, output_h=True)
    flipped = reference.chunk_gated_delta_rule_fwd(
        *x._replace(initial_state=x.initial_state.mT), output_h=True, state_v_first=True
    )
    for name, i in (("g_cum", 0), ("A", 1), ("o", 2)):
        assert torch.equal(out[i], flipped[i]), name
    for name, i in (("h", 3), ("final_state", 4)):
        assert torch.equal(out[i], flipped[i].mT), name

    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    first, rest = (x.q, x.k, x.v, out[0], x.beta, out[1], do), (x.scale, x.initial_state)
    *want, dh0 = reference.chunk_gated_delta_rule_bwd(*first, dht, *rest, x.cu_seqlens)
    *got, dh0_flipped = reference.chunk_gated_delta_rule_bwd(
        *first, dht.mT, x.scale, x.initial_state.mT, x.cu_seqlens, True
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(dh0, dh0_flipped.mT)


def test_what_is_not_asked_for_is_none():
    x = make([5])
    assert reference.chunk_gated_delta_rule(*x[:5])[1] is None
    g_cum, A, o, h, final_state, cache = reference.chunk_gated_delta_rule_fwd(
        *x, output_final_state=False, is_train=False
    )
    assert (g_cum, A, h, final_state, cache) == (None,) * 5
    out = torch.empty_like(o)
    assert reference.chunk_gated_delta_rule_fwd(*x, out=out)[2] is out
    assert torch.equal(out, o)


def test_differentiable_through_torch():
    """The public function has no backward of its own here: autograd finds the same gradients."""
    x = make([70])
    leaves = [t.requires_grad_() for t in x[:5]]
    o, _ = reference.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    got = torch.autograd.grad(o.square().sum(), leaves)
    q, k = gdn.l2norm(leaves[0]), gdn.l2norm(leaves[1])
    want_o, _ = gdn.recurrent(q, k, *leaves[2:])
    for a, b in zip(got, torch.autograd.grad(want_o.square().sum(), leaves), strict=True):
        assert_close("gradient", a, b, 1e-11)


def test_no_shards():
    x = make([5])
    with pytest.raises(NotImplementedError, match="cp_context"):
        reference.chunk_gated_delta_rule(*x[:5], cp_context=object())


def test_gate_in_kernel_needs_its_parameter():
    x = make([5])
    with pytest.raises(ValueError, match="A_log"):
        reference.chunk_gated_delta_rule(*x[:5], use_gate_in_kernel=True)
