"""verify_gated_delta_rule on the CPU: values, places of states, refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported, verify_gated_delta_rule
from qla_kernels.lab.selftest import gdn_verify
from qla_kernels.lab.selftest.gdn_recurrent import decode
from qla_kernels.lab.selftest.gdn_verify import CHAINS, TREE, check_drafts, drafted
from tests import gdn_kept_tokens
from tests.compare import assert_close
from tests.gdn_calls import call, records

INPUTS = gdn_verify.CASES[0].inputs
OP = "verify_gated_delta_rule: "


@pytest.mark.parametrize("given", INPUTS, ids=str)
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_values_and_places(given, state):
    variant = SimpleNamespace(dtype="bfloat16", K=16, state=state)
    lengths, _, *others = given
    gdn_verify.CASES[0].check(variant, (lengths, 64, *others), "cpu")


def in_slots(**others: Any) -> dict[str, Any]:
    x = decode([5, 2, 1, 3], torch.float32, (16, 8), activations=True, **others)
    return drafted(x, CHAINS, 14, accepted=[2, 1, 1, 3])


def in_tree(**others: Any) -> dict[str, Any]:
    x = decode([6, 5, 3], torch.float32, (16, 8), **others)
    return drafted(x, [7, 3, 0], 9, rows=[2, 0, 1], steps=6, parents=TREE)


@pytest.mark.parametrize("given", [in_slots(), in_tree()], ids=["slots", "tree"])
def test_out_is_written_and_returned(given):
    other = {n: t.clone() if torch.is_tensor(t) else t for n, t in given.items()}
    want = verify_gated_delta_rule(**given)
    out = torch.full_like(want, torch.nan)
    assert verify_gated_delta_rule(**other, out=out) is out
    assert torch.equal(out, want)


def test_accepting_drafts_step_by_step_is_one_long_call():
    """A server's loop: verify four drafts, accept some, start from their state in the next step."""
    torch.manual_seed(3)
    accepted = [3, 1, 4, 2, 4]
    x = call(batch=1, tokens=sum(accepted) + 8, sizes=(16, 8))
    want_o, want = verify_reference(x, sum(accepted))
    pool = torch.randn(6, *x["initial_state"].shape[1:], dtype=torch.float64)
    table = torch.tensor([[4, 1, 3, 5]])
    pool[4] = x["initial_state"][0]
    begin, before = 0, 1
    for count in accepted:
        now = {n: x[n][:, begin : begin + 4] for n in ("q", "k", "v", "g", "beta")}
        o = verify_gated_delta_rule(
            **now, initial_state=pool, state_indices=table,
            num_accepted_tokens=torch.tensor([before]),
        )  # fmt: skip
        assert_close("o", o[:, :count], want_o[:, begin : begin + count], 1e-12)
        begin, before = begin + count, count
    assert_close("state", pool[table[0, before - 1]], want[0], 1e-12)


def verify_reference(x: dict[str, Any], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    from qla_kernels import fused_recurrent_gated_delta_rule

    given = {n: x[n][:, :tokens] for n in ("q", "k", "v", "g", "beta")}
    h0 = x["initial_state"]
    return fused_recurrent_gated_delta_rule(**given, initial_state=h0, output_final_state=True)


def test_kept_tokens_and_an_anchor():
    gdn_kept_tokens.check(torch.float64, (16, 8), 1e-12)


def test_nothing_is_kept_where_nobody_asks():
    x = drafted(decode([3, 2], torch.float32, (16, 8)), [1, 0], 3)
    before = x["initial_state"].clone()
    o = verify_gated_delta_rule(**x)
    assert torch.equal(x["initial_state"], before)
    check_drafts(x, {"initial_state": before}, o)


ENTRIES = torch.zeros(4, 6, 4, 16, 8)
MALFORMED = {
    "both places": ({"checkpoints": ENTRIES}, "checkpoints and state_indices [N, S]; need one"),
    "accepted numbers of one slot": (
        {"state_indices": torch.zeros(4, dtype=torch.int32)},
        "num_accepted_tokens and state_indices [N]; need a slot for each",
    ),
    "shape of the slots": (
        {"state_indices": torch.zeros(3, 5, dtype=torch.int32)},
        "state_indices has shape (3, 5); need [N] or [N, steps] with N=4",
    ),
    "dtype of accepted numbers": (
        {"num_accepted_tokens": torch.ones(4)},
        "num_accepted_tokens is float32; need int32 or int64",
    ),
    "accepted too many": (
        {"num_accepted_tokens": torch.tensor([1, 6, 1, 1])},
        "num_accepted_tokens [1, 6, 1, 1]; need numbers from 1 to 5",
    ),
    "a slot twice": (
        {"state_indices": torch.tensor([[0, 1, 2, 3, 4]] * 4)},
        "state_indices [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], ",
    ),
    "too many tokens": (
        {"state_indices": torch.tensor([[0], [1], [2], [3]]), "num_accepted_tokens": None},
        "sequences of [5, 2, 1, 3] tokens; need at most 1, the states kept of each",
    ),
    "null slot": ({"null_slot": 1}, "null_slot is 1; need -1, or 0 where slot 0"),
    "out": ({"out": torch.zeros(1, 14, 4, 8).bfloat16()}, "out is bfloat16; need float32, as v"),
    "strides of out": (
        {"out": torch.zeros(1, 14, 8, 4).mT},
        "out has strides (448, 32, 1, 4); need a contiguous one",
    ),
}
MALFORMED_TREES = {
    "rows alone": ({"checkpoints": None}, "checkpoint_indices alone; need checkpoints and"),
    "entries alone": (
        {"checkpoint_indices": None, "parents": None},
        "checkpoints alone; need checkpoints and checkpoint_indices",
    ),
    "parents alone": (
        {"checkpoints": None, "checkpoint_indices": None},
        "parents without checkpoints; need both",
    ),
    "dtype of entries": (
        {"checkpoints": ENTRIES.bfloat16()},
        "checkpoints is bfloat16; need float32, as initial_state",
    ),
    "shape of entries": (
        {"checkpoints": torch.zeros(4, 6, 4, 8, 16)},
        "checkpoints has shape (4, 6, 4, 8, 16); need [rows, S, HV, K, V] = (4, 6, 4, 16, 8)",
    ),
    "parents": (
        {"parents": torch.zeros(3, 7, dtype=torch.int64)},
        "7 parents a sequence; need at most S=6",
    ),
    "a parent behind its child": (
        {"parents": torch.tensor([[0, 1, 0, 0, 0, 0]] * 3)},
        "parents [1, 0, 0, 0, 0] of tokens 1, 2, ..; need tokens before them",
    ),
    "a parent whose low word is one": (
        {"parents": torch.tensor([[0, -(1 << 32), 0, 0, 0, 0]] * 3)},
        "parents has -4294967296; need numbers that fit in int32",
    ),
    "dtype of rows": (
        {"checkpoint_indices": torch.zeros(3)},
        "checkpoint_indices is float32; need",
    ),
    "number of rows": (
        {"checkpoint_indices": torch.tensor([1, 0])},
        "checkpoint_indices has shape (2,); need [N] = (3,)",
    ),
    "dtype of parents": ({"parents": torch.zeros(3, 6)}, "parents is float32; need int32 or int64"),
    "a row twice": (
        {"checkpoint_indices": torch.tensor([1, 1, 2])},
        "checkpoint_indices [1, 1, 2], where 1 is there twice; need different ones, or negative",
    ),
}


@pytest.mark.parametrize(
    ("given", "changed", "text"),
    [(in_slots, *MALFORMED[name]) for name in MALFORMED]
    + [(in_tree, *MALFORMED_TREES[name]) for name in MALFORMED_TREES],
    ids=[*MALFORMED, *MALFORMED_TREES],
)
def test_malformed(given, changed, text):
    with pytest.raises(ValueError, match="verify_gated_delta_rule") as error:
        verify_gated_delta_rule(**{**given(), **changed})
    assert str(error.value).startswith(OP + text), str(error.value)
    assert not isinstance(error.value, Unsupported)


def test_several_sequences_may_start_from_one_slot():
    """Of a pool that is not changed."""
    x = in_tree()
    other = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    x["state_indices"] = torch.tensor([7, 7, 0])
    other["initial_state"][3] = other["initial_state"][7]
    assert torch.equal(verify_gated_delta_rule(**x), verify_gated_delta_rule(**other))
    assert torch.equal(x["checkpoints"], other["checkpoints"])


def test_a_dense_batch_with_too_many_tokens():
    x = decode(None, torch.float32, (16, 8), tokens=3)
    with pytest.raises(ValueError, match="3 tokens a sequence; need at most S=2"):
        verify_gated_delta_rule(**drafted(x, [[0, 1], [2, 3], [4, 5]], 9))


def test_refusals():
    x = in_tree()
    apart = torch.zeros(2, 7, 4, 16, 8)[:, :6]
    with pytest.raises(Unsupported, match="need rows end to end"):
        verify_gated_delta_rule(**{**x, "checkpoints": apart})
    shared = torch.zeros(4, 6, 1, 16, 8).expand(4, 6, 4, 16, 8)
    with pytest.raises(Unsupported, match="states of the checkpoints share memory"):
        verify_gated_delta_rule(**{**x, "checkpoints": shared})


@pytest.mark.parametrize("form", ["slots", "tree", "nothing"])
def test_opcheck(form):
    x = in_slots() if form == "slots" else in_tree()
    given, options = records(x, scale=0.25, initial_state=None)
    pool, indices, o = x["initial_state"], x["state_indices"], torch.empty_like(x["v"])
    tables: tuple[Any, ...] = x.get("num_accepted_tokens"), None, None, None
    if form == "tree":
        tables = None, x["checkpoints"], x["checkpoint_indices"], x["parents"]
    operator = torch.ops.qla_kernels.gdn_verify.default
    torch.library.opcheck(operator, (*given, pool, indices, *tables, o, -1, *options))


@pytest.mark.parametrize("given", [in_slots, in_tree])
def test_compiles_to_one_graph(given):
    x = given()
    y = {n: t.clone() if torch.is_tensor(t) else t for n, t in x.items()}
    compiled = torch.compile(verify_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(verify_gated_delta_rule(**x), compiled(**y))
    for name in ("initial_state", "checkpoints"):
        if name in x:
            assert torch.equal(x[name], y[name])


def test_meta_tensors_give_shapes():
    x = {n: t.to("meta") if torch.is_tensor(t) else t for n, t in in_tree().items()}
    o = verify_gated_delta_rule(**x)
    assert o.is_meta
    assert o.shape == x["v"].shape
