"""Malformed calls: one row of the contract each, in the words that the caller reads."""

import re
from typing import Any

import pytest
import torch

from qla_kernels import (
    Unsupported,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from tests.gdn_calls import call


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def exactly(text: str) -> str:
    return f"^{re.escape('chunk_gated_delta_rule: ' + text)}$"


NO_STATE = {"initial_state": None}

# The base call is call(): B 2, T 70, H 2, HV 4, K 16, V 8, fp64.
MALFORMED = {
    "rank": (
        {"q": zeros(70, 2, 16)},
        "q has shape (70, 2, 16); need [B, T, H, K]; reshape or expand q",
    ),
    "q and k heads": (
        {"k": zeros(2, 70, 4, 16)},
        "k has shape (2, 70, 4, 16); need [B, T, H, K] = (2, 70, 2, 16); "
        "reshape k, or repeat or group its heads",
    ),
    "groups": (
        {"v": zeros(2, 70, 3, 8), "g": zeros(2, 70, 3), "beta": zeros(2, 70, 3), **NO_STATE},
        "HV=3 and H=2; need HV to be a multiple of H; "
        "give q and k a number of heads that divides HV",
    ),
    "no heads": (
        {"q": zeros(2, 70, 0, 16), "k": zeros(2, 70, 0, 16)},
        "q has shape (2, 70, 0, 16); need [B, T, H, K] with H at least 1; reshape or expand q",
    ),
    "no head size": (
        {"v": zeros(2, 70, 4, 0)},
        "v has shape (2, 70, 4, 0); "
        "need [B, T, HV, V] with B=2, T=70, V at least 1; reshape or expand v",
    ),
    "k": (
        {"k": zeros(2, 70, 2, 8)},
        "k has shape (2, 70, 2, 8); need [B, T, H, K] = (2, 70, 2, 16); "
        "reshape k, or repeat or group its heads",
    ),
    "v": (
        {"v": zeros(2, 71, 4, 8)},
        "v has shape (2, 71, 4, 8); need [B, T, HV, V] = (2, 70, 4, 8); reshape or expand v",
    ),
    "g": (
        {"g": zeros(2, 70, 2)},
        "g has shape (2, 70, 2); need [B, T, HV] = (2, 70, 4); reshape or expand g",
    ),
    "beta dtype": (
        {"beta": zeros(2, 70, 4, dtype=torch.int64)},
        "beta is int64; need bfloat16, float16, float32 or float64; cast it",
    ),
    "gate dtype": (
        {"g": zeros(2, 70, 4).to(torch.float8_e5m2)},
        "g is float8_e5m2; need bfloat16, float16, float32 or float64; cast it",
    ),
    "no gate": ({"g": None}, "g is of type NoneType; need a tensor; pass g as one"),
    "no tensor": (
        {"q": [0.0]},
        "q is of type list; need a tensor; pass q as one",
    ),
    "state": (
        {"initial_state": zeros(2, 4, 8, 16)},
        "initial_state has shape (2, 4, 8, 16); need [B, HV, K, V] = (2, 4, 16, 8); "
        "reshape it, or pass cu_seqlens if q is packed",
    ),
    "states of a packed batch without its bounds": (
        {"initial_state": zeros(3, 4, 16, 8)},
        "initial_state has shape (3, 4, 16, 8); need [B, HV, K, V] = (2, 4, 16, 8); "
        "reshape it, or pass cu_seqlens if q is packed",
    ),
    "state_v_first": (
        {"state_v_first": True},
        "initial_state has shape (2, 4, 16, 8); need [B, HV, V, K] = (2, 4, 8, 16); "
        "reshape it, or pass cu_seqlens if q is packed",
    ),
    "packed batch": (
        {"cu_seqlens": torch.tensor([0, 70])},
        "q has shape (2, 70, 2, 16); need [1, T, H, K] = (1, 70, 2, 16); "
        "flatten the batch to [1, B * T, ...], as cu_seqlens counts tokens",
    ),
    "device": (
        {"beta": torch.empty(2, 70, 4, device="meta")},
        "beta is on meta; need cpu, as q; pass beta.to(q.device)",
    ),
    "cu_seqlens_cpu alone": (
        {"cu_seqlens_cpu": torch.tensor([0, 70])},
        "cu_seqlens_cpu alone; need cu_seqlens on q's device; pass both",
    ),
    "negative eigenvalues": (
        {"allow_neg_eigval": True},
        "allow_neg_eigval without use_beta_sigmoid_in_kernel; need both: it doubles the sigmoid; "
        "pass use_beta_sigmoid_in_kernel=True, or beta in [0, 2] and neither flag",
    ),
    "gate": (
        {"use_gate_in_kernel": True},
        "use_gate_in_kernel without A_log; need A_log; "
        "pass A_log of shape [HV], or activated gates and no flag",
    ),
    "dt_bias": (
        {"use_gate_in_kernel": True, "A_log": zeros(4), "dt_bias": zeros(2)},
        "dt_bias has shape (2,); need [HV] = (4,); reshape or expand dt_bias",
    ),
    "chunk_size": (
        {"chunk_size": 128},
        "chunk_size is 128; need 16, 32 or 64; leave it out",
    ),
    "cp_context where FLA 0.5.2 has it": (
        {"chunk_indices": object()},
        "chunk_indices is of type object; need a tensor; pass chunk_indices as one",
    ),
    "both layouts": (
        {"state_v_first": True, "transpose_state_layout": True},
        "state_v_first and transpose_state_layout, its old name, are given; need one of them; "
        "drop transpose_state_layout",
    ),
}


@pytest.mark.parametrize("row", MALFORMED)
def test_a_malformed_call_is_a_value_error(row):
    change, text = MALFORMED[row]
    with pytest.raises(ValueError, match=exactly(text)) as error:
        chunk_gated_delta_rule(**{**call(), **change})
    assert not isinstance(error.value, Unsupported)


PACKED = {
    "dtype": (
        {"cu_seqlens": torch.tensor([0.0, 70.0])},
        "cu_seqlens is float32; need int32 or int64; cast it",
    ),
    "empty": (
        {"cu_seqlens": torch.tensor([], dtype=torch.int32)},
        "cu_seqlens has shape (0,); need [N + 1]; pass 0 and the end of each sequence",
    ),
    "states": (
        {"cu_seqlens": torch.tensor([0, 10, 70])},
        "initial_state has shape (1, 4, 16, 8); need [N, HV, K, V] = (2, 4, 16, 8); "
        "reshape or expand initial_state",
    ),
    "list": (
        {"cu_seqlens": [0, 70]},
        "cu_seqlens is of type list; need a tensor; pass cu_seqlens as one",
    ),
    "dtype on the CPU": (
        {"cu_seqlens_cpu": torch.tensor([0.0, 70.0])},
        "cu_seqlens_cpu is float32; need int32 or int64; cast it",
    ),
    "cu_seqlens_cpu": (
        {"cu_seqlens_cpu": torch.tensor([0, 10, 70])},
        "cu_seqlens_cpu has shape (3,); need [N + 1] = (2,); reshape or expand cu_seqlens_cpu",
    ),
}


@pytest.mark.parametrize("row", PACKED)
def test_malformed_packing_is_a_value_error(row):
    change, text = PACKED[row]
    with pytest.raises(ValueError, match=exactly(text)):
        chunk_gated_delta_rule(**{**call(lengths=[70]), **change})


def test_head_first_raises_the_deprecation():
    for value in (True, False):
        with pytest.raises(DeprecationWarning, match="head_first is gone; need"):
            chunk_gated_delta_rule(**call(), head_first=value)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unknown keyword use_qk_norm; need the names of FLA"):
        chunk_gated_delta_rule(**call(), use_qk_norm=True)


def test_the_old_name_of_state_v_first_warns_where_it_was_written_and_works():
    x = call(state_v_first=True)
    want = chunk_gated_delta_rule(**x, output_final_state=True)
    del x["state_v_first"]
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`") as caught:
        got = chunk_gated_delta_rule(**x, output_final_state=True, transpose_state_layout=True)
    assert caught[0].filename == __file__
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_low_level_checks_name_their_function():
    x = call()
    positional = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule_fwd: out has shape \(1,\)"):
        chunk_gated_delta_rule_fwd(*positional, out=torch.empty(1))
    g_cum, A, o, *_ = chunk_gated_delta_rule_fwd(*positional)
    q, k, v, _, beta = positional
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule_bwd: A has shape \(2, 70, 4\)"):
        chunk_gated_delta_rule_bwd(q, k, v, g_cum, beta, g_cum, o)
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule_bwd: dht has shape"):
        chunk_gated_delta_rule_bwd(q, k, v, g_cum, beta, A, o, o)
    for changed, text in (
        ({"g": g_cum.float()}, "g is float32; need float64; pass what the forward returned"),
        ({"A": A.half()}, "A is float16; need float64; pass what the forward returned"),
        ({"do": o.to("meta")}, r"do is on meta; need cpu, as v; pass do\.to\(v\.device\)"),
        ({"do": None}, "do is of type NoneType; need a tensor; pass do as one"),
    ):
        saved = {"g": g_cum, "A": A, "do": o, **changed}
        with pytest.raises(ValueError, match=f"^chunk_gated_delta_rule_bwd: {text}$"):
            chunk_gated_delta_rule_bwd(q, k, v, beta=beta, **saved)


NO_BOUNDS = "need to start at 0, never fall, and end at or before T=70; rebuild it from the lengths"
BOUNDS = [
    (
        {**call(lengths=[3, 67]), "cu_seqlens": torch.tensor([0, 70, 3])},
        f"cu_seqlens [0, 70, 3]; {NO_BOUNDS}",
    ),
    (
        {**call(lengths=[3, 67]), "cu_seqlens": torch.tensor([1, 3, 70])},
        f"cu_seqlens [1, 3, 70]; {NO_BOUNDS}",
    ),
    (
        {**call(lengths=[3, 67]), "cu_seqlens": torch.tensor([0, 3, 71])},
        f"cu_seqlens [0, 3, 71]; {NO_BOUNDS}",
    ),
    (
        {**call(lengths=[3, 67]), "cu_seqlens_cpu": torch.tensor([0, 4, 70])},
        "cu_seqlens_cpu [0, 4, 70] and cu_seqlens [0, 3, 70]; need equal values; "
        "copy one from the other",
    ),
]


@pytest.mark.parametrize(("x", "text"), BOUNDS)
def test_bounds_on_the_cpu_are_always_read(x, text):
    with pytest.raises(ValueError, match=exactly(text)):
        chunk_gated_delta_rule(**x)
    positional = [x[n] for n in ("q", "k", "v", "g", "beta")]
    bounds = {name: x[name] for name in ("cu_seqlens", "cu_seqlens_cpu") if name in x}
    _, A, o, *_ = chunk_gated_delta_rule_fwd(*positional)
    with pytest.raises(ValueError, match=exactly(text)):
        chunk_gated_delta_rule_bwd(*positional, A, o, **bounds)


# QLA_CHECK=1 reads what shapes cannot tell.


def broken(name: str, where: tuple[int, ...]) -> Any:
    x = call(lengths=[3, 67], padding=2)
    x[name][where] = torch.nan
    return x


def decays() -> Any:
    """Gates that were exponentiated before, with one token that forgets everything."""
    x = call(lengths=[3, 67], padding=2)
    x["g"] = torch.full_like(x["g"], 0.5)
    x["g"][0, 0, 0] = 0
    return x


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (broken("g", (0, 5, 1)), "g is NaN, first at token 5; need numbers; look at what made g"),
        (
            broken("beta", (0, 69, 0)),
            "beta is NaN, first at token 69; need numbers; look at what made beta",
        ),
        (
            decays(),
            "g is positive, first 0.5 at token 0; need at most 0, the natural log of a decay; "
            "pass g.log() if g holds the decays themselves",
        ),
        *BOUNDS,
    ],
)
def test_qla_check_reads_contents(monkeypatch, x, text):
    monkeypatch.setenv("QLA_CHECK", "1")
    with pytest.raises(ValueError, match=exactly(text)):
        chunk_gated_delta_rule(**x)


def test_qla_check_passes_a_good_call_with_nan_past_the_last_sequence(monkeypatch):
    monkeypatch.setenv("QLA_CHECK", "1")
    o, _ = chunk_gated_delta_rule(**call(lengths=[3, 67], padding=2))
    assert o.isfinite().all()


def test_qla_check_takes_any_input_of_a_gate(monkeypatch):
    monkeypatch.setenv("QLA_CHECK", "1")
    x = call(activations=True)
    assert (x["g"] > 0).any()
    o, _ = chunk_gated_delta_rule(**x)
    assert o.isfinite().all()
