"""The CUDA form of fused_recurrent_gated_delta_rule, emulated: the launch on CPU tensors."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported, fused_recurrent_gated_delta_rule
from qla_kernels.lab.selftest.gdn_recurrent import ROUNDING, check, check_pool, decode, pooled
from qla_kernels.runtime import jit
from tests import gdn_kept_tokens
from tests.emulated.conftest import emulated

WITHOUT = {"initial_state": None}


@pytest.fixture(autouse=True)
def launches(monkeypatch, poison, by_kernels):
    """The public function launches emulated kernels, each with another seed than the one before."""
    done = SimpleNamespace(variants=[], seed=0)

    def compile(module: Any, variant: Any) -> Any:
        done.variants.append(variant)
        done.seed += 1
        return functools.partial(emulated(module, variant), seed=done.seed)

    monkeypatch.setattr(jit, "compile", compile)
    return done


def run(x, **changed):
    return fused_recurrent_gated_delta_rule(**{**x, **changed}, output_final_state=True)


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, launches):
    """Many tokens: a warp that runs ahead would overwrite what others still read."""
    launches.seed = seed
    x = decode([40, 1, 0, 23], heads=(1, 3), sizes=(64, 128))
    check(x, *run(x))


@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("others", [{}, {"allow_neg_eigval": True}], ids=str)
def test_activations(gates, others):
    """Gates of any dtype; half a one is read in place where it is q's."""
    x = decode([3, 1, 6], gates=gates, activations=True, **others)
    check(x, *run(x))
    check(x | {"dt_bias": None}, *run(x, dt_bias=None))


def test_gates_in_two_dtypes_that_are_slices_of_one_projection():
    x = decode([2, 1], heads=(2, 4), activations=True)
    both = torch.stack([x["g"], x["beta"]], -1).bfloat16()
    x |= {"g": both[..., 0], "beta": both[..., 1]}
    check(x, *run(x))


def test_a_beta_for_each_column():
    for lengths in (None, [1, 3]):
        x = decode(lengths)
        x["beta"] = torch.rand(x["v"].shape)
        check(x, *run(x))
        x["beta"] = torch.rand(x["v"].shape, dtype=torch.bfloat16).mT.contiguous().mT
        check(x, *run(x))


@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (3, 9)])
def test_groups_of_value_heads(heads):
    x = decode([1, 0, 2], heads=heads, sizes=(64, 64))
    check(x, *run(x))


def test_no_gate_and_no_beta():
    x = decode([1, 2])
    o, state = run(x, g=None, beta=None)
    check(x | {"g": torch.zeros_like(x["g"]), "beta": torch.ones_like(x["g"])}, o, state)


@pytest.mark.parametrize("gate", [-torch.inf, -70.0, 0.0, 0.02])
def test_gates_at_the_edge(gate):
    x = decode([1, 5])
    x["g"][0, :6] = gate
    check(x, *run(x))


def test_scale_zero_and_one():
    x = decode([1, 5])
    assert not run(x, scale=0.0)[0].any()
    check(x | {"scale": 1.0}, *run(x, scale=1.0))


def test_indices_and_bounds_of_either_width():
    x = pooled(decode([1, 3, 0, 1]), [3, -1, 2, 0], 4)
    results = []
    for dtype in (torch.int32, torch.int64):
        y = {**x, "initial_state": x["initial_state"].clone()}
        y |= {"cu_seqlens": x["cu_seqlens"].to(dtype)}
        y |= {"state_indices": torch.stack([x["state_indices"]] * 2, -1)[:, 0].to(dtype)}
        results.append(run(y))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("null_slot", [-1, 0])
def test_slot_0_may_mark_padding(null_slot):
    x = {**pooled(decode([1, 3, 2]), [2, 0, -1], 3), "null_slot": null_slot}
    before = x["initial_state"].clone()
    check_pool(x, before, run(x)[0])


def test_strides():
    """Slices of one projection; heads first in memory; a pool between other data."""
    x = decode(None, batch=2, tokens=3, heads=(2, 4), sizes=(64, 64))
    fused = torch.cat([x["q"], x["k"], x["v"]], 2)
    q, k, v = fused.split([2, 2, 4], 2)
    check(x, *run(x, q=q, k=k, v=v))
    turned = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g")}
    check(x, *run(x | turned))
    x = pooled(x, [1, 0], 3)
    room = torch.full((3, 4, 64 * 64 + 8), torch.nan)
    pool = room[..., : 64 * 64].unflatten(-1, (64, 64)).copy_(x["initial_state"])
    x["initial_state"] = pool
    before = pool.clone()
    check_pool(x, before, run(x)[0])
    assert room[..., 64 * 64 :].isnan().all()


@pytest.mark.parametrize("v_first", [False, True])
def test_other_initial_states_are_copied(v_first):
    x = decode([1, 2], state_v_first=v_first)
    state = x["initial_state"]
    for other in (state.mT.contiguous().mT, state.bfloat16(), state.double()):
        before = other.clone()
        check(x | {"initial_state": other}, *run(x, initial_state=other))
        assert torch.equal(other, before)
    shifted = torch.empty(state.numel() + 1)[1:].view_as(state).copy_(state)
    check(x, *run(x, initial_state=shifted))


def test_a_pool_that_begins_anywhere_is_refused():
    x = pooled(decode([1, 2]), [0, 1], 2)
    pool = x["initial_state"]
    x["initial_state"] = torch.empty(pool.numel() + 1)[1:].view_as(pool).copy_(pool)
    with pytest.raises(Unsupported, match="begins 4 bytes past a multiple of 4 numbers"):
        run(x)


@pytest.mark.parametrize("shape", [{"tokens": 0}, {"batch": 0}, {"lengths": []}])
def test_nothing_to_do(shape, launches):
    x = decode(**shape)
    o, state = run(x)
    assert not o.any()
    assert torch.equal(state, x["initial_state"])
    assert not run(x | WITHOUT)[1].any()
    assert not launches.variants


def test_only_padding():
    x = decode([0, 0])
    o, state = run(x)
    assert not o.any()
    assert torch.equal(state, x["initial_state"])


def test_results_that_nobody_asked_for():
    x = decode([1, 3])
    o, state = fused_recurrent_gated_delta_rule(**x)
    assert state is None
    check(x, o, None)
    check(x | WITHOUT, fused_recurrent_gated_delta_rule(**x | WITHOUT)[0], None)


def test_kept_tokens_and_an_anchor():
    gdn_kept_tokens.check(torch.bfloat16, (64, 64), ROUNDING[torch.bfloat16])


def test_a_call_is_one_launch(launches):
    run(decode([1, 3], gates=torch.bfloat16, activations=True))
    assert len(launches.variants) == 1
