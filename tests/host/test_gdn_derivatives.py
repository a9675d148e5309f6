"""Derivatives that no kernel computes raise, through every public function."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from qla_kernels import (
    Unsupported,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    prefill_gated_delta_rule,
    verify_gated_delta_rule,
)
from tests.gdn_calls import call, leaves

ACTIVATED = call(activations=True)


def backward(q: torch.Tensor, k: torch.Tensor, do: torch.Tensor, **others: Any) -> Any:
    x = {n: others[n] for n in ("v", "g", "beta")}
    g_cum, A, *_ = chunk_gated_delta_rule_fwd(q.detach(), k, **x)
    return chunk_gated_delta_rule_bwd(q, k, x["v"], g_cum, x["beta"], A, do)


def prefill(**x: Any) -> Any:
    return (prefill_gated_delta_rule(**x, state_indices=torch.arange(len(x["q"]))),)


def verify(**x: Any) -> Any:
    return (verify_gated_delta_rule(**x, state_indices=torch.arange(len(x["q"]))),)


FUNCTIONS = {
    chunk_gated_delta_rule: ("q", "v", "beta", "initial_state", "A_log", "dt_bias"),
    fused_recurrent_gated_delta_rule: ("k", "g", "initial_state", "A_log", "dt_bias"),
    chunk_gated_delta_rule_fwd: ("k", "v", "g", "initial_state", "A_log"),
    backward: ("q", "do"),
    prefill: ("q", "beta", "initial_state", "A_log"),
    verify: ("k", "g", "initial_state", "dt_bias"),
}
CASES = [(run, name) for run, names in FUNCTIONS.items() for name in names]


def arguments(run: Any) -> dict[str, Any]:
    if run is backward:
        x = call()
        return {**x, "do": torch.randn_like(x["v"])}
    x = dict(ACTIVATED)
    if run is chunk_gated_delta_rule_fwd:
        del x["use_qk_l2norm_in_kernel"]
    return x


@pytest.mark.parametrize(("run", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("by", ["forward_ad", "jvp"])
def test_a_tangent_raises(run, name, by):
    """Some had lost it: their tangent was 0, or None."""
    x = arguments(run)

    def result(t: torch.Tensor) -> torch.Tensor:
        return next(r for r in run(**{**x, name: t}) if r is not None)

    def dual(t: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return result(forward_ad.make_dual(t, t))

    differentiate = dual if by == "forward_ad" else lambda t: torch.func.jvp(result, (t,), (t,))
    with pytest.raises(Unsupported, match=r"gated_delta_rule.*: an input has a forward-mode"):
        differentiate(x[name])


def test_others_tangents_do_not_matter():
    x = call()
    want = chunk_gated_delta_rule(**x)[0]
    with forward_ad.dual_level():
        other = forward_ad.make_dual(x["v"].clone(), x["v"])
        assert torch.equal(chunk_gated_delta_rule(**x)[0], want)
        assert torch.equal(fused_recurrent_gated_delta_rule(**x)[0] * 0, want * 0)
        assert forward_ad.unpack_dual(other * want).tangent is not None


def test_gradients_are_not_differentiable_again():
    x = leaves(call())
    o, _ = chunk_gated_delta_rule(**x)
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives alone"):
        dq.sum().backward()


@pytest.mark.parametrize("norm", [False, True])
def test_a_hessian_behind_a_sum_raises(norm):
    """It had been 0: the incoming gradient is a constant, and only the backward depends on k."""
    x = call(tokens=3, batch=1, heads=(1, 1), sizes=(2, 2), use_qk_l2norm_in_kernel=norm)

    def total(k: torch.Tensor) -> torch.Tensor:
        return chunk_gated_delta_rule(**{**x, "k": k})[0].sum()

    with pytest.raises(Unsupported, match="chunk_gated_delta_rule: a derivative of its gradients"):
        torch.autograd.functional.hessian(total, x["k"])


def test_a_gradient_penalty_raises():
    x = leaves(call())
    o, _ = chunk_gated_delta_rule(**x)
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives alone"):
        (o.sum() + dq.square().sum()).backward()


def test_a_graph_of_gradients_that_is_not_used():
    x, y = leaves(call()), leaves(call())
    for t, like in zip(y.values(), x.values(), strict=True):
        if isinstance(t, torch.Tensor):
            t.data.copy_(like.data)
    for call_, create_graph in ((x, True), (y, False)):
        chunk_gated_delta_rule(**call_)[0].sum().backward(create_graph=create_graph)
    assert all(torch.equal(x[n].grad, y[n].grad) for n in ("q", "k", "v", "g", "beta"))
