"""A step of decoding on the CPU: the convolution of a token, the rule with its norm, and both."""

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from qla_kernels import (
    Unsupported,
    causal_conv1d,
    causal_conv1d_update,
    decode_gated_delta_net,
    fused_recurrent_gated_delta_rule,
    packed_decode_gated_delta_rule,
)
from qla_kernels.gdn.decode.ops import Norm
from qla_kernels.gdn.decode.packed import split
from qla_kernels.gdn.decode.validate import refused_norm
from qla_kernels.lab.selftest import gdn_step
from tests.compare import assert_close

EXACT = 1e-12
SIZES, HEADS = (16, 8), (2, 4)
NORM = ("z", "norm_weight", "norm_eps", "z_activation")
CONV = gdn_step.CONVOLUTION


def step(dtype: torch.dtype = torch.float64, slots: list[int] | None = None, **others: Any) -> Any:
    slots = [5, -1, 0, 3] if slots is None else slots
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return gdn_step.step(slots, dtype, SIZES, HEADS, state, num_slots=7, **others)


def copied(x: Any) -> Any:
    """The same call; its pools keep their strides."""
    pools = {n: x[n].clone() for n in ("initial_state", "conv_state") if n in x}
    return {**x, **pools}


def without(x: Any, *names: str) -> Any:
    return {n: t for n, t in x.items() if n not in names}


# The convolution of a token.


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("by_channels", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [None, (4, 5)])
def test_tokens_one_by_one_are_the_sequence(width, by_channels, bias, heads):
    C, T = 24, 9
    x, weight = torch.randn(3, T, C).double(), torch.randn(C, width).double()
    b = torch.randn(C).double() if bias else None
    want = causal_conv1d(x.mT, weight, b, "silu", qk_l2norm=heads).mT
    pool = torch.randn(5, C, width) if by_channels else torch.randn(5, width, C).mT
    pool = pool.double()
    slots = torch.tensor([4, 0, 2])
    pool[slots, :, : width - 1] = 0
    before = pool.clone()
    for t in range(T):
        y = causal_conv1d_update(x[:, t], pool, weight, b, "silu", slots, qk_l2norm=heads)
        assert_close("y", y, want[:, t], EXACT)
    for i in range(width - 1):
        assert torch.equal(pool[slots, :, i], x[:, T - width + 1 + i])
    assert torch.equal(pool[..., width - 1 :], before[..., width - 1 :])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])


def test_padding_and_results_in_place():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8, 4)
    pool = torch.randn(3, 8, 3).bfloat16()
    slots, first = torch.tensor([0, 2, 0, 1], dtype=torch.int32), pool.clone()
    y = causal_conv1d_update(x, pool, weight, None, None, slots, null_slot=0)
    assert not y[[0, 2]].any()
    assert y[[1, 3]].any(1).all()
    assert torch.equal(pool[0], first[0])
    again, rows = first.clone(), x.clone()
    options = {"null_slot": 0, "out": rows}
    assert causal_conv1d_update(rows, again, weight, None, None, slots, **options) is rows
    assert torch.equal(rows, y)
    assert torch.equal(again, pool)


def test_without_indices_sequence_n_has_slot_n():
    x, weight = torch.randn(2, 8), torch.randn(8, 3)
    pool = torch.randn(3, 8, 2)
    first = pool.clone()
    y = causal_conv1d_update(x, pool, weight)
    want = first[:2, :, 0] * weight[:, 0] + first[:2, :, 1] * weight[:, 1] + x * weight[:, 2]
    assert_close("y", y, want.double(), 1e-6)
    assert torch.equal(pool[2], first[2])


X, WEIGHT, POOL, SLOTS = torch.zeros(2, 8), torch.zeros(8, 4), torch.zeros(3, 8, 3), torch.zeros(2)
WRONG_CONV = {
    "channels": ((X, POOL[:, :4], WEIGHT), {}, "conv_state has shape (3, 4, 3); need [slots, ch"),
    "places": ((X, POOL[..., :2], WEIGHT), {}, "conv_state has shape (3, 8, 2); need [slots, ch"),
    "dtype": ((X, POOL.half(), WEIGHT), {}, "conv_state is float16; need float32, as x"),
    "tokens": ((X[None], POOL, torch.zeros(2, 4)), {}, "x has shape (1, 2, 8); need [N, channels]"),
    "slots": ((X, POOL, WEIGHT, None, None, SLOTS), {}, "conv_state_indices is float32; need int"),
    "no slots": ((X, POOL[:1], WEIGHT), {}, "2 sequences and 1 slots, without conv_state_indices"),
    "one slot for two": (
        (X, POOL, WEIGHT, None, None, SLOTS.int()), {},
        "conv_state_indices [0, 0], where 0 is there twice; need different ones, or negative",
    ),
    "low word": (
        (X, POOL, WEIGHT, None, None, SLOTS.long() - (1 << 32)), {},
        "conv_state_indices has -4294967296; need numbers that fit in int32; look at what made",
    ),
    "null slot": ((X, POOL, WEIGHT), {"null_slot": 1}, "null_slot is 1; need -1, or 0"),
    "heads": ((X, POOL, WEIGHT), {"qk_l2norm": (3, 3)}, "qk_l2norm=(3, 3); need positive numbers"),
    "out": ((X, POOL, WEIGHT), {"out": X[:1]}, "out has shape (1, 8); need (2, 8), as x has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CONV)
def test_wrong_arguments_of_the_convolution(name):
    given, named, text = WRONG_CONV[name]
    with pytest.raises(ValueError, match="causal_conv1d_update") as error:
        causal_conv1d_update(*given, **named)
    assert str(error.value).startswith("causal_conv1d_update: " + text), str(error.value)


def test_slots_that_share_memory_are_refused():
    with pytest.raises(Unsupported, match="slots of conv_state share memory"):
        causal_conv1d_update(X, torch.zeros(8, 3).expand(3, 8, 3), WEIGHT)


# The rule with its norm.


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("null_slot", [-1, 0])
def test_a_norm_is_one_after_the_rule(activation, null_slot):
    x = step(norm_eps=1e-3, z_activation=activation, null_slot=null_slot)
    y, plain = copied(x), without(copied(x), *NORM)
    o = packed_decode_gated_delta_rule(**plain)
    out = torch.full_like(o, torch.nan)
    assert packed_decode_gated_delta_rule(**y, out=out) is out
    gate = x["z"].sigmoid() if activation == "sigmoid" else silu(x["z"])
    want = rms_norm(o[:, 0], SIZES[1:], x["norm_weight"].double(), 1e-3) * gate
    assert_close("y", out[:, 0], want, EXACT)
    assert torch.equal(plain["initial_state"], y["initial_state"])
    assert not out[1].any()


def test_it_is_rounded_once():
    x = step(torch.bfloat16)
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in
            copied(x).items()}  # fmt: skip
    y = packed_decode_gated_delta_rule(**copied(x))
    assert y.dtype == torch.bfloat16
    assert_close("y", y, packed_decode_gated_delta_rule(**wide), 2.0**-9)


def wrong_norms() -> dict[str, tuple[dict[str, Any], str]]:
    x = step()
    z, weight = x["z"], x["norm_weight"]
    return {
        "weight alone": ({"z": None}, "norm_weight without z; need both, or neither"),
        "gate alone": ({"norm_weight": None}, "z without norm_weight; need both, or neither"),
        "gate's shape": ({"z": z[:3]}, "z has shape (3, 4, 8); need [N, HV, V]"),
        "gate's dtype": ({"z": z.float()}, "z is float32; need float64, as mixed_qkv"),
        "weight's shape": ({"norm_weight": weight[:4]}, "norm_weight has shape (4,); need [V]"),
        "eps": ({"norm_eps": -1.0}, "norm_eps is -1.0; need a float that is not negative"),
        "activation": ({"z_activation": "gelu"}, "z_activation='gelu'; need silu, swish or sig"),
    }


@pytest.mark.parametrize("name", wrong_norms())
def test_wrong_arguments_of_the_norm(name):
    changed, text = wrong_norms()[name]
    with pytest.raises(ValueError, match="packed_decode") as error:
        packed_decode_gated_delta_rule(**{**step(), **changed})
    assert str(error.value).startswith("packed_decode_gated_delta_rule: " + text), str(error.value)


def test_refusals_of_a_norm():
    z = torch.zeros(2, 4, 64)
    v, norm = torch.zeros(2, 1, 4, 64), Norm(z, torch.zeros(64), 1e-6, False)
    hopper = {"capability": (9, 0)}
    assert refused_norm("op", v, 64, norm, **hopper) is None
    assert refused_norm("op", v, 128, None, **hopper) is None
    assert "need K = V" in str(refused_norm("op", v, 128, norm, **hopper))
    assert "a last stride of 1" in str(refused_norm("op", v, 64, norm._replace(z=z.mT), **hopper))


# Both, as one call.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("null_slot", [-1, 0])
def test_a_step_is_its_parts(dtype, normed, null_slot):
    for by_channels in (False, True):
        x = gdn_step.convolved(step(dtype, null_slot=null_slot), by_channels=by_channels)
        x = x if normed else without(x, *NORM)
        y, z = copied(x), copied(x)
        rows = causal_conv1d_update(
            z["mixed_qkv"], *(z[n] for n in CONV), z["state_indices"], null_slot=null_slot
        )
        want = packed_decode_gated_delta_rule(**{**without(z, *CONV), "mixed_qkv": rows})
        first = y["mixed_qkv"].clone()
        out = torch.full_like(want, torch.nan)
        assert decode_gated_delta_net(**y, out=out) is out
        assert torch.equal(out, want)
        assert torch.equal(y["initial_state"], z["initial_state"])
        assert torch.equal(y["conv_state"], z["conv_state"])
        assert torch.equal(y["mixed_qkv"], first)
        assert torch.equal(decode_gated_delta_net(**copied(x)), want)


def test_a_layer_token_by_token():
    """Convolution, rule and norm over whole sequences, and the same in steps."""
    T, slots = 6, [3, 1]
    steps = [gdn_step.convolved(step(slots=slots)) for _ in range(T)]
    x = steps[0]
    rows = torch.stack([s["mixed_qkv"] for s in steps], 1)  # [N, T, channels]
    parameters = [x[n] for n in CONV[1:]]
    after = causal_conv1d(rows.mT, *parameters).mT
    qkv = [split("", after[:, t], x["initial_state"], True) for t in range(T)]
    q, k, v = (torch.cat(parts, 1) for parts in zip(*qkv, strict=True))
    a, b, z = (torch.stack([s[n] for s in steps], 1) for n in "abz")
    h0 = x["initial_state"][slots]
    o, states = fused_recurrent_gated_delta_rule(
        q, k, v, a, beta=b, initial_state=h0, A_log=x["A_log"], dt_bias=x["dt_bias"],
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        state_v_first=True, output_final_state=True,
    )  # fmt: skip
    want = rms_norm(o, SIZES[1:], x["norm_weight"].double(), 1e-6) * silu(z)
    pool, last = x["initial_state"], x["conv_state"]
    last[slots, :, :3] = 0
    shared = {n: x[n] for n in ("norm_weight", "A_log", "dt_bias", *CONV, "initial_state")}
    for t, given in enumerate(steps):
        y = decode_gated_delta_net(**{**given, **shared})
        assert_close("y", y[:, 0], want[:, t], EXACT)
    assert_close("states", pool[slots], states, EXACT)


def test_no_sequences():
    x = gdn_step.convolved(step(slots=[]))
    x["state_indices"] = torch.zeros(0, dtype=torch.int32)
    assert decode_gated_delta_net(**x).shape == (0, 1, HEADS[1], SIZES[1])


def test_wrong_arguments_of_a_step():
    x = gdn_step.convolved(step())
    for changed, text in (
        ({"conv_weight": x["conv_weight"][:8]}, "weight has shape (8, 4); need [channels, width]"),
        ({"conv_state": x["conv_state"][:, :8]}, "conv_state has shape (7, 8, 4); need [slots"),
        ({"conv_activation": "gelu"}, "activation='gelu'; need None, "),
        ({"a": x["a"][:, :2]}, "g has shape (4, 1, 2); need [B, T, HV]"),
        ({"state_indices": x["state_indices"][:2]}, "state_indices has shape (2,); need [N]"),
    ):
        with pytest.raises(ValueError, match="need") as error:
            decode_gated_delta_net(**{**x, **changed})
        assert str(error.value).startswith("decode_gated_delta_net: " + text), str(error.value)


def test_compiles_to_one_graph():
    x = gdn_step.convolved(step(torch.bfloat16))
    y, z = copied(x), copied(x)
    compiled = torch.compile(decode_gated_delta_net, fullgraph=True, backend="aot_eager")
    assert torch.equal(decode_gated_delta_net(**y), compiled(**z))
    assert torch.equal(y["initial_state"], z["initial_state"])
    assert torch.equal(y["conv_state"], z["conv_state"])
