"""Arguments that are no tensors: numbers and flags of wrong types are refused by name."""

import numpy as np
import pytest
import torch

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
)
from qla_kernels.gdn.launch.tensors import num_live_tokens
from tests.gdn_calls import call

RUNS = {
    run.__name__: run
    for run in (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
        chunk_gated_delta_rule_fwd,
    )
}
SHARED = (
    "output_final_state", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
    "use_gate_in_kernel",
)  # fmt: skip
FLAGS = {
    "chunk_gated_delta_rule": (
        "use_qk_l2norm_in_kernel", "exact", "batch_invariant", "enable_fwd_cp_cache"
    ),
    "fused_recurrent_gated_delta_rule": ("use_qk_l2norm_in_kernel",),
    "chunk_gated_delta_rule_fwd": (
        "output_h", "auto_cp", "enable_fwd_cp_cache", "is_train", "exact"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scale", ["0.5", [0.5], torch.ones(2), torch.tensor(1j), 1j], ids=repr)
def test_a_scale_that_is_no_number(name, scale):
    with pytest.raises(ValueError, match=rf"{name}: scale .*need a number; pass float\(scale\)"):
        RUNS[name](**call(), scale=scale)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scale", [1, np.float32(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_of_all_kinds(name, scale):
    x = call()
    got, want = RUNS[name](**x, scale=scale), RUNS[name](**x, scale=float(scale))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None)


def test_a_scale_that_would_be_learned():
    """Its gradient had been None."""
    x, scale = call(), torch.tensor(0.5, requires_grad=True)
    for run in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        with pytest.raises(
            ValueError,
            match=r"scale is a float32 tensor .* that requires a gradient; need a number",
        ):
            run(**x, scale=scale)
        with torch.no_grad():
            assert torch.equal(run(**x, scale=scale)[0], run(**x, scale=0.5)[0])


@pytest.mark.parametrize(("name", "flag"), [(n, f) for n in RUNS for f in (*SHARED, *FLAGS[n])])
@pytest.mark.parametrize("wrong", ["False", [], torch.ones(1), 2], ids=repr)
def test_flags_of_other_types(name, flag, wrong):
    with pytest.raises(ValueError, match=f"{name}: {flag} is .*; need True or False; pass bool"):
        RUNS[name](**call(), **{flag: wrong})


@pytest.mark.parametrize("name", RUNS)
def test_flags_as_callers_have_them(name):
    x = call()
    for yes in (1, np.bool_(True)):
        assert any(r is not None for r in RUNS[name](**x, output_final_state=yes)[1:])
    assert RUNS[name](**x, output_final_state=None)[-1] is None


@pytest.mark.parametrize("bound", ["-12", [-12.0], torch.ones(2)], ids=repr)
def test_a_bound_that_is_no_number(bound):
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd"):
        with pytest.raises(ValueError, match=r"warm_log_bound is .*need a number"):
            RUNS[name](**call(), warm_log_bound=bound)


def caches():
    """Of a call of 2 sequences of 70 tokens, HV=4, K=16, V=8; of others; and made up."""
    x = {n: t for n, t in call(heads=(2, 2)).items() if n != "initial_state"}
    other = chunk_gated_delta_rule_fwd(**x, enable_fwd_cp_cache=True)[-1]
    rows, slots = 5, 4  # 140 tokens can be cut twice
    shapes = (rows,), (rows,), (rows,), (3,), (4,), (slots, 4, 8, 16), (slots, 4, 2, 16, 16)
    fitting = [torch.zeros(shape) for shape in (*shapes, (slots, 4))]
    yield "other heads", other
    yield "too few", fitting[:-1]
    yield "no tensors", [None] * 8
    yield "other sequences", [*fitting[:3], torch.zeros(4), *fitting[4:]]
    yield "other states", [*fitting[:5], fitting[5].mT, *fitting[6:]]
    many = [torch.zeros(n) for n in (9, 9, 9, 3, 4)]
    yield "other tokens", [*many, *(torch.zeros(8, *t.shape[1:]) for t in fitting[5:])]


@pytest.mark.parametrize(
    ("kind", "cache"), list(caches()), ids=lambda x: x if type(x) is str else ""
)
def test_a_cache_of_another_batch(kind, cache):
    """CPU tensors need none, and had taken any; on a GPU kernels would have followed it."""
    x = {n: t for n, t in call().items() if n != "initial_state"}
    g_cum, A, o, _, _, mine = chunk_gated_delta_rule_fwd(**x, enable_fwd_cp_cache=True)
    saved = (x["q"], x["k"], x["v"], g_cum, x["beta"], A, torch.ones_like(o))
    for fits in (mine, None, ()):
        chunk_gated_delta_rule_bwd(*saved, cp_cache=fits)
    with pytest.raises(ValueError, match=r"chunk_gated_delta_rule_bwd: cp_cache.* need "):
        chunk_gated_delta_rule_bwd(*saved, cp_cache=cache)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_where_sequences_end_by_bounds_of_any_strides(dtype):
    """A GPU's backward had died of a column or a slice of int64 bounds, which its forward took."""
    packed = torch.tensor([0, 7, 64], dtype=dtype)
    spans = torch.stack([packed, packed * 0 + 3], 1)
    for bounds in (packed, spans[:, 0], spans.view(-1)[::2]):
        assert num_live_tokens(bounds, spans).tolist() == [64]
        assert num_live_tokens(bounds, spans).dtype == torch.int32
