"""A step of decoding, emulated: interleavings, layouts of the pool, rows far apart."""

import pytest
import torch

from qla_kernels import Unsupported, causal_conv1d_update, decode_gated_delta_net
from qla_kernels.gdn.launch import tensors
from qla_kernels.lab.selftest import gdn_step
from reference import conv
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("seeds", "poison", "by_kernels")

ROUNDING = 2.0**-8


def step(slots, **others):
    given = {"sizes": (64, 64), "state": torch.bfloat16, **others}
    return gdn_step.step(slots, **given)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.kernels("gdn.recurrent_norm", "conv.update")
def test_interleavings(seed, seeds):
    """The gate's warp and the token's run ahead or behind; sums of squares come in any order."""
    seeds["seed"] = seed
    gdn_step.run(gdn_step.convolved(step([3, -1, 0, 7], heads=(1, 3))))


@pytest.mark.parametrize("heads", [(1, 1), (2, 8), (3, 9)])
def test_groups_of_value_heads(heads):
    gdn_step.run(step([1, 0], heads=heads, scale=0.5))


def test_a_step_alone_and_after_its_convolution_have_the_same_bits():
    """States are asked for before the wait for the kernel before, or behind it."""
    x = gdn_step.convolved(step([2, 5]))
    y = {**x, **{n: x[n].clone() for n in ("initial_state", "conv_state")}}
    weight, bias, activation = (y[n] for n in gdn_step.CONVOLUTION[1:])
    rows = causal_conv1d_update(
        y["mixed_qkv"], y["conv_state"], weight, bias, activation, y["state_indices"]
    )
    rule = {n: t for n, t in y.items() if n not in gdn_step.CONVOLUTION}
    want = gdn_step.packed_decode_gated_delta_rule(**{**rule, "mixed_qkv": rows})
    assert torch.equal(decode_gated_delta_net(**x), want)
    assert torch.equal(x["initial_state"], y["initial_state"])


def test_rows_that_are_too_far_apart_for_one_launch(monkeypatch):
    x = step([3, 0, 8])
    y = {**x, "initial_state": x["initial_state"].clone()}
    together = gdn_step.packed_decode_gated_delta_rule(**x)
    monkeypatch.setattr(tensors, "REACH", 1)
    assert torch.equal(gdn_step.packed_decode_gated_delta_rule(**y), together)
    assert torch.equal(x["initial_state"], y["initial_state"])


def test_a_pool_that_begins_anywhere_is_refused():
    x = step([1, 0])
    pool = x["initial_state"]
    x["initial_state"] = torch.empty(pool.numel() + 1, dtype=pool.dtype)[1:].view_as(pool)
    with pytest.raises(Unsupported, match="begins 2 bytes past a multiple of 4 numbers"):
        gdn_step.packed_decode_gated_delta_rule(**x)


def test_gates_in_fp32_and_a_norm_in_bf16():
    x = step([3, 0], gates=torch.float32, norm_eps=0.1)
    gdn_step.run({**x, "norm_weight": x["norm_weight"].bfloat16()})


POOLS = {
    "tokens": lambda C: torch.randn(4, 3, C).bfloat16().mT,
    "channels": lambda C: torch.randn(4, C, 3).bfloat16(),
    "more places": lambda C: torch.randn(4, C, 7).bfloat16(),
    "odd rows": lambda C: torch.randn(4, 3, C + 1).bfloat16()[..., 1:].mT,
    "odd slots": lambda C: torch.randn(4, 3 * C + 3).bfloat16()[:, 3:].unflatten(1, (3, C)).mT,
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.kernels("conv.update")
def test_pools_of_any_strides(name, weights):
    C = 24
    pool, x = POOLS[name](C), torch.randn(3, C + 8).bfloat16()[:, :C]
    weight, bias = torch.randn(C, 4).to(weights), torch.randn(2 * C).to(weights)[1 : C + 1]
    before, slots = pool.clone(), torch.tensor([3, 0, 1])
    exact = (t.double() for t in (x, before[slots][..., :3], weight, bias))
    want, after = conv.update(*exact, False)
    y = causal_conv1d_update(x, pool, weight, bias, None, slots)
    assert_close("y", y, want, ROUNDING)
    before[slots, :, :3] = after.bfloat16()
    assert torch.equal(pool, before)


def test_results_in_the_projection():
    x, weight, pool = torch.randn(2, 24).bfloat16(), torch.randn(24, 4), torch.randn(2, 24, 3)
    pool, rows = pool.bfloat16(), x.clone()
    want = causal_conv1d_update(x, pool.clone(), weight)
    assert causal_conv1d_update(rows, pool, weight, out=rows) is rows
    assert torch.equal(rows, want)
