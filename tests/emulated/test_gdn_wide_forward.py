"""The forward at K = 256, emulated; the cases of its kernels are in test_cases.py."""

import pytest
import torch

from qla_kernels.lab.selftest.gdn_calls import small
from qla_kernels.lab.selftest.gdn_forward import check, forward
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.lab.selftest.gdn_wide_forward import whole_forward

pytestmark = pytest.mark.usefixtures("seeds", "poison")

SIZES = (256, 128)


@pytest.mark.parametrize("seed", range(1, 6))
def test_interleavings(seed, seeds):
    seeds["seed"] = seed
    x = small([70, 1, 200], sizes=SIZES)
    done = forward(x)
    check(x, done.o, done.final_state)


@pytest.mark.parametrize("gate", ["none", "strong", "total"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_gates_and_keys_at_the_edge(gate, key):
    x = small([130, 65], sizes=SIZES)
    x["g"][0, :195] = gates(gate, 195, 2)
    x["k"][0, :195] = keys(key, 195, 1, 256).to(x["k"].dtype)
    done = forward(x)
    check(x, done.o, done.final_state)


def test_both_widths_compute_the_same_bits():
    x = small([100, 64, 3], sizes=SIZES, heads=(2, 2))
    done = [whole_forward(x, width) for width in (64, 128)]
    assert torch.equal(done[0].o, done[1].o)
    assert torch.equal(done[0].final_state, done[1].final_state)


def test_a_beta_of_16_bits_and_a_state_with_V_first():
    x = small([100, 64], sizes=SIZES)
    x["beta"] = x["beta"].bfloat16()
    want = forward(x, beta=x["beta"].float())
    turned = x["initial_state"].mT.contiguous()
    done = forward(x, state_v_first=True, initial_state=turned)
    assert torch.equal(done.o, want.o)
    assert torch.equal(done.final_state.mT, want.final_state)


def test_neighbours_of_a_sequence_do_not_matter():
    x = small([70, 100, 33], sizes=SIZES)
    want = forward(x)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 70:170] = torch.nan
    got = forward(x)
    for part in (slice(0, 70), slice(170, None)):
        assert torch.equal(got.o[:, part], want.o[:, part])
    assert torch.equal(got.final_state[[0, 2]], want.final_state[[0, 2]])


def test_a_dense_batch_with_strides_of_a_fused_projection():
    x = small(batch=2, tokens=70, sizes=SIZES)
    want = forward(x)
    check(x, want.o, want.final_state)
    room = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    parts = room.split([x[name].flatten(2).shape[-1] for name in ("q", "k", "v")], dim=-1)
    views = {
        name: part.unflatten(2, x[name].shape[2:])
        for name, part in zip(("q", "k", "v"), parts, strict=True)
    }
    got = forward(x | views)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state)
