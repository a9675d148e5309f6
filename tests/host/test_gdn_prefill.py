"""prefill_gated_delta_rule on the CPU: values, slots, checkpoints, refusals."""

from typing import Any

import pytest
import torch

from qla_kernels import Unsupported, chunk_gated_delta_rule, prefill_gated_delta_rule
from qla_kernels.gdn import keywords, prefill_refusal
from qla_kernels.gdn.prefill import api, launch
from qla_kernels.lab.selftest.gdn_prefill import INPUTS, in_pool, kept, run
from qla_kernels.tile.constants import CHUNK
from tests.compare import assert_close
from tests.gdn_calls import call, definition, records

OP = "prefill_gated_delta_rule: "
TENSORS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("given", INPUTS, ids=str)
@pytest.mark.parametrize("states", [(torch.float32, torch.float32), (torch.bfloat16,) * 2], ids=str)
def test_values_and_places(given, states):
    run(given, (16, 8), torch.float32, "cpu", *states)


def packed(**others: Any) -> dict[str, Any]:
    x = in_pool(call([130, 0, 64], sizes=(16, 8), padding=2, **others), [4, 1, 2], 6, [4, 1, 0])
    return kept(x, 8, checkpoint_every=64, checkpoint_starts=torch.tensor([0, 2, 2, 3]))


def test_a_prefill_in_pieces_is_one_long_call():
    """Chunked prefill: a prompt comes in pieces of whole chunks, and starts from its own slot."""
    x = call(batch=1, tokens=200, sizes=(16, 8), activations=True)
    want_o, want = definition(x)
    pool = torch.randn(3, *x["initial_state"].shape[1:], dtype=torch.float64)
    pool[1] = x["initial_state"][0]
    slots, parts = torch.tensor([1]), []
    flags = {n: x[n] for n in x if n not in (*TENSORS, "initial_state")}
    for begin, end in ((0, 64), (64, 192), (192, 200)):
        piece = {n: x[n][:, begin:end] for n in TENSORS}
        parts.append(
            prefill_gated_delta_rule(**piece, **flags, initial_state=pool, state_indices=slots)
        )
    assert_close("o", torch.cat(parts, 1), want_o, 1e-12)
    assert_close("state", pool[1], want[0], 1e-12)


def test_it_is_the_chunked_form_with_gathers_and_scatters():
    x = packed()
    given = {n: x[n] for n in (*TENSORS, "cu_seqlens")}
    before = x["initial_state"].clone()
    o = prefill_gated_delta_rule(**x)
    want_o, want = chunk_gated_delta_rule(
        **given, initial_state=before[x["start_indices"]], output_final_state=True
    )
    assert_close("o", o, want_o, 1e-12)
    assert_close("states", x["initial_state"][x["state_indices"]], want, 1e-12)
    untouched = [0, 3, 5]
    assert torch.equal(x["initial_state"][untouched], before[untouched])


def test_out_is_written_and_returned():
    x, y = packed(), packed()
    y = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    want = prefill_gated_delta_rule(**x)
    out = torch.full_like(want, torch.nan)
    assert prefill_gated_delta_rule(**y, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("given", "cut"), [({}, False), ({"auto_cp": True}, True), ({"auto_cp": False}, False)], ids=str
)
def test_a_process_may_ask_for_one_arithmetic(given, cut, monkeypatch):
    heard = []
    monkeypatch.setattr(keywords, "INVARIANT_BY_DEFAULT", True)
    monkeypatch.setattr(api, "gdn_prefill", lambda call, places, options: heard.append(options))
    prefill_gated_delta_rule(**packed(), **given)
    assert [options.auto_cp for options in heard] == [cut]


ENTRIES = torch.zeros(8, 4, 16, 8, dtype=torch.float64)
MALFORMED = {
    "slots": (
        {"state_indices": torch.tensor([1])},
        "state_indices has shape (1,); need [N] = (3,)",
    ),
    "a slot twice": (
        {"state_indices": torch.tensor([1, 1, 2]), "start_indices": None},
        "state_indices [1, 1, 2], where 1 is there twice; need different ones, or negative",
    ),
    "a slot past the pool": (
        {"start_indices": torch.tensor([1, 6, 2])},
        "start_indices [1, 6, 2], where 6 is past the 6 places; need numbers below 6, or",
    ),
    "a slot whose low word is another": (
        {"state_indices": torch.tensor([0, (1 << 32) + 1, 2])},
        "state_indices has 4294967297; need numbers that fit in int32; look at what made",
    ),
    "a start whose low word is one": (
        {"start_indices": torch.tensor([0, 1 - (1 << 32), 2])},
        "start_indices has -4294967295; need numbers that fit in int32",
    ),
    "a checkpoint whose low word is one": (
        {"first_checkpoints": torch.tensor([1, -(1 << 32), 1])},
        "first_checkpoints has -4294967296; need numbers that fit in int32",
    ),
    "a start that another overwrites": (
        {"start_indices": torch.tensor([4, 4, 0])},
        "sequence 1 starts from slot 4, to which another one's final state goes; need a start",
    ),
    "dtype of starts": ({"start_indices": torch.zeros(3)}, "start_indices is float32; need int32"),
    "every": ({"checkpoint_every": 96}, "checkpoint_every is 96; need a multiple of 64"),
    "every 0": ({"checkpoint_every": 0}, "checkpoint_every is 0; need a multiple of 64"),
    "no tensor": ({"checkpoints": None}, "checkpoints are asked for without `checkpoints`; need"),
    "no distance": (
        {"checkpoint_every": None},
        "checkpoints alone; need checkpoint_every or first_checkpoints",
    ),
    "number of entries": (
        {"checkpoints": ENTRIES[:2]},
        "checkpoints at entries [0, 1, 2]; need different ones below 2",
    ),
    "shape of entries": (
        {"checkpoints": ENTRIES.mT},
        "checkpoints has shape (8, 4, 8, 16); need [entries, HV, K, V] = (8, 4, 16, 8)",
    ),
    "starts of entries": (
        {"checkpoint_starts": torch.tensor([0, 0])},
        "checkpoint_starts has shape (2,); need [N] = (3,)",
    ),
    "null slot": ({"null_slot": 2}, "null_slot is 2; need -1, or 0"),
    "both bounds": ({"exact": True, "warm_log_bound": -3.0}, "exact and warm_log_bound; need"),
    "out": ({"out": torch.zeros(1, 196, 4, 7)}, "out has shape (1, 196, 4, 7); need [B, T, HV"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    changed, text = MALFORMED[name]
    with pytest.raises(ValueError, match="prefill_gated") as error:
        prefill_gated_delta_rule(**{**packed(), **changed})
    assert str(error.value).startswith(OP + text), str(error.value)
    assert not isinstance(error.value, Unsupported)


def test_refusals():
    x = packed()
    shared = torch.zeros(1, 4, 16, 8, dtype=torch.float64).expand(6, 4, 16, 8)
    with pytest.raises(Unsupported, match="states of the pool of states share memory"):
        prefill_gated_delta_rule(**{**x, "initial_state": shared})

    def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def ask(dtype: torch.dtype, pool: torch.dtype) -> str | None:
        x = meta(dtype, 1, 70, 8, 128)
        states = meta(pool, 9, 8, 128, 128)
        return prefill_refusal(x, x, x, pool=states, capability=(9, 0))

    assert ask(torch.bfloat16, torch.bfloat16) is None
    assert ask(torch.bfloat16, torch.float32) is None
    assert "q, k and v are float16; need bfloat16" in (ask(torch.float16, torch.float32) or "")
    assert "pool of states is float16; need" in (ask(torch.bfloat16, torch.float16) or "")


@pytest.mark.parametrize("name", ["q", "beta", "initial_state"])
def test_it_is_refused_while_gradients_are_recorded(name):
    """It ran, and returned o without a gradient."""
    leaf = {**packed(), name: packed()[name].clone().requires_grad_()}
    before = leaf["initial_state"].clone()
    for _ in range(3):  # and is not replayed
        with pytest.raises(
            Unsupported, match="state_indices while gradients are recorded; need no"
        ):
            prefill_gated_delta_rule(**leaf)
    assert torch.equal(leaf["initial_state"], before)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = prefill_gated_delta_rule(**leaf)
        assert not o.requires_grad
        assert o.any()


def test_opcheck():
    x = packed()
    given, options = records(x, scale=0.25, initial_state=None)
    places = x["initial_state"], x["state_indices"], x["start_indices"], x["checkpoints"]
    tables = x["checkpoint_starts"], None, torch.empty_like(x["v"]), 64, -1
    operator = torch.ops.qla_kernels.gdn_prefill.default
    torch.library.opcheck(operator, (*given, *places, *tables, *options))


def test_compiles_to_one_graph():
    x = packed()
    y = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    compiled = torch.compile(prefill_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(prefill_gated_delta_rule(**x), compiled(**y))
    for name in ("initial_state", "checkpoints"):
        assert torch.equal(x[name], y[name])


def test_a_checkpoint_that_never_comes_is_a_number_that_kernels_take():
    """They add it to the chunk of the checkpoint before, in int32."""
    most = (1 << 31) // CHUNK  # chunks of a sequence
    assert most < launch.NEVER < (1 << 31) - most
