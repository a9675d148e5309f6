"""What a caller may say about segments, and that it reaches the operators of both directions."""

import math

import pytest
import torch

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from qla_kernels.gdn import ops
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from tests.gdn_calls import call, gradients, leaves

BOUNDS = {
    "default": ({}, WARM_LOG_BOUND),
    "exact": ({"exact": True}, EXACT_LOG_BOUND),
    "not exact": ({"exact": False}, WARM_LOG_BOUND),
    "bound": ({"warm_log_bound": -20}, -20.0),
    "none": ({"warm_log_bound": -math.inf}, -math.inf),
}
WRONG = {
    "both": ({"exact": True, "warm_log_bound": -5.0}, "exact and warm_log_bound; need exact=True"),
    "zero": ({"warm_log_bound": 0.0}, "warm_log_bound is 0.0; need less than 0"),
    "positive": ({"warm_log_bound": 6e-6}, "warm_log_bound is 6e-06; need less than 0"),
    "nan": ({"warm_log_bound": math.nan}, "warm_log_bound is nan; need less than 0"),
}


@pytest.fixture
def heard(monkeypatch):
    """Arguments of the operators by name, as they are called."""
    found = {}

    def listen(name):
        run = getattr(ops, name).on_cpu

        def listening(*given):
            found[name] = {key: x for record in given for key, x in record._asdict().items()}
            return run(*given)

        monkeypatch.setattr(getattr(ops, name), "on_cpu", listening)

    listen("gdn_fwd")
    listen("gdn_bwd")
    return found


def packed():
    x = leaves(call([70, 3]))
    return {**x, "cu_seqlens_cpu": x["cu_seqlens"].clone()}


@pytest.mark.parametrize("given", BOUNDS)
def test_the_public_function_passes_a_bound_on(given, heard):
    options, bound = BOUNDS[given]
    x = packed()
    gradients(chunk_gated_delta_rule(**x, **options), x)
    for name in ("gdn_fwd", "gdn_bwd"):
        assert heard[name]["warm_log_bound"] == bound
        assert torch.equal(heard[name]["cu_seqlens_cpu"], x["cu_seqlens_cpu"])


@pytest.mark.parametrize("given", BOUNDS)
def test_so_do_both_directions_alone(given, heard):
    options, bound = BOUNDS[given]
    x = packed()
    rows, options = [x[n] for n in ("q", "k", "v", "g", "beta")], {**options}
    options |= {n: x[n] for n in ("cu_seqlens", "cu_seqlens_cpu")}
    g_cum, A, o, *_ = chunk_gated_delta_rule_fwd(*rows, **options)
    rows[3] = g_cum
    chunk_gated_delta_rule_bwd(*rows, A, torch.ones_like(o), **options)
    for name in ("gdn_fwd", "gdn_bwd"):
        assert heard[name]["warm_log_bound"] == bound
        assert torch.equal(heard[name]["cu_seqlens_cpu"], x["cu_seqlens_cpu"])


@pytest.mark.parametrize("given", WRONG)
def test_bounds_that_are_none(given):
    options, text = WRONG[given]
    x = call()
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    for run in (
        lambda: chunk_gated_delta_rule(**x, **options),
        lambda: chunk_gated_delta_rule_fwd(*rows, **options),
        lambda: chunk_gated_delta_rule_bwd(*rows, x["v"], x["v"], **options),
    ):
        with pytest.raises(ValueError, match=text):
            run()


def test_a_cache_goes_from_forward_to_backward(heard):
    """On a CPU nothing is cut, and it is empty."""
    x = leaves(call())
    gradients(chunk_gated_delta_rule(**x), x)
    assert heard["gdn_bwd"]["cp_cache"] == []
    gradients(chunk_gated_delta_rule(**x, enable_fwd_cp_cache=True), x)
    assert heard["gdn_fwd"]["enable_fwd_cp_cache"]
    assert [t.numel() for t in heard["gdn_bwd"]["cp_cache"]] == [0] * 8
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    g_cum, A, o, *_, cache = chunk_gated_delta_rule_fwd(*rows, enable_fwd_cp_cache=True)
    rows[3] = g_cum
    chunk_gated_delta_rule_bwd(*rows, A, torch.ones_like(o), cp_cache=cache)
    assert len(heard["gdn_bwd"]["cp_cache"]) == len(cache) == 8
    with torch.no_grad():
        chunk_gated_delta_rule(**x, enable_fwd_cp_cache=True)
    assert not heard["gdn_fwd"]["enable_fwd_cp_cache"], "there will be no backward"


@pytest.fixture
def dynamo():
    """Graphs of other tests do not count towards the most there may be of a function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("options", [{"exact": True}, {"enable_fwd_cp_cache": True}], ids=str)
def test_compiles_to_one_graph(options):
    x = call(lengths=[65, 3])
    eager, traced = leaves(x), leaves(x)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    got, want = compiled(**traced, **options), chunk_gated_delta_rule(**eager)
    assert torch.equal(got[0], want[0])
    found, wanted = gradients(got, traced), gradients(want, eager)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
