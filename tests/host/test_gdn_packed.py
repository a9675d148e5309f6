"""packed_decode_gated_delta_rule, and `out` and `null_slot` of decoding, on the CPU."""

from typing import Any

import pytest
import torch

from qla_kernels import fused_recurrent_gated_delta_rule, packed_decode_gated_delta_rule
from qla_kernels.lab.selftest.gdn_recurrent import decode, pooled

OP = "packed_decode_gated_delta_rule: "
N, H, HV, K, V = 4, 2, 4, 16, 8


def plain(**others: Any) -> dict[str, Any]:
    x = decode(
        None, torch.bfloat16, (K, V), gates=torch.bfloat16, batch=N, tokens=1, heads=(H, HV),
        activations=True, **{"state_v_first": True, **others},
    )  # fmt: skip
    return pooled(x, [5, -1, 0, 3], 7)


def packed(x: dict[str, Any]) -> dict[str, Any]:
    """The same call on a packed projection, whose rows are slices of wider ones."""
    rows = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], 1)
    wide = torch.full((N, rows.shape[1] + 16), torch.nan, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    both = torch.stack([x["g"][:, 0], x["beta"][:, 0]], 1)
    return {
        "mixed_qkv": wide[:, : rows.shape[1]],
        "a": both[:, 0],
        "b": both[:, 1],
        "A_log": x["A_log"],
        "dt_bias": x["dt_bias"],
        "initial_state": x["initial_state"].clone(),
        "state_indices": x["state_indices"],
        "state_v_first": x["state_v_first"],
    }


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("null_slot", [-1, 0])
def test_it_is_the_call_on_separate_tensors(v_first, null_slot):
    x = plain(state_v_first=v_first)
    y = packed(x)
    want, _ = fused_recurrent_gated_delta_rule(**x, null_slot=null_slot)
    out = torch.full_like(want, torch.nan)
    assert packed_decode_gated_delta_rule(**y, null_slot=null_slot, out=out) is out
    assert torch.equal(out, want)
    assert torch.equal(x["initial_state"], y["initial_state"])
    assert torch.equal(packed_decode_gated_delta_rule(**packed(plain())).isnan(), out.isnan())


def test_slot_0_is_no_state_where_the_caller_says_so():
    x = plain()
    before = x["initial_state"].clone()
    o, _ = fused_recurrent_gated_delta_rule(**x, null_slot=0)
    assert not o[1:3].any()  # of slots -1 and 0
    assert o[0].any()
    assert torch.equal(x["initial_state"][:3], before[:3])
    twice = {**x, "state_indices": torch.tensor([0, 0, 0, 3])}
    fused_recurrent_gated_delta_rule(**twice, null_slot=0)
    with pytest.raises(ValueError, match="0 is there twice; need different ones, or negative"):
        fused_recurrent_gated_delta_rule(**twice)
    with pytest.raises(ValueError, match="null_slot is True; need -1, or 0"):
        fused_recurrent_gated_delta_rule(**x, null_slot=True)


def test_out_of_the_call_on_separate_tensors():
    x, y = plain(), plain()
    y = {**x, "initial_state": x["initial_state"].clone()}
    want, _ = fused_recurrent_gated_delta_rule(**x)
    out = torch.full_like(want, torch.nan)
    o, pool = fused_recurrent_gated_delta_rule(**y, out=out, output_final_state=True)
    assert o is out
    assert pool is y["initial_state"]
    assert torch.equal(out, want)
    y.pop("state_indices")
    y["initial_state"] = y["initial_state"][:N]
    with pytest.raises(ValueError, match="out without state_indices; need both"):
        fused_recurrent_gated_delta_rule(**y, out=out)


WIDTH = 2 * H * K + HV * V
MALFORMED = {
    "width": ({"mixed_qkv": torch.zeros(N, WIDTH - 1)}, f"mixed_qkv has {WIDTH - 1} columns; need"),
    "dimensions": ({"mixed_qkv": torch.zeros(N, 1, WIDTH)}, "mixed_qkv has shape (4, 1, 96), the"),
    "gates": ({"a": torch.zeros(N, HV + 1)}, "g has shape (4, 1, 5); need [B, T, HV]"),
    "gate's parameter": ({"A_log": None}, "use_gate_in_kernel without A_log"),
    "slots": ({"state_indices": torch.zeros(3).int()}, "state_indices has shape (3,); need [N]"),
    "out": ({"out": torch.zeros(N, HV, V)}, "out has shape (4, 4, 8); need [B, T, HV, V]"),
    "no pool": ({"initial_state": None}, "initial_state is of type NoneType; need a tensor"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    changed, text = MALFORMED[name]
    with pytest.raises(ValueError, match="packed_decode") as error:
        packed_decode_gated_delta_rule(**{**packed(plain()), **changed})
    assert str(error.value).startswith(OP + text), str(error.value)


def test_compiles_to_one_graph():
    x, y = packed(plain()), packed(plain())
    y = {n: t.clone() if n == "initial_state" else t for n, t in x.items()}
    compiled = torch.compile(packed_decode_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(packed_decode_gated_delta_rule(**x), compiled(**y))
    assert torch.equal(x["initial_state"], y["initial_state"])
