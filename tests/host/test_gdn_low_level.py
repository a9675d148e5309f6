"""The low-level pair on the CPU: the public function in two halves, and what only they return."""

import warnings

import pytest
import torch

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from qla_kernels.runtime.cpu import reference
from tests.compare import assert_close
from tests.gdn_calls import CALLS, Call, call, leaves


def low_level(x: Call) -> tuple[torch.Tensor, ...]:
    return tuple(x[n] for n in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("kind", ["dense", "packed", "V first"])
def test_low_level_pair_is_the_public_function(kind):
    x = call(**CALLS[kind])
    others = {n: x[n] for n in ("cu_seqlens", "state_v_first", "scale") if n in x}
    q, k, v, g, beta = low_level(x)
    h0 = x["initial_state"]
    g_cum, A, o, h, state, cache = chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, initial_state=h0, **others
    )
    assert h is None
    assert cache is None
    public = leaves(x)
    want = chunk_gated_delta_rule(**public, output_final_state=True)
    assert torch.equal(o, want[0])
    assert torch.equal(state, want[1])
    do, dht = torch.randn_like(o), torch.randn_like(state)
    names = ("q", "k", "v", "beta", "g", "initial_state")
    wanted = torch.autograd.grad(want, [public[n] for n in names], (do, dht))
    found = chunk_gated_delta_rule_bwd(q, k, v, g_cum, beta, A, do, dht, initial_state=h0, **others)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert chunk_gated_delta_rule_bwd(q, k, v, g_cum, beta, A, do, **others)[-1] is None


def test_low_level_forward_activates():
    x = call(activations=True, allow_neg_eigval=True)
    want = chunk_gated_delta_rule(**x)[0]
    q, k = (reference().gdn.l2norm(x[n]) for n in ("q", "k"))
    flags = ("use_gate_in_kernel", "A_log", "dt_bias")
    flags += ("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "initial_state")
    found = chunk_gated_delta_rule_fwd(
        q, k, *low_level(x)[2:], **{n: x[n] for n in flags}, output_final_state=False
    )
    assert torch.equal(found[2], want)
    assert found[4] is None


@pytest.mark.parametrize("state_v_first", [False, True])
def test_low_level_chunk_states(state_v_first):
    """h holds the state before each chunk: the final state of what came before."""
    x = call([70, 0, 64, 130], state_v_first=state_v_first)
    first, ends = x["initial_state"], x["cu_seqlens"].tolist()
    flags = {"state_v_first": state_v_first}
    h = chunk_gated_delta_rule_fwd(
        *low_level(x), None, first, x["cu_seqlens"], output_h=True, **flags
    )[3]
    assert h.shape == (1, 2 + 0 + 1 + 3, *first.shape[1:])
    assert torch.equal(h[0, [0, 2, 3]], first[[0, 2, 3]])
    prefix = [t[:, ends[3] : ends[3] + 128] for t in low_level(x)]
    state = chunk_gated_delta_rule_fwd(*prefix, None, first[3:], **flags)[4]
    assert_close("h", h[:, 5], state, 1e-13)


def test_low_level_inference_keeps_nothing_and_writes_where_told():
    x = call(dtype=torch.bfloat16)
    out = torch.empty_like(x["v"])
    g_cum, A, o, *_ = chunk_gated_delta_rule_fwd(*low_level(x), is_train=False, out=out)
    assert g_cum is None
    assert A is None
    assert o is out
    assert torch.equal(out, chunk_gated_delta_rule_fwd(*low_level(x))[2])


def test_low_level_results_carry_no_graph():
    x = leaves(call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = chunk_gated_delta_rule_fwd(*low_level(x))
    assert not any(r.requires_grad for r in done if r is not None)


def results(q, k, v, g, beta, do, h0):
    """Returns the results of both directions, in the order of the kernels."""
    g_cum, A, o, h, ht, _ = chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, initial_state=h0, output_h=True
    )
    grads = chunk_gated_delta_rule_bwd(q, k, v, g_cum, beta, A, do, initial_state=h0)
    names = ("g_cum", "A", "o", "ht", "h", "dq", "dk", "dv", "dbeta", "dg", "dh0")
    return dict(zip(names, (g_cum, A, o, ht, h, *grads), strict=True))


@pytest.mark.parametrize(
    ("changed", "first"), [("g", "g_cum"), ("k", "A"), ("v", "o"), ("h0", "o"), ("do", "dq")]
)
def test_a_result_depends_on_those_before_it(changed, first):
    """So the first wrong result is that of the wrong kernel."""
    x = call(batch=1, tokens=70)
    h0 = x["initial_state"]
    inputs = {name: x[name] for name in ("q", "k", "v", "g", "beta")} | {"do": x["v"], "h0": h0}
    want = results(**inputs)
    got = results(**inputs | {changed: inputs[changed] / 2})
    assert next(name for name in want if not torch.equal(want[name], got[name])) == first
