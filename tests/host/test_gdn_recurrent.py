"""fused_recurrent_gated_delta_rule on the CPU: signature, values, pools of states, refusals."""

import inspect
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported, fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from qla_kernels.gdn import recurrent_refusal
from qla_kernels.lab.selftest.gdn_recurrent import check_pool, decode, pooled
from tests.compare import assert_close
from tests.gdn_calls import CALLS, call, definition, records

OPERATORS = torch.ops.qla_kernels
REQUIRED = inspect.Parameter.empty

# FLA 0.6.0: fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule, then **kwargs
FLA = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "g": None,
    "gk": None,
    "gv": None,
    "beta": None,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "A_log": None,
    "dt_bias": None,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
}
OURS = {"state_indices": None, "null_slot": -1, "out": None}
RECURRENT_CALLS = {name: kind for name, kind in CALLS.items() if name != "FLA's keywords"}


def run(x: dict[str, Any], **changed: Any) -> Any:
    return fused_recurrent_gated_delta_rule(**{**x, **changed}, output_final_state=True)


def test_names_order_and_defaults():
    parameters = inspect.signature(fused_recurrent_gated_delta_rule).parameters.values()
    named = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(named.items()) == list(FLA.items())
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == OURS
    assert fused_recurrent_gdn is fused_recurrent_gated_delta_rule


def test_signature_begins_like_that_of_an_installed_fla():
    fla = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)
    theirs = inspect.signature(fla.fused_recurrent_gated_delta_rule).parameters.values()
    assert {p.name: p.default for p in theirs if p.kind is not p.VAR_KEYWORD} == FLA


@pytest.mark.parametrize("kind", RECURRENT_CALLS)
def test_values_are_those_of_the_definition(kind):
    x = call(**RECURRENT_CALLS[kind])
    for name, got, want in zip(("o", "final state"), run(x), definition(x), strict=True):
        assert_close(name, got, want, 1e-12)


def test_a_beta_for_each_column():
    x = call(lengths=[3, 0, 5])
    x["beta"] = torch.rand_like(x["v"])
    o, state = run(x)
    for i in range(x["v"].shape[-1]):  # each column of V is a delta rule of its own
        one = {**x, "v": x["v"][..., i : i + 1], "beta": x["beta"][..., i]}
        one["initial_state"] = x["initial_state"][..., i : i + 1]
        want_o, want_state = definition(one)
        assert_close("o", o[..., i : i + 1], want_o, 1e-12)
        assert_close("state", state[..., i : i + 1], want_state, 1e-12)


def test_no_gate_and_no_beta():
    x = call()
    want = definition({**x, "g": torch.zeros_like(x["g"]), "beta": torch.ones_like(x["beta"])})
    for got, wanted in zip(run(x, g=None, beta=None), want, strict=True):
        assert_close("result", got, wanted, 1e-12)


def test_dtypes():
    x = decode(dtype=torch.bfloat16, activations=True)
    o, state = run(x)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert fused_recurrent_gated_delta_rule(**x)[1] is None


@pytest.mark.parametrize("lengths", [None, [1, 3, 0, 2, 1]])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_pool_is_updated_in_place(lengths, v_first, state):
    x = decode(lengths, sizes=(16, 8), state_v_first=v_first)
    x = pooled(x, [3, -1, 0, 4, -1] if lengths else [3, -1, 0], 6, state)
    before = x["initial_state"].clone()
    o, pool = run(x)
    assert pool is x["initial_state"]
    check_pool(x, before, o)
    x["state_indices"].fill_(-1)
    before = pool.clone()
    o, nothing = fused_recurrent_gated_delta_rule(**x)
    assert nothing is None
    assert not o.any()
    assert torch.equal(pool, before)


def test_prefill_then_decode_through_a_pool_is_one_long_call():
    from qla_kernels import chunk_gated_delta_rule

    x = call(batch=2, tokens=70, dtype=torch.float64)
    want_o, want_state = definition(x)
    first = {n: t[:, :66] if t.shape[1] == 70 else t for n, t in x.items()}
    o, states = chunk_gated_delta_rule(**first, output_final_state=True)
    pool = torch.zeros(5, *states.shape[1:], dtype=states.dtype)
    slots = torch.tensor([4, 1])
    pool[slots] = states
    parts = [o]
    for t in range(66, 70):
        token = {n: x[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        parts.append(
            fused_recurrent_gated_delta_rule(**token, initial_state=pool, state_indices=slots)[0]
        )
    assert_close("o", torch.cat(parts, 1), want_o, 1e-12)
    assert_close("state", pool[slots], want_state, 1e-12)


OP = "fused_recurrent_gated_delta_rule: "
INDICES = torch.tensor([0, 1])
MALFORMED = {
    "indices without a pool": (
        {"initial_state": None, "state_indices": INDICES},
        "state_indices without initial_state; need both",
    ),
    "number of indices": ({"state_indices": INDICES[:1]}, "state_indices has shape (1,); need [N]"),
    "dtype of indices": ({"state_indices": INDICES.float()}, "state_indices is float32; need"),
    "shape of the pool": (
        {"state_indices": INDICES, "initial_state": torch.zeros(7, 4, 8, 16)},
        "initial_state has shape (7, 4, 8, 16); need [slots, HV, K, V] = (7, 4, 16, 8)",
    ),
    "dtype of the pool": (
        {"state_indices": INDICES, "initial_state": torch.zeros(7, 4, 16, 8).int()},
        "initial_state is int32; need bfloat16, float16, float32 or float64",
    ),
    "no pool": (
        {"state_indices": INDICES, "initial_state": [0.0]},
        "initial_state is of type list; need a tensor",
    ),
    "no queries": ({"q": None, "g": None}, "q is of type NoneType; need a tensor"),
    "bounds": (
        {**call([9]), "cu_seqlens": torch.tensor([0, 10])},
        "cu_seqlens [0, 10]; need to start at 0, never fall, and end at or before T=9",
    ),
    "a slot twice": (
        {"state_indices": torch.tensor([1, 1])},
        "state_indices [1, 1], where 1 is there twice; need different ones, or negative",
    ),
    "a slot past the pool": (
        {"state_indices": INDICES + 1},
        "state_indices [1, 2], where 2 is past the 2 places; need numbers below 2, or negative",
    ),
    "padding whose low word is a slot": (
        {"state_indices": INDICES - (1 << 32)},
        "state_indices has -4294967296; need numbers that fit in int32; look at what made",
    ),
    "number of states": (
        {"initial_state": torch.zeros(7, 4, 16, 8)},
        "initial_state has shape (7, 4, 16, 8); need [B, HV, K, V] = (2, 4, 16, 8)",
    ),
    "beta": ({"beta": torch.zeros(2, 70, 4, 7)}, "beta has shape (2, 70, 4, 7); need [B, T, HV"),
    "a number for beta": ({"beta": 1.0}, "beta is of type float; need a tensor"),
    "a number for g": ({"g": 0.0}, "g is of type float; need a tensor"),
    "no input": ({"g": None, "use_gate_in_kernel": True}, "use_gate_in_kernel without g;"),
    "gate": ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log; need A_log"),
    "eigenvalues": (
        {"allow_neg_eigval": True},
        "allow_neg_eigval without use_beta_sigmoid_in_kernel; need both",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed(kind):
    changed, text = MALFORMED[kind]
    with pytest.raises(ValueError, match="fused_recurrent") as error:
        run(call(), **changed)
    assert str(error.value).startswith(OP + text)
    assert not isinstance(error.value, Unsupported)


def test_keywords():
    x = call(state_v_first=True)
    want = run(x)
    x.pop("state_v_first")
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = run(x, transpose_state_layout=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="drop transpose_state_layout"):
        run(x, transpose_state_layout=True, state_v_first=True)
    with pytest.raises(TypeError, match="unknown keyword cu_seqlen;"):
        run(x, cu_seqlen=None)
    advice = "inplace_final_state: drop it: .*; ssm_state_indices: pass state_indices to fused_rec"
    with pytest.raises(TypeError, match=f"need the names of FLA 0.6.0; {advice}"):
        run(x, ssm_state_indices=None, inplace_final_state=True)


def test_refusals():
    x = call()
    for name in ("gk", "gv"):
        with pytest.raises(Unsupported, match=f"got {name}; need None: one decay a head and token"):
            run(x, **{name: x["v"]})
    with pytest.raises(Unsupported, match=r"got gk; .*; if it is beta, pass that by its name; e"):
        fused_recurrent_gated_delta_rule(*(x[n] for n in ("q", "k", "v", "g", "beta")))
    shared = x["initial_state"][:1].expand_as(x["initial_state"])
    with pytest.raises(Unsupported, match="states of the pool share memory; need a place for each"):
        run(x, initial_state=shared, state_indices=INDICES)
    leaf = {**x, "v": x["v"].clone().requires_grad_()}
    with pytest.raises(Unsupported, match="state_indices while gradients are recorded"):
        run(leaf, state_indices=INDICES)
    with torch.no_grad():
        run(leaf, state_indices=INDICES)


def test_a_backward_is_refused():
    x = call()
    x["q"].requires_grad_()
    o, _ = run(x)
    with pytest.raises(Unsupported, match="a backward pass; need a forward alone"):
        o.sum().backward()


HOPPER = (9, 0)


def on_gpu(K: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    q, k, v = (torch.empty(4, 1, 8, K, dtype=dtype, device="meta") for _ in range(3))
    return {"q": q, "k": k, "v": v}


def pool_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_refusal_on_a_gpu():
    def ask(x: dict[str, torch.Tensor], pool: torch.Tensor | None = None, capability=HOPPER) -> Any:
        return recurrent_refusal(**x, pool=pool, capability=capability)

    assert ask(on_gpu()) is None
    assert ask(on_gpu(64, torch.float16), pool_of(9, 8, 64, 64)) is None
    assert ask(on_gpu(), pool_of(9, 8, 128, 128, dtype=torch.bfloat16)) is None
    assert ask(on_gpu(), pool_of(9, 8, 128 * 128 + 4)[..., 4:].unflatten(-1, (128, 128))) is None
    assert ask(on_gpu(), capability=(10, 0)).startswith(OP + "device capability 10.0; need 9.0")
    assert ask({**on_gpu(96), "v": on_gpu(192)["v"]}, pool_of(9, 8, 96, 192)) is None
    assert ask(on_gpu(90)).startswith(OP + "head dimension K=90; need a multiple of 16 up to 128")
    assert ask(on_gpu(dtype=torch.float16), pool_of(9, 8, 128, 128, dtype=torch.bfloat16)) == (
        OP + "the pool of states is bfloat16; need float32, or bfloat16 with q in bfloat16; "
        "keep it in float32"
    )
    for pool, strides in (
        (pool_of(9, 8, 128, 128).mT, "(131072, 16384, 1, 128)"),
        (pool_of(9, 8, 128, 130)[..., :128], "(133120, 16640, 130, 1)"),
    ):
        assert ask(on_gpu(), pool) == (
            OP + f"the pool of states has strides {strides}; need a last stride of 1 and the rest "
            "multiples of 4; allocate it contiguous, or set state_v_first"
        )


def test_contents_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("QLA_CHECK", "1")
    x = call(batch=3)
    run(x, state_indices=torch.tensor([2, -1, -1]))
    x["g"][1, 3] = torch.nan
    with pytest.raises(ValueError, match="g is NaN, first at token 3"):
        run(x)


@pytest.mark.parametrize("lengths", [None, [5, 0, 3]])
@pytest.mark.parametrize("final", [False, True])
def test_opcheck(lengths, final):
    x = call(lengths, tokens=3, activations=True, dtype=torch.float32)
    given, options = records(x, scale=0.25, output_final_state=final)
    if not final:
        given = given._replace(initial_state=None)
    torch.library.opcheck(OPERATORS.gdn_recurrent.default, (*given, *options))


@pytest.mark.parametrize("lengths", [None, [5, 0]])
def test_opcheck_of_a_pool(lengths):
    x = call(lengths, tokens=3, activations=True, dtype=torch.bfloat16, gates=torch.float32)
    given, options = records(x, scale=0.25, initial_state=None)
    pool = x["initial_state"], torch.tensor([1, -1]), torch.empty_like(x["v"])
    torch.library.opcheck(OPERATORS.gdn_recurrent_slots.default, (*given, *pool, -1, *options))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_to_one_graph(in_place):
    x = call(tokens=2, activations=True)
    if in_place:
        x["state_indices"] = INDICES.flip(0)
    y = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    compiled = torch.compile(fused_recurrent_gated_delta_rule, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = run(x)
        got = compiled(**y, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(x["initial_state"], y["initial_state"])


@pytest.mark.parametrize("in_place", [False, True])
def test_meta_tensors_give_shapes(in_place):
    x = {n: t.to("meta") if torch.is_tensor(t) else t for n, t in call().items()}
    if in_place:
        x["state_indices"] = INDICES.to("meta")
    o, state = run(x)
    assert o.is_meta
    assert (o.shape, state.shape) == (x["v"].shape, x["initial_state"].shape)
