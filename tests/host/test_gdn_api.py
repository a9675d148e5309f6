"""The public gated delta rule on the CPU: signature, values and gradients."""

import inspect
import itertools
from typing import Any

import pytest
import torch

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
)
from qla_kernels.gdn import ops
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import CALLS, DIFFERENTIABLE, call, definition, gradients, leaves

REQUIRED = inspect.Parameter.empty

# FLA 0.6.0: fla.ops.gated_delta_rule.chunk_gated_delta_rule, then **kwargs
FLA = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": REQUIRED,
    "beta": REQUIRED,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "chunk_indices": None,
    "cp_context": None,
}

# FlashQLA 0.1.3: flash_qla.chunk_gated_delta_rule_fwd and _bwd, by position
FLASH_QLA_FORWARD = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": REQUIRED,
    "beta": REQUIRED,
    "scale": None,
    "initial_state": None,
    "cu_seqlens": None,
    "output_final_state": True,
    "output_h": False,
    "auto_cp": True,
    "state_v_first": False,
    "enable_fwd_cp_cache": False,
    "cp_context": None,
    "is_train": None,
}
FLASH_QLA_BACKWARD = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": REQUIRED,
    "beta": REQUIRED,
    "A": REQUIRED,
    "do": REQUIRED,
    "dht": None,
    "scale": None,
    "initial_state": None,
    "cu_seqlens": None,
    "state_v_first": False,
    "auto_cp": True,
    "cp_cache": None,
    "cp_context": None,
}


def positional(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p.default for p in parameters if p.kind not in kinds}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (chunk_gated_delta_rule, FLA),
        (chunk_gated_delta_rule_fwd, FLASH_QLA_FORWARD),
        (chunk_gated_delta_rule_bwd, FLASH_QLA_BACKWARD),
    ],
)
def test_names_order_and_defaults(ours, theirs):
    assert list(positional(ours).items()) == list(theirs.items())


@pytest.mark.libraries
def test_signature_equals_that_of_an_installed_fla():
    pytest.importorskip("fla.backends", exc_type=ImportError)  # 0.5.2 has no chunk_indices
    fla = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)
    wrapped = inspect.unwrap(fla.chunk_gated_delta_rule)
    theirs = inspect.signature(wrapped).parameters.values()
    ours = inspect.signature(chunk_gated_delta_rule).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_kwargs_and_alias():
    last = list(inspect.signature(chunk_gated_delta_rule).parameters.values())[-1]
    assert (last.name, last.kind) == ("kwargs", inspect.Parameter.VAR_KEYWORD)
    assert chunk_gdn is chunk_gated_delta_rule


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.usefixtures("poison")
def test_values_and_gradients_are_those_of_the_definition(kind):
    """In fp64, against autograd of the recurrence, for every tensor that can have a gradient."""
    x = call(**CALLS[kind])
    live = x["cu_seqlens"][-1] if "cu_seqlens" in x else x["q"].shape[1]
    ours, theirs = leaves(x), leaves(x)
    got = chunk_gated_delta_rule(**ours, output_final_state=True)
    want = definition(theirs)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a.detach(), b.detach(), 1e-12)
    got_grads, want_grads = gradients(got, ours), gradients(want, theirs)
    assert list(got_grads) == [n for n in DIFFERENTIABLE if n in x]
    for name, found in got_grads.items():
        wanted = want_grads[name]
        if name in ("q", "k", "v", "g", "beta"):
            assert not found[:, live:].any(), f"{name}: gradient past the last sequence"
            found, wanted = found[:, :live], wanted[:, :live]
        assert_close(f"d{name}", found, wanted, 1e-11)


def test_fp32_is_as_accurate_as_fp32_allows():
    x = call(dtype=torch.float32, tokens=200, activations=True)
    exact = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in x.items()}
    ours, theirs = leaves(x), leaves(exact)
    got, want = chunk_gated_delta_rule(**ours, output_final_state=True), definition(theirs)
    for a, b in zip(got, want, strict=True):
        assert relative_l2(a, b) < 1e-6
    got_grads, want_grads = gradients(got, ours), gradients(want, theirs)
    for name in got_grads:  # A_log and dt_bias sum terms of both signs over all tokens
        limit = 2e-5 if name in ("A_log", "dt_bias") else 2e-6
        assert relative_l2(got_grads[name], want_grads[name]) < limit, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float64])
def test_each_result_has_the_dtype_of_what_it_belongs_to(dtype, gates):
    x = leaves(call(dtype=dtype, gates=gates, activations=True))
    o, state = chunk_gated_delta_rule(**x, output_final_state=True)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    for name, gradient in gradients((o, state), x).items():
        assert gradient.dtype == x[name].dtype, name
        assert gradient.isfinite().all(), name


def test_slices_of_one_projection_are_taken_as_they_are():
    x = call(heads=(2, 4), sizes=(16, 16))
    fused = torch.cat([x["q"], x["k"], x["v"]], 2).requires_grad_()
    q, k, v = fused.split([2, 2, 4], 2)
    ours = {**x, "q": q, "k": k, "v": v, "g": x["g"].mT.contiguous().mT}
    o, _ = chunk_gated_delta_rule(**ours)
    want = leaves(x)
    o_want, _ = chunk_gated_delta_rule(**want)
    assert torch.equal(o, o_want)
    o.sum().backward()  # a gradient of stride 0
    o_want.backward(torch.ones_like(o_want))
    assert torch.equal(fused.grad, torch.cat([want[n].grad for n in "qkv"], 2))


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_has_no_gradient(used):
    """No zeros are made for a final state nobody read; o may be the one not read."""
    x = leaves(call())
    y = leaves(x)
    got = chunk_gated_delta_rule(**x, output_final_state=True)[used]
    want = definition(y)[used]
    names = [n for n in DIFFERENTIABLE if n in x]
    got_grads = torch.autograd.grad(got.sum(), [x[n] for n in names], allow_unused=True)
    want_grads = torch.autograd.grad(want.sum(), [y[n] for n in names], allow_unused=True)
    for name, a, b in zip(names, got_grads, want_grads, strict=True):
        assert_close(name, a, torch.zeros_like(a) if b is None else b, 1e-12)


def test_final_state_only_when_asked_for():
    assert chunk_gated_delta_rule(**call())[1] is None


@pytest.mark.parametrize("shape", [{"tokens": 0}, {"batch": 0}, {"lengths": []}, {"lengths": [0]}])
def test_nothing_to_do(shape):
    x = leaves(call(**shape, activations=True))
    o, state = chunk_gated_delta_rule(**x, output_final_state=True)
    assert o.shape == x["v"].shape
    assert torch.equal(state, x["initial_state"])
    found = gradients((o, state), x)
    assert all(found[n].shape == x[n].shape and found[n].isfinite().all() for n in found)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_one_by_one(dtype):
    lengths = [5, 0, 64, 70]
    x = call(lengths)
    x["cu_seqlens"] = x["cu_seqlens"].to(dtype)
    cpu = {"cu_seqlens_cpu": x["cu_seqlens"].clone()}
    o, state = chunk_gated_delta_rule(**x, **cpu, output_final_state=True)
    ends = x.pop("cu_seqlens").tolist()
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        one = {**x, "initial_state": x["initial_state"][n : n + 1]}
        one |= {name: x[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        o_one, state_one = chunk_gated_delta_rule(**one, output_final_state=True)
        assert_close("o", o[:, start:end], o_one, 1e-13)
        assert_close("state", state[n : n + 1], state_one, 1e-13)


def test_the_default_device_is_not_asked():
    x = leaves(call([3, 0, 70], activations=True, padding=2))
    with torch.device("meta"):
        o, state = chunk_gated_delta_rule(**x, output_final_state=True)
        (o.sum() + state.sum()).backward()
        with torch.no_grad():
            assert fused_recurrent_gated_delta_rule(**x)[0].is_cpu
    assert all(x[name].grad.is_cpu for name in DIFFERENTIABLE)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_results_may_be_written_to(state_v_first):
    """As torch allows for what is no view."""
    x = leaves(call(dtype=torch.float32, state_v_first=state_v_first))
    results = chunk_gated_delta_rule(**x, output_final_state=True)
    want = gradients(results, x)
    written = chunk_gated_delta_rule(**x, output_final_state=True)
    written = tuple(y.add_(1).sub_(1) for y in written)
    got = gradients(written, x)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_autocast_changes_nothing():
    x = leaves(call(dtype=torch.float32, activations=True))
    want = chunk_gated_delta_rule(**x, output_final_state=True)
    want_grads = gradients(want, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = leaves(x)
        got = chunk_gated_delta_rule(**y, output_final_state=True)
        got_grads = gradients(got, y)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(got_grads[n], want_grads[n]) for n in want_grads)


def test_a_state_that_needs_no_gradient_gets_none(monkeypatch):
    """dh0 is as large as all states together."""
    made = []

    def backward(*given: Any) -> Any:
        made.append(gdn_bwd(*given).dh0)
        return gdn_bwd(*given)

    gdn_bwd = ops.gdn_bwd
    monkeypatch.setattr(ops, "gdn_bwd", backward)
    x = leaves(call())
    want = gradients(chunk_gated_delta_rule(**x, output_final_state=True), x)
    x["initial_state"].requires_grad_(False)
    got = gradients(chunk_gated_delta_rule(**x, output_final_state=True), x)
    assert [dh0 is None for dh0 in made] == [False, True]
    assert want.keys() - got.keys() == {"initial_state"}
    assert all(torch.equal(got[n], want[n]) for n in got)
