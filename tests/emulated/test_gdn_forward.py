"""The whole CUDA forward, emulated: launch.gdn_fwd on CPU tensors, kernel by kernel."""

import pytest
import torch

from qla_kernels.gdn import plan
from qla_kernels.gdn.launch import activations
from qla_kernels.gdn.times import STEP, ForwardChoice
from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_forward import check, forward
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.runtime import jit

pytestmark = pytest.mark.usefixtures("seeds")

WITHOUT = {"initial_state": None}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total", "positive"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_and_keys_at_the_edge(gate, key, dtype):
    x = small([130, 65], dtype)
    g = gates("none", 195, 2) + 0.05 if gate == "positive" else gates(gate, 195, 2)
    x["g"][0, :195] = g
    x["k"][0, :195] = keys(key, 195, 1, 128).to(dtype)
    done = forward(x)
    check(x, done.o, done.final_state)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Five value heads of three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = small([70, 1, 200], heads=(1, 5))
    done = forward(x)
    check(x, done.o, done.final_state)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("kernel", STEP, ids=str)
def test_ctas_that_walk_from_item_to_item(kernel, monkeypatch):
    """Rings, tails and turns go on where the item before has left them."""
    x = small([70, 0, 1, 200, 128], heads=(1, 3))
    monkeypatch.setattr(plan, "forward", lambda *_: plan.Plan(kernel))
    want = forward(x, is_train=True)
    monkeypatch.setattr(plan, "ctas", lambda items, *_: 4)
    done = forward(x, is_train=True)
    check(x, done.o, done.final_state)
    for name in ("o", "final_state", "g_cum", "A"):
        tokens = 399 if name in ("g_cum", "A") else None  # what is past them is nobody's
        assert torch.equal(getattr(done, name)[:, :tokens], getattr(want, name)[:, :tokens]), name


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("most", [None, 1])
def test_a_beta_of_16_bits_is_read_as_it_is(most, monkeypatch):
    solving = plan.Plan(ForwardChoice(64, True), most)
    monkeypatch.setattr(plan, "forward", lambda *_: solving)
    x = small([100, 64])
    x["beta"] = x["beta"].bfloat16()
    want = forward(x, beta=x["beta"].float())
    monkeypatch.delattr(activations, "_fp32")  # where what is cast or activated goes
    done = forward(x)
    assert torch.equal(done.o, want.o)
    assert torch.equal(done.final_state, want.final_state)


@pytest.mark.usefixtures("poison")
def test_activations_as_a_model_uses_them():
    x = small([33, 0, 100], heads=(2, 4), activations=True, allow_neg_eigval=True)
    done = forward(x)
    check(x, done.o, done.final_state)


@pytest.mark.usefixtures("poison")
def test_low_precision_gates_and_states():
    x = small([70])
    for name in ("g", "beta", "initial_state"):
        x[name] = x[name].bfloat16()
    check(x, *forward(x)[:2])


@pytest.mark.usefixtures("poison")
def test_state_v_first_is_the_same_bits():
    x = small([100, 3])
    want = forward(x)
    got = forward(x, state_v_first=True, initial_state=x["initial_state"].mT.contiguous())
    assert torch.equal(got.o, want.o)
    assert got.final_state.is_contiguous()
    assert torch.equal(got.final_state.mT, want.final_state)


@pytest.mark.usefixtures("poison")
def test_neighbours_of_a_sequence_do_not_matter():
    x = small([70, 100, 33])
    want = forward(x)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 70:170] = torch.nan
    got = forward(x)
    for part in (slice(0, 70), slice(170, None)):
        assert torch.equal(got.o[:, part], want.o[:, part])
    assert torch.equal(got.final_state[[0, 2]], want.final_state[[0, 2]])


@pytest.mark.usefixtures("poison")
def test_a_batch_is_its_rows_and_its_packing():
    x = small(batch=3, tokens=70)
    want = forward(x)
    check(x, want.o, want.final_state)
    packed = {
        name: value.flatten(0, 1)[None] if name != "initial_state" else value
        for name, value in x.items()
    }
    packed["cu_seqlens"] = torch.tensor([0, 70, 140, 210])
    got = forward(packed)
    assert torch.equal(got.o.view_as(want.o), want.o)
    assert torch.equal(got.final_state, want.final_state)
    for b in range(3):
        row = forward({name: value[b : b + 1] for name, value in x.items()})
        assert torch.equal(row.o[0], want.o[b])
        assert torch.equal(row.final_state[0], want.final_state[b])


@pytest.mark.usefixtures("poison")
def test_strides_are_read_in_place():
    x = small(batch=2, tokens=70, heads=(2, 2))
    want = forward(x, is_train=True)
    fused = torch.cat([x["q"], x["k"], x["v"]], 2)  # slices of one projection
    slices = dict(zip("qkv", fused.split(2, 2), strict=True))
    head_major = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    gates_last = {n: x[n].mT.contiguous().mT for n in ("g", "beta")}
    for changed in (slices, head_major, gates_last):
        got = forward(x, **changed, is_train=True)
        for name in ("o", "final_state", "g_cum", "A"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.usefixtures("poison")
def test_one_token_of_one_head_may_have_any_stride():
    x = small(batch=1, tokens=1, heads=(1, 1))
    want = forward(x)
    odd = {n: x[n].as_strided((1, 1, 1, 128), (3, 5, 7, 1)) for n in "qkv"}
    assert torch.equal(forward(x, **odd).o, want.o)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"tokens": 0}, {"lengths": [], "padding": 5}])
def test_nothing_to_do(shape, monkeypatch):
    monkeypatch.setattr(jit, "compile", None)  # no kernel runs
    x = small(**shape)
    done = forward(x)
    assert done.o.shape == x["v"].shape
    assert not done.o.any()
    assert torch.equal(done.final_state, x["initial_state"])
    assert not forward(x, **WITHOUT).final_state.any()
